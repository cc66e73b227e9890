"""Recipes that round the operands of attention's two matmuls."""

import tomllib
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep import formats, get_quantizer, get_recipe, ops
from halfstep.errors import RecipeError
from halfstep.lab.models.gpt import GPT
from halfstep.nn import DotProductAttention
from halfstep.ops.attention import stacked_linear
from halfstep.quant import Quantizer, Scales
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import TENSOR
from halfstep.recipe import AttentionSpec, LinearSpec, from_data, linear_spec, to_data
from halfstep.recipe.data import to_toml
from halfstep.unit import Attention
from tiny import assert_same


pytestmark = pytest.mark.usefixtures("products")


E4, E5 = (Quantizer(formats.get(f), scales=Scales(TENSOR, get_scaling("current"))) for f in ("e4m3fn", "e5m2"))
MX = get_quantizer("mxfp8_e4m3", scale="rceil")
FP8 = linear_spec(input=E4, weight=E4, grad_output=E5)
SPEC = AttentionSpec(scores=FP8, mix=FP8)
DPA = replace(get_recipe("fp8-current"), name="dpa", attention=SPEC)
PLAIN = AttentionSpec()


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gpt():
    torch.manual_seed(0)
    return GPT(vocabulary=32, context=8, layers=2, width=16, heads=2)


