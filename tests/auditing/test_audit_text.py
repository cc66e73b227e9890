"""The text of an audit: line lengths and displayed values."""

import pytest
import torch
from torch import nn

import halfstep
from tiny import adamw, mlp, prepared, train


class Named(nn.Module):
    """A model with as many roles and as long names as a Hugging Face Transformer's."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(64, 32)
        layer = {"self_attn": nn.Linear(32, 32), "mlp": nn.Linear(32, 32), "input_layernorm": nn.LayerNorm(32)}
        self.transformer_of_a_long_name = nn.ModuleList([nn.ModuleDict(layer)])
        self.lm_head = nn.Linear(32, 64)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for module in self.transformer_of_a_long_name[0].values():
            x = module(x)
        return self.lm_head(x)


@pytest.mark.quick("bf16-kahan")
@pytest.mark.parametrize("recipe", ["bf16-nomaster", "bf16-kahan", "bf16-collage-plus", "fp8lm-o2", "fp8-delayed"])
def test_lines_have_at_most_100_characters(recipe):
    torch.manual_seed(0)
    model, optimizer, scaler = prepared(recipe, Named(), None)
    for _ in range(2):  # before a step, and after one
        report = halfstep.audit(model, optimizer, scaler)
        assert max(map(len, str(report).splitlines())) <= 100
        train(model, optimizer, scaler, data=(torch.arange(64), torch.arange(64)), loss_of=nn.functional.cross_entropy)


def test_scales_are_one_row_without_effective_precision():
    model, optimizer, scaler = prepared("fp8-delayed", Named(), None)
    train(model, optimizer, scaler, data=(torch.arange(64), torch.arange(64)), loss_of=nn.functional.cross_entropy)
    (scales,) = (row for row in halfstep.audit(model, optimizer).rows if row.kind == "scales")
    assert scales.effective is None
    assert scales.tensors > 3


def test_bf16_values_within_fp16_range_are_full_bf16():
    """fp16 holds bf16's 8 significant bits, so that values fit fp16 says nothing of their precision."""
    model = nn.Linear(64, 64, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.uniform_(1, 2)
        assert torch.equal(model.weight, model.weight.half().bfloat16())
    assert [row.effective for row in halfstep.audit(model).rows] == ["full"]
    model = model.float()
    assert [row.effective for row in halfstep.audit(model).rows] == ["bf16"]


def test_expanded_tensor_counts_its_stored_values():
    model = mlp()
    model.register_buffer("mask", torch.zeros(()).expand(50, 50))
    (row,) = (row for row in halfstep.audit(model, adamw(model)).rows if row.kind == "buffers")
    assert (row.numel, row.nbytes) == (1, 4)


def test_tiny_sizes_are_shown_as_less_than():
    model = nn.Linear(2, 2)
    text = str(halfstep.audit(model))
    assert " <0.001    4.000" in text
    assert " 0.000" not in text
