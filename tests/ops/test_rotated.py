"""Matmuls whose operands are multiplied by a Hadamard transform: against a reference, and what is refused."""

from dataclasses import replace
from functools import partial
from itertools import product as pairs

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfstep
from families import slow_unless
from halfstep import formats, ops
from halfstep.errors import RecipeError
from halfstep.ops.attention import stacked_linear
from halfstep.ops.convolution import Window
from halfstep.quant import Hadamard, Quantizer, get_quantizer, rotate
from halfstep.recipe import COAT, LinearSpec, Matmul, Multiplier, Recipe, Rule, from_data, linear_text, to_data
from halfstep.tracking.step import operand_errors
from oracles.numbers import same_bits
from tiny import assert_same, mlp


FP4 = get_quantizer("mxfp4")
NV = get_quantizer("nvfp4")
EXACT = Quantizer(formats.get("fp32"))
R16, R32 = Hadamard(), Hadamard(32, 5)
PRODUCTS = ("output", "grad_input", "grad_weight")


def spec_of(quantizer=FP4, **rotations):
    """The same quantizer for all operands, and Hadamard transforms for the named matmuls."""
    return LinearSpec(**{name: Matmul(quantizer, quantizer, hadamard=rotations.get(name)) for name in PRODUCTS})


def recipe_of(linear, **fields):
    rules = (Rule("*", linear),)
    return Recipe("made", "a summary", "a source", compute="bf16", rules=rules, **fields)


def tensors(rows=37, fan_in=40, fan_out=24):
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (
        torch.randn(*shape, generator=generator) for shape in ((rows, fan_in), (fan_out, fan_in), (rows, fan_out))
    )
    return x.requires_grad_(), w.requires_grad_(), dy


def results(function, x, w, dy):
    y = function(x, w)
    return y.detach(), *torch.autograd.grad(y, (x, w), dy)


def linear(spec):
    return lambda x, w: ops.linear(x, w, None, spec)


def reference(spec, x, w, dy):
    """Each matmul by its definition: both operands rotated along the contracted dimension, then rounded."""

    def times(a, b, matmul):
        """a (rows, shared) times the transpose of b (columns, shared)."""
        if matmul.hadamard is not None:
            a, b = (rotate(side, matmul.hadamard.signs()) for side in (a, b))
        return matmul.lhs(a) @ matmul.rhs(b).t()

    x, w = x.detach(), w.detach()
    return times(x, w, spec.output), times(dy, w.t(), spec.grad_input), times(dy.t(), x.t(), spec.grad_weight)