@pytest.mark.parametrize("spec", [FP8, linear_spec(MX, MX, MX)], ids=["tensor", "blocks"])
def test_operands_are_rounded_along_the_contracted_dimension_of_each_matmul(spec):
    x, w = draw(2, 3, 64, 32).requires_grad_(), draw(2, 3, 96, 32, seed=1).requires_grad_()
    dy = draw(2, 3, 64, 96, seed=2)
    y = stacked_linear(x, w, spec, torch.float32)
    y.backward(dy)

    def rounded(t, quantizer):
        return quantizer.quantize(t.detach().contiguous()).dequantize(torch.float64)

    for found, (lhs, a), (rhs, b) in (
        (y.detach(), (x, spec.output.lhs), (w, spec.output.rhs)),
        (x.grad, (dy, spec.grad_input.lhs), (w.mT, spec.grad_input.rhs)),
        (w.grad, (dy.mT, spec.grad_weight.lhs), (x.mT, spec.grad_weight.rhs)),
    ):
        exact = rounded(lhs, a) @ rounded(rhs, b).mT
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)
        assert not torch.allclose(found.double(), (lhs.double() @ rhs.double().mT).detach(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("how", ["plain", "causal", "padding", "added"])
def test_attention_without_rounding_matches_scaled_dot_product_attention(how):
    q, k, v = (draw(2, 3, 7, 8, seed=i).requires_grad_() for i in range(3))
    mask = {"padding": (torch.arange(7) < 5).expand(7, 7), "added": draw(2, 1, 7, 7, seed=4)}.get(how)
    options = {"is_causal": how == "causal"}
    found = ops.attention(q, k, v, mask=mask, spec=PLAIN, **options)
    expected = F.scaled_dot_product_attention(q, k, v, mask, **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    grad = draw(2, 3, 7, 8, seed=5)
    for mine, torchs in zip(*(torch.autograd.grad(y, (q, k, v), grad) for y in (found, expected)), strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_under_autocast_returns_the_autocast_dtype(dtype):
    q, k, v = (draw(1, 2, 5, 16, seed=i) for i in range(3))
    with torch.autocast("cpu", dtype=dtype):
        found = ops.attention(q, k, v, spec=SPEC)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), F.scaled_dot_product_attention(q, k, v), rtol=0.2, atol=0.1)


def test_dropout_keeps_the_mean_of_the_output():
    q, k, v = draw(1, 1, 4, 8), draw(1, 1, 6, 8, seed=1), torch.ones(1, 1, 6, 8)
    torch.manual_seed(0)
    drawn = torch.stack([ops.attention(q, k, v, dropout=0.5, spec=PLAIN) for _ in range(400)])
    assert drawn.std() > 0.1
    assert abs(drawn.mean().item() - 1) < 0.05


def test_apply_rounds_and_reports_modules_that_compute_attention():
    model, plain = gpt(), gpt()
    report = halfstep.apply(model, DPA)
    assert report.attention == ("blocks.0.attention.mix", "blocks.1.attention.mix")
    assert "attention's two matmuls round their operands\n      blocks." in str(report)
    halfstep.apply(plain, "fp8-current")
    tokens = torch.arange(16).view(2, 8)
    assert not torch.equal(model(tokens), plain(tokens))
    torch.testing.assert_close(model(tokens), plain(tokens), rtol=0.1, atol=0.05)
    halfstep.revert(model)
    assert torch.equal(model(tokens), gpt()(tokens))


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_apply_rounds_the_matmuls_of_torchs_multihead_attention(weights, causal):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 2, batch_first=True, add_bias_kv=True)
    nn.init.normal_(layer.bias_k)
    x = draw(3, 5, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(5) if causal else None
    options = {"need_weights": weights, "attn_mask": mask, "is_causal": causal}
    stock, stock_weights = layer(x, x, x, **options)
    results = []
    for spec in (PLAIN, SPEC):
        recipe = replace(DPA, compute="fp32", rules=(), attention=spec)
        assert halfstep.apply(layer, recipe).attention == ("",)
        results.append(layer(x, x, x, **options))
        halfstep.revert(layer)
    (same, same_weights), (rounded, rounded_weights) = results
    torch.testing.assert_close(same, stock, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(rounded, stock, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(rounded, stock, rtol=0.2, atol=0.1)
    if weights:
        torch.testing.assert_close(same_weights, stock_weights)
        assert not torch.equal(rounded_weights, stock_weights)


@pytest.mark.slow
@pytest.mark.quick("own")
def test_rounded_attention_trains():
    model = gpt()
    model, optimizer, scaler = halfstep.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe=DPA)
    tokens = torch.arange(16).view(2, 8)
    losses = []
    for _ in range(15):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch does, as it traces
def test_a_traced_model_equals_eager():
    model = gpt()
    halfstep.apply(model, DPA)
    tokens = torch.arange(16).view(2, 8)
    assert_same(torch.compile(model, backend="aot_eager")(tokens), model(tokens))


def test_attention_rules_round_trip_through_dict_and_toml():
    assert from_data(to_data(DPA), get_recipe) == DPA
    assert from_data(tomllib.loads(to_toml(DPA)), get_recipe) == DPA
    scores = {"input": {"format": "e4m3fn", "tile": "tensor", "scale": "current"}}
    written = {"name": "mine", "base": "fp8-current", "attention": {"scores": scores}}
    recipe = from_data(written, get_recipe)
    assert recipe.attention.scores.output.lhs == E4
    assert recipe.attention.mix == LinearSpec()
    assert "scores: output float8_e4m3fn" in recipe.describe()


DELAYED = Quantizer(formats.get("e4m3fn"), scales=Scales(TENSOR, get_scaling("delayed")))


@pytest.mark.parametrize("quantizer", [DELAYED, get_quantizer("fp8_128x128")], ids=["state", "square"])
def test_unsupported_scalings_of_attention_are_refused(quantizer):
    with pytest.raises(RecipeError, match="its matmuls take scalings without a state"):
        AttentionSpec(scores=linear_spec(quantizer, quantizer, quantizer))


def test_a_model_without_attention_modules_is_refused():
    with pytest.raises(RecipeError, match="a recipe does not see functional calls"):
        halfstep.apply(nn.Sequential(nn.Linear(4, 4)), DPA)


@pytest.mark.parametrize(("attention", "message"), [
    ({"score": {}}, "unknown matmul of attention 'score'; nearest: scores"),
    ({"scores": {"inputs": "e4m3fn"}}, "unknown key of a matmul 'inputs'; nearest: input"),
    ({"scores": {"input": {"format": "e4m3fn", "tile": "tensor", "scale": "delayed"}}}, "without a state"),
    (3, "expected a table"),
])  # fmt: skip
def test_invalid_attention_data_is_refused(attention, message):
    with pytest.raises(RecipeError, match=message):
        from_data({"name": "mine", "base": "fp8-current", "attention": attention}, get_recipe)


def test_dot_product_attention_without_a_recipe_equals_torchs():
    q, k, v = (draw(2, 2, 5, 8, seed=i) for i in range(3))
    found = DotProductAttention()(q, k, v, is_causal=True)
    assert torch.equal(found, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    layer = DotProductAttention(dropout=0.5)
    assert not torch.equal(layer(q, k, v), layer.eval()(q, k, v))
    assert torch.equal(layer(q, k, v), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("square_root", [False, True])
def test_unit_scaled_attention_follows_a_recipe(square_root):
    """Rounded outputs and gradients are near the unrounded ones, so the unit-scaling factors stay."""
    torch.manual_seed(0)
    layer, x = Attention(32, 4, is_causal=True, square_root=square_root), draw(3, 9, 32).requires_grad_()

    def passes():
        layer.zero_grad()
        y = layer(x)
        (grad,) = torch.autograd.grad(y, x, draw(3, 9, 32, seed=1))
        return y.detach(), grad

    stock, results = passes(), []
    for spec in (PLAIN, SPEC):
        report = halfstep.apply(layer, replace(DPA, compute="fp32", rules=(), attention=spec))
        assert report.attention == ("",)
        results.append(passes())
        halfstep.revert(layer)
    same, rounded = results
    for expected, unrounded, found in zip(stock, same, rounded, strict=True):
        torch.testing.assert_close(unrounded, expected, rtol=1e-5, atol=1e-5)
        assert 1e-3 < (found - expected).norm() / expected.norm() < 0.1
    assert_same(list(passes()), list(stock))
    halfstep.apply(layer, replace(DPA, compute="bf16", rules=()))
    assert layer(x).isfinite().all()
