"""Linear layers whose matmuls sum with the recipe's accumulator: forward, backward, attention, and traced."""

import pytest
import torch

import halfstep
from halfstep import formats, ops
from halfstep.errors import RecipeError
from halfstep.kernels.cpu import accumulate as kernel
from halfstep.quant import Accumulator, Quantizer, Scales, get_accumulator
from halfstep.quant.accumulator import accumulate
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import TENSOR
from halfstep.recipe import AttentionSpec, LinearSpec, Matmul, Recipe, Rule, from_data, get_recipe, linear_spec, to_data
from tiny import assert_same


FP16 = get_accumulator("fp16")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["fp16", "bf16", "hopper"])
def test_all_matmuls_of_a_layer_use_the_accumulator(name):
    dtype = torch.float16 if name == "fp16" else torch.bfloat16
    sums = get_accumulator(name)
    x, w, b = draw(4, 5, 70).requires_grad_(), draw(6, 70, seed=1).requires_grad_(), draw(6, seed=2)
    with torch.autocast("cpu", dtype):
        y = ops.linear(x, w, b, linear_spec(accumulate=sums))
    grad = draw(4, 5, 6, seed=3).to(dtype)
    y.backward(grad)
    rows, weight, upper = (t.detach().to(dtype).float() for t in (x.view(20, 70), w, grad.view(20, 6)))
    plus = accumulate(rows, weight.t(), sums) + b.to(dtype).float()
    assert_same(y.detach(), plus.to(dtype).view(4, 5, 6))
    assert_same(x.grad, accumulate(upper, weight, sums).to(dtype).float().view(4, 5, 70))
    assert_same(w.grad, accumulate(upper.t(), rows, sums).to(dtype).float())


def test_each_matmul_may_have_its_own_accumulator():
    spec = LinearSpec(Matmul(), Matmul(accumulate=get_accumulator("bf16")), Matmul(accumulate=FP16))
    x, w = draw(8, 40).bfloat16().float().requires_grad_(), draw(9, 40, seed=1).bfloat16().float().requires_grad_()
    y = ops.linear(x, w, None, spec)
    assert_same(y, x @ w.t())
    y.backward(torch.ones_like(y))
    ones = torch.ones(8, 9)
    assert_same(x.grad, accumulate(ones, w.detach(), get_accumulator("bf16")))
    assert_same(w.grad, accumulate(ones.t(), x.detach(), FP16))


@pytest.mark.parametrize(
    ("pair", "margin", "overflows"),
    [("forward", 0, True), ("forward", 1, False), ("forward", 3, False), ("backward", 3, True), ("backward", 6, False)],
)
def test_fp16_sums_of_scaled_operands_overflow_without_a_margin(pair, margin, overflows):
    """The scale is applied after the sum. Perez et al. 2023, arXiv 2309.17224, take a margin of 3, which is too small
    for the backward matmuls of normal data."""
    scaling = Scales(TENSOR, get_scaling("rceil", margin=margin))
    e4, e5 = (Quantizer(formats.get(name), scales=scaling) for name in ("e4m3fnuz", "e5m2fnuz"))
    x, w = draw(64, 512).half(), draw(64, 512, seed=1).half()
    y = ops.linear(x, w, None, linear_spec(e4 if pair == "forward" else e5, e4, e5, FP16))
    assert bool(y.isinf().any()) == overflows


def test_attentions_matmuls_use_the_accumulator():
    q, k, v = (draw(2, 3, 11, 8, seed=seed).bfloat16() for seed in range(3))
    sums = get_accumulator("bf16")
    spec = linear_spec(accumulate=sums)
    y = ops.attention(q, k, v, spec=AttentionSpec(spec, spec))
    for i in range(2):
        for j in range(3):
            scores = accumulate(q[i, j].float(), k[i, j].float().t(), sums) * 8**-0.5
            weights = scores.softmax(-1).bfloat16().float()
            assert_same(y[i, j], accumulate(weights, v[i, j].float(), sums).bfloat16())


def test_formats_without_a_kernel_use_the_reference():
    sums = Accumulator(formats.get("e6m5"), block=4)
    x, w = draw(3, 20).bfloat16().float(), draw(2, 20, seed=1).bfloat16().float()
    assert not kernel.run(x, w, torch.zeros(3, 2), sums)
    assert_same(ops.linear(x, w, None, linear_spec(accumulate=sums)), accumulate(x, w.t(), sums))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch does, as it traces
@pytest.mark.parametrize("name", [pytest.param("fp16-accumulate", marks=pytest.mark.slow), "bf16-accumulate"])
def test_a_traced_model_equals_eager(name):
    model = torch.nn.Linear(24, 5)
    halfstep.apply(model, name)
    x = draw(7, 24)
    expected = model(x)
    assert_same(torch.compile(model, backend="aot_eager", fullgraph=True)(x), expected)
    expected.sum().backward()
    grad = model.weight.grad.clone()
    model.weight.grad = None
    torch.compile(model, backend="aot_eager")(x).sum().backward()
    assert_same(model.weight.grad, grad)


def test_accumulators_round_trip_through_data():
    data = {
        "name": "mine",
        "compute": "bf16",
        "rules": [
            {"path": "*", "accumulate": "hopper", "grad_weight": {"accumulate": {"format": "fp16", "block": 16}}}
        ],
    }
    recipe = from_data(data, get_recipe)
    spec = recipe.rules[-1].linear
    assert spec.output.accumulate == spec.grad_input.accumulate == get_accumulator("hopper")
    assert spec.grad_weight.accumulate == Accumulator(formats.get("fp16"), 16)
    assert from_data(to_data(recipe), get_recipe) == recipe
    assert "sums in e8m13, 32 aligned at a time, into float32 every 128" in " ".join(recipe.describe().split())


@pytest.mark.parametrize(
    ("accumulate", "message"),
    [
        ("hoper", "unknown format 'hoper'"),
        ({"block": 4}, "an accumulator without a format"),
        ({"format": "fp16", "size": 4}, "unknown key of an accumulator 'size'"),
        ({"format": "fp16", "block": 0}, "expected a positive number of terms"),
        ({"format": "fp16", "block": "4"}, "block = '4' found; expected an integer"),
        (4, "accumulate = 4 found; expected a name or a table"),
    ],
)
def test_invalid_accumulators_are_refused(accumulate, message):
    with pytest.raises(RecipeError, match=message):
        from_data({"name": "mine", "rules": [{"path": "*", "accumulate": accumulate}]}, get_recipe)


def test_a_recipe_with_an_accumulator_is_not_native():
    recipe = Recipe("mine", "", "", compute="bf16", rules=(Rule("*", linear_spec(accumulate=FP16)),))
    assert halfstep.is_native_available(recipe, "cpu", return_reason=True) == (False, "mine rounds no operand")