@pytest.mark.quick("32-which1-mxfp4", "32-which3-mxfp4", "1-which1-mxfp4")
@pytest.mark.parametrize("quantizer", [FP4, NV], ids=["mxfp4", "nvfp4"])
@pytest.mark.parametrize("which", [(), *[(name,) for name in PRODUCTS], PRODUCTS])
@pytest.mark.parametrize("rows", [37, 32, 1])
def test_rotated_matmuls_equal_the_reference(quantizer, which, rows):
    spec = spec_of(quantizer, **dict.fromkeys(which, R16))
    x, w, dy = tensors(rows)
    for found, expected in zip(results(linear(spec), x, w, dy), reference(spec, x, w, dy), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


ROTATIONS = (R16, R32, Hadamard(64, "random"))


@pytest.mark.parametrize(
    ("hadamard", "which"), slow_unless((R16, "output").__eq__, pairs(ROTATIONS, PRODUCTS)), ids=str
)
def test_rotations_of_unrounded_operands_cancel(hadamard, which):
    """And they change the rounded operands of their matmul only."""
    x, w, dy = tensors()
    found = results(linear(spec_of(EXACT, **{which: hadamard})), x, w, dy)
    for actual, expected in zip(found, results(linear(spec_of(EXACT)), x, w, dy), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)
    rounded = results(linear(spec_of(FP4, **{which: hadamard})), x, w, dy)
    plain = results(linear(spec_of(FP4)), x, w, dy)
    changed = [not torch.equal(a, b) for a, b in zip(rounded, plain, strict=True)]
    assert changed == [which == name for name in PRODUCTS]


def test_a_rotated_tensor_is_rounded_separately_for_each_matmul():
    """Square tiles and per-tensor scales, whose values are shared between matmuls without a rotation."""
    for tiles in (get_quantizer("fp8_128x128", scale="rceil"), get_quantizer("int8_tensor")):
        spec = spec_of(tiles, grad_weight=R16)
        assert spec_of(tiles).rerounded == frozenset()
        assert spec.rerounded == {"input", "grad_output"}
        x, w, dy = tensors()
        for found, expected in zip(results(linear(spec), x, w, dy), reference(spec, x, w, dy), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert spec_of(output=R16).rerounded == {
        "input",
        "weight",
        "grad_output",
    }  # blocks lie along each matmul's contracted dimension
    current = halfstep.get_recipe("fp8-current").rules[-1].linear
    assert current.input_codes is not None
    rotated = replace(current, grad_weight=replace(current.grad_weight, hadamard=R16))
    assert rotated.input_codes is None
    with pytest.raises(RecipeError, match="no rule rounds inputs so"):
        recipe_of(rotated, saved=replace(COAT, nonlinear=None))


@pytest.mark.parametrize("which", [("output",), ("grad_input",), PRODUCTS])
@pytest.mark.parametrize("seed", [3, "random"])
def test_a_weight_rounded_for_several_calls_keeps_its_signs(which, seed):
    spec = spec_of(EXACT, **dict.fromkeys(which, Hadamard(16, seed)))
    x, w, dy = tensors()
    found = results(lambda x, w: ops.linear(x, ops.rounded_weight(w, spec, torch.float32), None, spec), x, w, dy)
    for actual, expected in zip(found, results(linear(spec_of(EXACT)), x, w, dy), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


def test_a_multiplier_uses_the_unpadded_dimension():
    """A rotation pads 37 rows with zeros to 48."""
    x, w, dy = tensors()
    times = LinearSpec(*[Matmul(multiplier=Multiplier(shared=-0.5))] * 3)
    plain = results(linear(spec_of(EXACT).times(times)), x, w, dy)
    found = results(linear(spec_of(EXACT, **dict.fromkeys(PRODUCTS, R16)).times(times)), x, w, dy)
    for actual, expected in zip(found, plain, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "dtype",
    slow_unless({torch.float64}.__contains__, [torch.bfloat16, torch.float64, torch.float16]),  # another compilation
)
def test_rotated_matmuls_in_other_dtypes_match_the_reference(dtype):
    spec = spec_of(**dict.fromkeys(PRODUCTS, R16))
    x, w, dy = (t.detach().to(dtype) for t in tensors())
    found = results(linear(spec), x.requires_grad_(), w.requires_grad_(), dy)
    wide = torch.promote_types(dtype, torch.float32)
    for actual, expected in zip(found, reference(spec, x.to(wide), w.to(wide), dy.to(wide)), strict=True):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.to(wide), expected, rtol=2 * torch.finfo(dtype).eps + 1e-6, atol=1e-2)


def test_an_empty_batch_gives_zero_weight_gradients():
    spec = spec_of(**dict.fromkeys(PRODUCTS, R16))
    x, w, dy = tensors(rows=0)
    y, dx, dw = results(linear(spec), x, w, dy)
    assert y.shape == (0, 24)
    assert dx.shape == x.shape
    assert torch.equal(dw, torch.zeros_like(w))


@pytest.mark.parametrize("which", PRODUCTS)
def test_rotations_of_stacked_matrices_cancel(which):
    spec = spec_of(EXACT, **{which: R16})
    q, k = (torch.randn(2, 3, 21, 8, requires_grad=True) for _ in range(2))
    dy = torch.randn(2, 3, 21, 21)
    expected = results(lambda q, k: q @ k.mT, q, k, dy)
    for actual, wanted in zip(
        results(lambda q, k: stacked_linear(q, k, spec, torch.float32), q, k, dy), expected, strict=True
    ):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)
    rounded, plain = (stacked_linear(q, k, spec_of(FP4, **rotation), torch.float32) for rotation in ({which: R16}, {}))
    assert torch.equal(rounded, plain) == (which != "output")


def model_and_batch(width=32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, width), nn.GELU(), nn.Linear(width, 4))
    return model, torch.randn(21, 20)


