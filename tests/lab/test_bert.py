"""The lab's BERT equals transformers', and its task masks batches as BERT does."""

import json

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from halfstep.errors import DataError, ModelError
from halfstep.lab.task import load_corpus
from halfstep.lab.tasks.mlm import BERT, MaskedLanguageModelling


MASK, NO_TARGET = 256, -100


def renamed(name):
    return name if name.startswith("cls.") else f"bert.{name}"


@pytest.mark.cpu
@pytest.mark.parametrize("tied", [False, True])
def test_equals_transformers_with_the_same_weights(tied):
    torch.manual_seed(0)
    model = BERT(64, 32, layers=2, width=48, heads=3, tied=tied)
    theirs = BertForMaskedLM(
        BertConfig(
            vocab_size=64,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=3,
            intermediate_size=192,
            max_position_embeddings=32,
            type_vocab_size=1,
            pad_token_id=None,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            tie_word_embeddings=tied,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():  # larger than at initialization, so that every part matters
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 2 else 1.0))
    state = {renamed(name): value for name, value in model.state_dict().items()}
    theirs.load_state_dict({**state, "cls.predictions.bias": state["cls.predictions.decoder.bias"]})
    assert (model.cls["predictions"].decoder.weight is model.embeddings.word_embeddings.weight) == tied
    ids = torch.randint(64, (3, 32))
    mine, expected = model(ids), theirs(ids).logits
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5 * float(expected.detach().abs().max()))
    mine.square().mean().backward()
    expected.square().mean().backward()
    others = dict(theirs.named_parameters(remove_duplicate=False))
    own = {renamed(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    assert own | {"cls.predictions.bias"} == set(others)
    for name, parameter in model.named_parameters():
        other = others[renamed(name)]
        # A key's bias shifts all logits of a row equally, so its gradient is zero up to rounding errors.
        scale = float(others[renamed(name.replace("key.bias", "query.bias"))].grad.abs().max())
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-5 * scale, msg=name)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    return path


def test_batches_mask_15_percent_as_bert_does(corpus):
    task = MaskedLanguageModelling(load_corpus(str(corpus), 40), 2000, 40)
    batch = task.batch(0, 1)
    tokens, targets = batch["tokens"], batch["targets"]
    chosen = targets != NO_TARGET
    assert (chosen.sum(1) == 6).all()  # 15% of 40
    text = torch.where(chosen, targets, tokens)
    assert int(text.max()) < MASK
    assert bytes(text[0].tolist()).decode() in corpus.read_text()
    places = chosen.float().mean(0)  # 0.15, with a standard deviation of 0.008
    assert float(places.min()) > 0.11
    assert float(places.max()) < 0.19
    masked, kept = float((tokens[chosen] == MASK).float().mean()), float((tokens == targets)[chosen].float().mean())
    assert masked == pytest.approx(0.8, abs=0.015)
    assert kept == pytest.approx(0.1 + 0.1 / 256, abs=0.012)
    others = tokens[chosen & (tokens != MASK) & (tokens != targets)]
    assert len(others.unique()) > 200  # random bytes, not bytes of the text


def test_loss_is_over_masked_positions_only(corpus):
    task = MaskedLanguageModelling(load_corpus(str(corpus), 16), 4, 16)
    batch = task.batch(0, 1)
    logits = torch.randn(4, 16, 257, requires_grad=True)
    task.loss(lambda tokens: logits, batch).backward()
    touched = logits.grad.abs().sum(-1) > 0
    assert torch.equal(touched, batch["targets"] != NO_TARGET)
    chosen = touched.nonzero().tolist()
    logits = logits.detach()
    picked = [float(logits[r, c].log_softmax(0)[batch["targets"][r, c]]) for r, c in chosen]
    assert float(task.loss(lambda tokens: logits, batch)) == pytest.approx(-sum(picked) / len(picked), rel=1e-5)


def test_short_contexts_and_wrong_logits_raise(corpus):
    with pytest.raises(DataError, match=r"context = 3 given; 15% of it is less than one position"):
        MaskedLanguageModelling(load_corpus(str(corpus), 3), 2, 3)
    task = MaskedLanguageModelling(load_corpus(str(corpus), 16), 4, 16)
    with pytest.raises(ModelError, match=r"returned \(4, 16, 256\); expected logits of shape \(4, 16, 257\)"):
        task.loss(lambda tokens: torch.zeros(4, 16, 256), task.batch(0, 1))


@pytest.mark.slow  # like lab/test_llama.py; conformance/test_every_task.py trains the task
def test_mlm_task_in_halfstep_compare(corpus, run, tmp_path, monkeypatch, unrendered):
    monkeypatch.chdir(tmp_path)
    options = ["--data", str(corpus), "--steps", "3", "--batch", "2", "--context", "16", "--baseline-seeds", "1"]
    code, out, _ = run("compare", "--task", "mlm", "--recipes", "fp32,fp8-cscale", *options, "--out", "x", "--json")
    assert code == 0
    summary = json.loads(out)
    assert summary["metric"]["name"] == "masked accuracy"
    assert [v["recipe"] for v in summary["verdicts"]] == ["fp32", "fp8-cscale"]
