"""`halfstep scales`: every way to give a model, output, plots, and bad arguments."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import BertConfig, BertForMaskedLM


SCRIPT = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.first = nn.Embedding(32, 8) if inputs == "tokens" else nn.Linear(4, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))

def tokens(): return Small("tokens")
def numbers(): return Small("numbers"), torch.arange(8.0).view(2, 4)
def alone(): return Small("numbers")
"""


@pytest.fixture
def scales(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(SCRIPT)
    return lambda *words: run("scales", *words)


@pytest.fixture
def config(tmp_path):
    """Writes the config of a small BERT, without weights, to the folder `bert`; returns it."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    made = BertConfig(vocab_size=50, max_position_embeddings=16, architectures=["BertForMaskedLM"], **sizes)
    made.save_pretrained(tmp_path / "bert")
    return made


def tensors(out, place=0):
    found = json.loads(out)["scales"][place]["tensors"]
    return {(t["kind"], t["module"], t["tensor"]): t for t in found}


def test_config_is_built_with_random_weights(scales, config, tmp_path):
    code, out, _ = scales("bert/config.json", "--batch", "3", "--context", "99", "--json")
    assert code == 0
    found = tensors(out)
    assert found["activation", "bert.embeddings.word_embeddings", "output"]["values"] == 3 * 16 * 16  # cut to 16 tokens
    torch.manual_seed(0)
    own = BertForMaskedLM(config)
    weight = own.bert.encoder.layer[1].output.dense.weight
    key = "weight", "bert.encoder.layer.1.output.dense", "weight"
    assert found[key]["std"] == pytest.approx(float(weight.detach().std(correction=0)), rel=1e-5)
    assert json.loads(out)["scales"][0]["loss"] == "the model's own"
    assert {kind for kind, *_ in found} == {"activation", "activation gradient", "weight", "weight gradient"}
    assert tensors(scales("bert", "--json", "--seed", "1")[1])[key]["std"] != found[key]["std"]
    assert scales("bert/config.json", "--batch", "3", "--context", "99", "--json")[1] == out


def test_tables_state_inputs_and_steps(scales):
    code, out, _ = scales("own.py:tokens", "--steps", "4", "--lr", "0.1", "--context", "5", "--batches", "2")
    assert code == 0
    assert out.startswith("Small, 328 parameters; 2 batches of random tokens, 4 x 5; loss: the outputs times fixed")
    assert "\nAt the start: standard deviations\n" in out
    assert "\nAfter 4 steps of AdamW at 0.1: standard deviations\n" in out
    lines = [line.split() for line in out.splitlines()]
    before, after = (line for line in lines if line[:2] == ["second", "Linear"])
    assert before != after
    assert [line[0] for line in lines if line[:2] == ["activation", "gradient"]] == ["activation"] * 2


def test_inputs_of_the_model_or_of_a_file(scales, tmp_path):
    code, out, _ = scales("own.py:numbers")
    assert (code, "the inputs that came with the model" in out) == (0, True)
    save_file({"x": torch.ones(7, 4)}, tmp_path / "x.safetensors")
    code, out, _ = scales("own.py:numbers", "--data", "x.safetensors", "--json", "--formats", "bf16,e3m4")
    found = tensors(out)["activation", "first", "input"]
    assert (code, found["values"], found["std"], found["mean"]) == (0, 28, 0.0, 1.0)
    assert list(found["formats"]) == ["bf16", "float8_e3m4"]
    code, out, _ = scales("own.py:alone", "--data", "x.safetensors")
    assert (code, "the tensors in x.safetensors" in out) == (0, True)


@pytest.mark.slow
def test_lab_models_are_measured_on_their_tasks(scales, tmp_path):
    (tmp_path / "text.txt").write_text("some text\n" * 500)
    code, out, _ = scales("bert-tiny", "--task", "mlm", "--context", "16", "--json", "--plot", "scales.svg")
    assert code == 0
    assert json.loads(out)["scales"][0]["data"] == "1 x 64 tokens of the task mlm"
    assert tensors(out)["activation", "cls.predictions.decoder", "output"]["values"] == 64 * 257
    assert "encoder.layer.1.output" in (tmp_path / "scales.svg").read_text()
    code, out, _ = scales("cnn", "--task", "vision", "--batch", "8")
    assert (code, "1 x 8 images of the task vision" in out) == (0, True)


@pytest.mark.slow
def test_unit_scaled_models_are_measured_with_plain_ones(scales, config, tmp_path):
    code, out, _ = scales("bert", "--batch", "8", "--context", "16", "--unit", "--steps", "1", "--json")
    assert code == 0
    found = json.loads(out)["scales"]
    after = "after 1 step of AdamW at 0.0001"
    assert [each["moment"] for each in found] == [
        "at the start",
        after,
        "unit-scaled, at the start",
        f"unit-scaled, {after}",
    ]
    deviations = {}
    for place in (0, 2):
        kept = tensors(out, place).items()
        deviations[place] = {k: t["std"] for k, t in kept if k[0] != "weight gradient" and k[2] == "output"}
    assert all(0.1 < std < 10 for std in deviations[2].values())
    assert min(deviations[0].values()) < 1e-3
    code, out, _ = scales("gpt-tiny", "--task", "lm", "--context", "16", "--unit", "--plot", "unit.png")
    assert (code, "\nUnit-scaled, at the start: standard deviations\n" in out) == (0, True)
    code, out, _ = scales("own.py:numbers", "--unit", "--json")
    assert tensors(out, 1)["weight", "second", "weight"]["std"] == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "unknown architecture 'nowhere'"),
        (["bert-tiny", "--task", "mml"], "unknown task 'mml'; nearest: mlm"),
        (["gpt-tiny", "--task", "mlm"], "unknown model 'gpt-tiny'"),
        (
            ["bert-tiny", "--task", "mlm", "--data", "x.pt"],
            "--task mlm brings its own data; leave --data out, or --task",
        ),
        (["own.py:tokens", "--data", "text.txt"], "text.txt: expected tensors in .safetensors or .pt"),
        (["own.py:alone"], "Small has no embedding of tokens, and what it takes is not known; give --data"),
        (["own.py:nothing"], "unknown function 'nothing'"),
        (["own.py:tokens", "--formats", "fp61"], "unknown format 'fp61'"),
        (["own.py:tokens", "--formats", ","], "no format given to hold the scales against"),
        (["own.py:tokens", "--plot", "x.xyz"], "cannot write 'x.xyz'"),
        (["own.py:tokens", "--plot", "no/x.png"], "cannot write 'no/x.png': its folder does not exist"),
        (["weights.safetensors"], "is a checkpoint, which has no forward pass; give its config.json"),
    ],
)
def test_bad_input_exits_2_with_one_message(scales, tmp_path, words, message):
    save_file({"x": torch.ones(2, 2)}, tmp_path / "weights.safetensors")
    code, _, error = scales(*words)
    assert code == 2
    assert message in " ".join(error.split())
    assert "Traceback" not in error