ALL_ROTATED = spec_of(**dict.fromkeys(PRODUCTS, R16))


def gradients(model, x, times=1):
    model.zero_grad()
    for _ in range(times):
        model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.slow  # conformance/test_every_recipe.py has traced graphs
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch does, as it traces
@pytest.mark.parametrize(
    "rotations",
    [
        pytest.param({"output": Hadamard(16, "random"), "grad_weight": R16}, id="each of both"),
        *(
            pytest.param(dict.fromkeys(PRODUCTS, hadamard), id=str(hadamard), marks=pytest.mark.slow)
            for hadamard in (R16, Hadamard(16, "random"))
        ),
    ],
)
def test_traced_graphs_equal_eager(rotations):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(20, 32)), torch.randn(21, 20)
    halfstep.apply(model, recipe_of(spec_of(**rotations)))
    torch.manual_seed(2)
    eager = gradients(model, x)
    torch.manual_seed(2)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(x).square().mean().backward()
    assert_same([p.grad / 2 for p in model.parameters()], eager)


@pytest.mark.quick("Hadamard 16-True", "Hadamard 16-False")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("hadamard", [R16, Hadamard(16, "random")], ids=str)
def test_checkpointing_changes_no_bit(reentrant, hadamard):
    model, x = model_and_batch()
    stochastic = replace(FP4, rounding="stochastic")
    halfstep.apply(model, recipe_of(spec_of(stochastic, output=hadamard, grad_input=hadamard)))
    x.requires_grad_()
    torch.manual_seed(4)
    expected = model(x)
    torch.manual_seed(4)
    found = checkpoint(model, x, use_reentrant=reentrant)
    same_bits(found.detach(), expected.detach())
    plain, _ = model_and_batch()
    halfstep.apply(plain, recipe_of(spec_of(EXACT, **dict.fromkeys(PRODUCTS, hadamard))))
    wanted = gradients(plain, x)
    plain.zero_grad()
    checkpoint(plain, x, use_reentrant=reentrant).square().mean().backward()
    for p, grad in zip(plain.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, grad)


def test_accumulated_gradients_are_the_sum_of_the_passes():
    model, x = model_and_batch()
    halfstep.apply(model, recipe_of(ALL_ROTATED))
    once, twice = gradients(model, x), gradients(model, x, times=2)
    assert_same([grad * 2 for grad in once], twice)


def test_gradients_use_the_transform_until_revert():
    model, x = model_and_batch()
    stock = gradients(model, x)
    halfstep.apply(model, recipe_of(spec_of(grad_weight=R16)))
    rotated = gradients(model, x)
    halfstep.revert(model)
    assert_same(gradients(model, x), stock)
    halfstep.apply(model, recipe_of(spec_of()))
    plain = gradients(model, x)
    assert not torch.equal(rotated[0], plain[0])
    assert torch.equal(rotated[1], plain[1])  # a bias's gradient is a sum, without a matmul


def test_operand_errors_are_those_of_the_rotated_operands():
    x, w, dy = tensors(rows=32, fan_in=32, fan_out=32)
    layer = nn.Linear(32, 32, bias=False)
    layer.weight.data.copy_(w)
    model = nn.Sequential(layer)
    halfstep.apply(model, replace(recipe_of(spec_of(grad_weight=Hadamard(16, "random"))), compute="fp32"))
    state = torch.get_rng_state()
    with operand_errors(model) as rows:
        model(x).backward(dy)
    found = {(row.product, row.operand): row.relative_error for row in rows}
    for operand, tensor in (("input", x.detach()), ("grad_output", dy)):
        turned = rotate(tensor.t(), Hadamard(16, 0).signs())
        expected = (FP4(turned) - turned).norm() / turned.norm()
        assert found["grad_weight", operand] == pytest.approx(float(expected), rel=1e-5)
    torch.set_rng_state(state)


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sides", [(FP4, None), (None, FP4), (None, None)])
def test_a_transform_with_an_unrounded_operand_is_refused(sides):
    with pytest.raises(RecipeError, match="beside an operand with no rounding: it rotates both operands"):
        Matmul(*sides, hadamard=R16)


