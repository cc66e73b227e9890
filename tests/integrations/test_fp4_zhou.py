"""fp4-zhou on common models: attention's projections in FP8, feed-forward layers in FP4."""

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import halfstep
from halfstep.lab.models.gpt import GPT
from halfstep.lab.models.llama import Llama
from halfstep.lab.tasks.mlm import BERT
from halfstep.nn.layers import match
from halfstep.recipe import get_recipe


SMALL = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WIDE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
MODELS = {
    "gpt": lambda: GPT(64, 16, 1, 32, 2),
    "llama": lambda: Llama(64, 16, 1, 32, 2),
    "bert": lambda: BERT(64, 16, 1, 32, 2),
    "GPT-2": lambda: GPT2LMHeadModel(GPT2Config(**SMALL, n_layer=1, n_embd=32, n_head=2, n_positions=16)),
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, **WIDE)),
    "BERT": lambda: BertForMaskedLM(BertConfig(**SMALL, **WIDE)),
    "T5": lambda: T5ForConditionalGeneration(
        T5Config(**SMALL, num_layers=1, d_model=32, d_ff=64, d_kv=16, num_heads=2)
    ),
}
LLAMA, BERTS = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"query", "key", "value", "dense"}
ATTENTION = {
    "gpt": {"qkv", "proj"}, "llama": LLAMA, "bert": BERTS,
    "GPT-2": {"c_attn", "c_proj"}, "Llama": LLAMA, "BERT": BERTS, "T5": {"q", "k", "v", "o"},
}  # fmt: skip
FEED_FORWARD = {"gpt": 2, "llama": 3, "bert": 2, "GPT-2": 2, "Llama": 3, "BERT": 2, "T5": 4}
"""The number of feed-forward linear layers of each model."""
RECIPES = ("fp4-zhou-dgrad-fp8", "fp4-zhou-dgrad-bf16")


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", MODELS)
def test_attention_layers_are_fp8_and_feed_forward_fp4(kind, name):
    specs = match(MODELS[kind](), get_recipe(name), None).specs
    coarse = {path for path, spec in specs.items() if spec.output.lhs.format.bits == 4}
    fine = specs.keys() - coarse
    assert all(specs[path].output.rhs.format.bits == 8 for path in fine)
    assert {path.rpartition(".")[2] for path in fine} == ATTENTION[kind]
    assert all("ttention" in path or "attn" in path for path in fine)
    assert not any("ttention" in path or "attn" in path for path in coarse)
    assert len(coarse) == FEED_FORWARD[kind]
    for spec in specs.values():
        assert {spec.grad_weight.lhs.format.bits, spec.grad_weight.rhs.format.bits} == {8}
        dgrad = {None if q is None else q.format.bits for q in (spec.grad_input.lhs, spec.grad_input.rhs)}
        assert dgrad == ({8} if name.endswith("fp8") else {None})


def test_short_name_is_the_dgrad_fp8_variant():
    assert get_recipe("fp4-zhou") is get_recipe("fp4-zhou-dgrad-fp8")


def test_model_without_layers_to_round_raises():
    with pytest.raises(halfstep.errors.RecipeError, match=r"rule '\*' matched no layer .*Nearest: the model has none"):
        halfstep.apply(nn.Embedding(4, 4), "fp4-zhou")


@pytest.mark.parametrize("name", RECIPES)
def test_outputs_are_near_the_stock_models_and_equal_bf16_after_the_stage(name):
    """The output differs from bf16's by FP4's error, and after the stage change not at all."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (2, 16))

    def model():
        torch.manual_seed(1)
        return GPT(64, 16, 2, 32, 2)

    ours, plain = model(), model()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.0)
    _, optimizer, scaler = halfstep.prepare(ours, optimizer, f"{name} until 50%, then bf16-mixed", total_steps=2)
    halfstep.apply(plain, "bf16-mixed")
    with torch.no_grad():
        error = float((ours(tokens) - plain(tokens)).norm() / plain(tokens).norm())
    assert 0.005 < error < 0.3
    ours(tokens).square().mean().backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(ours(tokens), plain(tokens))


@pytest.mark.parametrize("later", ["", " until 50%, then bf16-mixed"])
@pytest.mark.parametrize("name", RECIPES)
def test_report_notes_if_no_layer_is_matched_as_attention(name, later):
    """In a model with other names, all layers are in FP4; one layer called attention suffices to silence the note."""
    line = "no layer is matched as attention, by *attn, *attn.*, *ttention, *ttention.*: later rules apply"
    for kind, expected in (("query", True), ("self_attn", False)):
        model = nn.ModuleDict({kind: nn.Linear(8, 8), "feed": nn.Linear(8, 8)})
        report = halfstep.apply(model, name + later)
        assert (line in " ".join(str(report).split())) == ("attention" in report.sought) == expected
