"""`halfstep probe` on folders of Hugging Face models."""

import json

import pytest
import torch
from zoo import MEMBERS

import halfstep
from families import slow_unless


@pytest.fixture
def saved(tmp_path):
    """A function that saves a model of the zoo, optionally changed, to a folder."""

    def save(kind, change=lambda model: None):
        model = MEMBERS[kind].build()
        with torch.no_grad():
            change(model)
        model.save_pretrained(tmp_path / kind)
        return tmp_path / kind

    return save


def tall_wo(model):
    """As in T5 checkpoints: outputs of `wo` exceed 65504, and the following norms bring them back."""
    for stack in (model.encoder, model.decoder):
        for block in stack.block:
            block.layer[-1].DenseReluDense.wi.weight *= 100
            block.layer[-1].DenseReluDense.wo.weight *= 400


def probe(run, folder, *words):
    return run("probe", str(folder), "--batches", "1", "--context", "12", *words)


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_unless("llama".__eq__, ["t5", "gpt2", "llama", "bert"]))
def test_healthy_model_is_safe(run, saved, kind):
    code, out, _ = probe(run, saved(kind), "--json")
    found = json.loads(out)
    assert code == 0, found["first_failure"]
    assert found["conditions"]["loss"] == "the model's own"
    assert found["conditions"]["data"].endswith("modulo the vocabulary of 64: no tokenizer came with the model")
    assert sum(r["residual"] for r in found["ranges"]) >= 8
    assert any(r["role"] in ("attention logits", "product") for r in found["ranges"])


@pytest.mark.slow
def test_suggestion_for_t5_keeps_wo_in_float32(run, saved):
    code, out, _ = probe(run, saved("t5", tall_wo), "--json")
    found = json.loads(out)
    assert code == 1
    assert found["first_failure"] == "output of encoder.block.0.layer.1.DenseReluDense.wo (Linear)"
    kept = found["suggestion"]["float32_modules"]
    assert kept
    assert all(place.endswith(".DenseReluDense.wo") for place in kept)
    assert found["tried"][-1]["passed"]
    assert found["tried"][-1]["output_error"] < 0.02


def test_verdict_includes_the_knowledge_base_entry(run, saved, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = saved("gpt2")
    (folder / "README.md").write_text("---\nbase_model: google/flan-t5-xxl\n---\n")
    code, out, _ = probe(run, folder)
    assert code == 0
    assert "says: risky" in out
    assert "reports of failures: halfstep kb check" in out


def test_image_model_needs_tensors(run, saved, tmp_path):
    folder = saved("vit")
    code, _, err = probe(run, folder)
    assert code == 2
    assert "takes pixel_values, not text; give its inputs as tensors" in " ".join(err.split())
    torch.save({"pixel_values": torch.randn(2, 3, 8, 8)}, tmp_path / "x.pt")
    assert probe(run, folder, "--data", str(tmp_path / "x.pt"))[0] == 0


def test_folders_that_cannot_be_loaded_exit_2(run, saved):
    folder = saved("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert "of the model's weights" in " ".join(probe(run, folder)[2].split())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchModel"]}))
    assert "names the architecture ['NoSuchModel']" in " ".join(probe(run, folder)[2].split())
    (folder / "config.json").write_text("{")
    code, _, err = probe(run, folder)
    assert code == 2
    assert "cannot be loaded" in err


def test_mixture_of_experts_with_given_batches_is_safe():
    member = MEMBERS["mixtral"]
    assert halfstep.probe_model(member.build(), data=[member.batch()]).safe