def test_a_transform_with_delayed_scaling_is_refused():
    delayed = halfstep.get_recipe("fp8-delayed").rules[-1].linear.output.lhs
    with pytest.raises(
        RecipeError, match=r"beside an operand with delayed: .*Round both with a scaling without a state"
    ):
        Matmul(FP4, delayed, hadamard=R16)


def test_convolutions_are_kept_under_a_transform():
    model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.Conv1d(4, 4, 1), nn.Flatten(), nn.Linear(24, 4))
    report = halfstep.apply(model, recipe_of(spec_of(grad_weight=R16)))
    assert report.quantized == ("3",)
    assert set(report.kept) == {"0", "1"}
    assert all("a convolution: its window sums" in why for why in report.kept.values())
    x, weight = torch.randn(1, 4, 8), torch.randn(4, 4, 3)
    with pytest.raises(RecipeError, match="cannot be undone"):
        ops.convolution(x, weight, None, Window((1,), (0,), (1,)), spec_of(grad_weight=R16))


def test_quantize_model_refuses_rotated_forwards():
    with pytest.raises(RecipeError, match="rotates its forward matmuls"):
        halfstep.quantize_model(mlp(), recipe_of(spec_of(output=R16)))
    halfstep.quantize_model(mlp(), recipe_of(spec_of(grad_weight=R16)))  # its forward matmul is not rotated


def test_smoothing_by_token_with_a_rotated_forward_is_refused():
    x, w, dy = tensors()
    powers = torch.full((40,), 2.0)
    with pytest.raises(RecipeError, match="smooth_glu = 'token'"):
        ops.linear(x, w, None, spec_of(output=R16), channels=powers)
    spec = spec_of(EXACT, grad_weight=R16)
    found = results(lambda x, w: ops.linear(x, w, None, spec, channels=powers), x, w, dy)
    for actual, wanted in zip(found, results(lambda x, w: (x / 2) @ w.t(), x, w, dy), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-4)


# ---- recipe data ---------------------------------------------------------------------------------------------------


DATA = {"name": "mine", "compute": "bf16"}
read = partial(from_data, named=halfstep.get_recipe)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (16, R16),
        ({"size": 16}, R16),
        ({"size": 32, "seed": 5}, R32),
        ({"size": 8, "seed": "random"}, Hadamard(8, "random")),
        ("none", None),
    ],
)
def test_transforms_round_trip_through_data(data, expected):
    rule = {"path": "*", "input": "nvfp4", "weight": "nvfp4", "grad_output": "nvfp4", "grad_weight": {"hadamard": data}}
    made = read({**DATA, "rules": [rule]})
    linear = made.rules[-1].linear
    assert (linear.output.hadamard, linear.grad_input.hadamard, linear.grad_weight.hadamard) == (None, None, expected)
    assert read(to_data(made)) == made
    assert (f"({expected})" in linear_text(linear)) == (expected is not None)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (12, "size 12: expected a power of two"),
        (32, "NVFP4's signs are 16"),
        ({"size": 32, "seed": "often"}, "seed = 'often'"),
        ({"sise": 32}, "unknown key of a Hadamard transform 'sise'"),
        ("16", "expected a table"),
    ],
)
def test_invalid_transforms_are_refused(data, message):
    with pytest.raises(RecipeError, match=message):
        read(
            {
                **DATA,
                "rules": [{"path": "*", "input": "nvfp4", "grad_output": "nvfp4", "grad_weight": {"hadamard": data}}],
            }
        )


def test_all_combinations_of_rotated_matmuls_equal_the_reference():
    """Each saves for backward what it needs."""
    x, w, dy = tensors()
    for which in pairs((None, R16, R32), repeat=3):
        spec = spec_of(get_quantizer("int8_tensor"), **dict(zip(PRODUCTS, which, strict=True)))
        for found, expected in zip(results(linear(spec), x, w, dy), reference(spec, x, w, dy), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
