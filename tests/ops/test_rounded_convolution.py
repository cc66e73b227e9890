"""Convolutions with rounded operands: equal to a linear layer if 1x1, else to a tap-by-tap reference."""

import itertools

import pytest
import torch

from families import for_each, in_turn, slow_unless
from halfstep import ops, recipe
from halfstep.errors import ModelError, RecipeError
from halfstep.ops import Window
from halfstep.quant import Quantizer, Scales, Tile, get_quantizer
from halfstep.quant.scaling import get_scaling
from halfstep.recipe import LinearSpec, Matmul, linear_spec
from tiny import FAST, assert_same


EVERY = {name: rules[-1].linear for name in recipe.list_recipes() if (rules := recipe.get_recipe(name).rules)}
SPECS = {name: spec for name, spec in EVERY.items() if not spec.rotates}
ROUNDING = [name for name, spec in SPECS.items() if spec.rounds and not spec.accumulates]
REPEATED = [name for name in ROUNDING if all(q.rounding != "stochastic" for q in SPECS[name].quantizers)]
"""Without stochastic rounding, so that the order of a tensor's elements does not matter."""
POINT = Window((1, 1), (0, 0), (1, 1))
CASES = {
    "3x3": (Window((1, 1), (1, 1), (1, 1)), (2, 40, 5, 4), (6, 40, 3, 3)),
    "strides, dilation, groups": (Window((2,), (1,), (2,), 2), (3, 72, 9), (38, 36, 3)),
    "depthwise": (Window((1, 2), (1, 0), (1, 1), 6), (2, 6, 5, 4), (12, 1, 3, 2)),
    "three dimensions": (Window((1,) * 3, (0,) * 3, (1,) * 3), (2, 4, 4, 3, 3), (6, 4, 2, 2, 2)),
    "transposed": (Window((2, 2), (1, 1), (1, 1), 2, True, (1, 0)), (2, 8, 5, 4), (8, 36, 3, 3)),
    "one place, a stride": (Window((2, 2), (0, 0), (1, 1)), (2, 40, 5, 4), (6, 40, 1, 1)),
}


def tiled(rows, columns):
    return Quantizer(get_quantizer("e4m3fn").format, scales=Scales(Tile(rows, columns), get_scaling("rceil")))


TILES = {
    "element": get_quantizer("bf16", rounding="toward_zero"),
    "tensor": tiled(0, 0),
    "row": tiled(1, 0),
    "three rows": tiled(3, 0),
    "block": tiled(1, 32),
    "square": tiled(5, 5),
    "column": tiled(0, 1),
}


def operands(window, shape, filters, seed=0):
    generator = torch.Generator().manual_seed(seed)
    outputs = filters[1] * window.groups if window.transposed else filters[0]

    def make(*sizes):  # of many magnitudes, so that tiles have different scales
        x = torch.randn(*sizes, generator=generator) * 8 ** torch.randn(*sizes, generator=generator)
        return x.requires_grad_()

    return make(*shape), make(*filters), make(outputs)


def results(function, tensors):
    y = function(*tensors)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return (y.detach(), *torch.autograd.grad(y, tensors, grad)), grad.float()


def round_taps(parts, quantizer):
    """(rows, taps, channels) rounded: a tile of whole rows over all taps, any other tap by tap."""
    whole = quantizer.scales is None or quantizer.scales.tile.columns == 0
    if whole:
        return quantizer(parts.flatten(1)).view(parts.shape)
    return torch.stack([quantizer(parts[:, tap].contiguous()) for tap in range(parts.shape[1])], 1)


def reference(window, x, weight, grad, spec):
    """The three matmuls, group by group in float64: torch's own convolutions of the rounded operands."""
    groups, whole = window.groups, lambda q: q.scales is not None and q.scales.tile == Tile(0, 0)

    def on_places(t, quantizer, down=False):
        if whole(quantizer):
            return quantizer(t)
        parts = []
        for part in t.chunk(groups, 1):
            rows = part.movedim(1, -1).flatten(0, -2)
            rows = (
                round_taps(rows.t()[:, None], quantizer)[:, 0].t()
                if down
                else round_taps(rows[:, None], quantizer)[:, 0]
            )
            parts.append(rows.reshape(*part.movedim(1, -1).shape).movedim(-1, 1))
        return torch.cat(parts, 1)

    def on_filters(t, quantizer, down=False):
        if whole(quantizer):
            return quantizer(t)
        parts = []
        for part in t.chunk(groups, 0):
            taps = part.flatten(2)  # (out, in, taps), of a transposed one (in, out, taps)
            swapped = window.transposed != down
            rows = taps.permute(1, 2, 0) if swapped else taps.permute(0, 2, 1)
            rows = round_taps(rows.contiguous(), quantizer)
            parts.append((rows.permute(2, 0, 1) if swapped else rows.permute(0, 2, 1)).reshape(part.shape))
        return torch.cat(parts, 0)

    def gradients(a, w, g):
        a, w = (t.double().requires_grad_() for t in (a, w))
        return torch.autograd.grad(window.apply(a, w), (a, w), g.double())

    x, weight = x.detach(), weight.detach()
    y = window.apply(on_places(x, spec.output.lhs).double(), on_filters(weight, spec.output.rhs).double())
    of_x = gradients(x, on_filters(weight, spec.grad_input.rhs, True), on_places(grad, spec.grad_input.lhs))[0]
    rounded = on_places(x, spec.grad_weight.rhs, True)
    of_weight = gradients(rounded, weight, on_places(grad, spec.grad_weight.lhs, True))[1]
    return y, of_x, of_weight


@for_each("case, tile", itertools.product(CASES, TILES), fast=in_turn([*CASES], [*TILES]))
def test_convolutions_equal_those_of_operands_rounded_along_the_contracted_dimension(case, tile):
    window, shape, filters = CASES[case]
    q = TILES[tile]
    spec = linear_spec(input=q, weight=q, grad_output=q)
    tensors = operands(window, shape, filters)
    found, grad = results(lambda x, w, b: ops.convolution(x, w, b, window, spec), tensors)
    plain, _ = results(lambda x, w, b: ops.convolution(x, w, b, window), tensors)
    y, *expected = reference(window, *tensors[:2], grad, spec)
    wanted = [y + tensors[2].detach().view(-1, *[1] * (y.dim() - 2)), *expected]
    for actual, exact, stock in zip(found, wanted, plain, strict=False):
        scale = exact.abs().max()
        torch.testing.assert_close(actual.double() / scale, exact / scale, rtol=0, atol=2e-6)
        assert (actual - stock).abs().max() > 1e-4 * scale
    torch.testing.assert_close(found[3], plain[3])


@pytest.mark.quick("own-dtype3-True", "carried-dtype2-False")
@pytest.mark.usefixtures("products")
@for_each("name", ROUNDING)
@pytest.mark.parametrize(
    ("dtype", "transposed"),
    slow_unless(
        [(torch.bfloat16, True), (torch.bfloat16, False)].__contains__,
        itertools.product([torch.float32, torch.bfloat16, torch.float16], [False, True]),
    ),
)
def test_a_1x1_convolution_equals_the_linear_layer_of_its_channels(name, transposed, dtype):
    spec, outcomes = SPECS[name], []
    window = Window((1, 1), (0, 0), (1, 1), transposed=transposed)
    x, weight, bias = operands(window, (2, 40, 5, 3), (40, 36, 1, 1) if transposed else (36, 40, 1, 1))
    matrix = weight.flatten(1).t() if transposed else weight.flatten(1)
    for layer in (
        lambda states: ops.convolution(x, weight, bias, window, spec, states, True),
        lambda states: ops.linear(x.movedim(1, -1), matrix, bias, spec, states, True).movedim(-1, 1),
    ):
        states = {operand: quantizer.stateful.init() for operand, quantizer in spec.states.items()}
        torch.manual_seed(2)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            y = layer(states)
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
        outcomes.append([y, *torch.autograd.grad(y, (x, weight, bias), grad, retain_graph=True), states])
    assert_same(*outcomes)


@for_each("name", REPEATED, fast=[name for name in REPEATED if name in FAST])
def test_a_3x3_filter_of_zeros_around_its_center_equals_the_linear_layer(name):
    """By the general path, with integers whose sums are exact in any order."""
    spec = SPECS[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-4, 5, (2, 40, 5, 4), generator=generator).float().requires_grad_()
    weight = torch.zeros(36, 40, 3, 3)
    weight[:, :, 1, 1] = torch.randint(-4, 5, (36, 40), generator=generator)
    weight.requires_grad_()
    outcomes = []
    for layer in (
        lambda s: ops.convolution(x, weight, None, Window((1, 1), (1, 1), (1, 1)), spec, s),
        lambda s: ops.linear(x.movedim(1, -1), weight[:, :, 1, 1], None, spec, s).movedim(-1, 1),
    ):
        torch.manual_seed(2)
        y = layer({operand: quantizer.stateful.init() for operand, quantizer in spec.states.items()})
        grad = torch.randint(-4, 5, y.shape, generator=torch.Generator().manual_seed(1)).float()
        grad_x, grad_weight = torch.autograd.grad(y, (x, weight), grad)
        outcomes.append([y.detach(), grad_x, grad_weight[:, :, 1, 1]])
    for found, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
    if spec.output.lhs is None or spec.output.lhs.scales is None:  # integers stay integers, and sums exact
        assert_same(*outcomes)


@pytest.mark.parametrize("product", ["output", "grad_input", "grad_weight"])
@pytest.mark.parametrize("side", ["lhs", "rhs"])
@pytest.mark.parametrize("tile", ["element", "block"])
def test_each_operand_is_rounded_only_in_its_own_matmul(product, side, tile):
    window, shape, filters = CASES["3x3"]
    tensors = operands(window, shape, filters)
    spec = LinearSpec(**{product: Matmul(**{side: TILES[tile]})})
    found, stock = (results(lambda x, w, b, s=s: ops.convolution(x, w, b, window, s), tensors)[0] for s in (spec, None))
    changed = [not torch.equal(a, s) for a, s in zip(found[:3], stock[:3], strict=True)]
    assert changed == [product == p for p in ("output", "grad_input", "grad_weight")]


@pytest.mark.slow
@for_each("case, dtype", itertools.product(CASES, [torch.float32, torch.bfloat16, torch.float16]))
def test_gradients_have_their_tensors_dtype_for_any_layout(case, dtype):
    window, shape, filters = CASES[case]
    tensors = [t.detach().to(dtype).requires_grad_() for t in operands(window, shape, filters)]
    turned = [tensors[0].detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(), *tensors[1:]]
    for q in (TILES["block"], TILES["tensor"]):
        spec = linear_spec(input=q, weight=q, grad_output=q)
        (found, _), (again, _) = (
            results(lambda x, w, b: ops.convolution(x, w, b, window, spec), t)  # noqa: B023
            for t in (tensors, turned)
        )
        for grad, tensor in zip(found[1:], tensors, strict=True):
            assert (grad.dtype, grad.shape) == (tensor.dtype, tensor.shape)
        for a, b in zip(found, again, strict=True):
            torch.testing.assert_close(a, b, rtol=2 * torch.finfo(dtype).eps, atol=1e-2 * float(b.abs().max()))


@for_each("name", ROUNDING)
def test_empty_batches_and_unbatched_inputs(name):
    window, shape, filters = CASES["3x3"]
    x, weight, bias = operands(window, shape, filters)
    states = lambda: {operand: q.stateful.init() for operand, q in SPECS[name].states.items()}  # noqa: E731
    torch.manual_seed(2)
    one = ops.convolution(x[0], weight, bias, window, SPECS[name], states())
    torch.manual_seed(2)
    assert_same(one, ops.convolution(x[:1], weight, bias, window, SPECS[name], states())[0])
    none = ops.convolution(x[:0], weight, bias, window, SPECS[name], states())
    none.sum().backward()
    assert none.shape == (0, 6, 5, 4)
    assert not weight.grad.any()


def test_a_spec_with_an_accumulator_is_refused():
    spec = recipe.get_recipe("fp16-accumulate").rules[-1].linear
    with pytest.raises(RecipeError, match="convolutions sum in their own way"):
        ops.convolution(torch.ones(1, 2, 3), torch.ones(2, 2, 1), None, Window((1,), (0,), (1,)), spec)


def test_an_input_with_another_number_of_channels_is_refused():
    _, weight, bias = operands(*CASES["3x3"])
    for shape in [(2, 39, 5, 4), (40, 5), (39, 5, 4), (2, 40, 5, 4, 1)]:
        with pytest.raises(ModelError, match=r"40 channels .* found an input of shape .* expected \(batch, 40"):
            ops.convolution(torch.ones(shape), weight, bias, CASES["3x3"][0], SPECS["fp8-current"])


def test_tensors_without_requires_grad_get_no_gradient():
    x, weight, bias = operands(*CASES["3x3"])
    ops.convolution(x.detach(), weight, bias.detach(), CASES["3x3"][0], SPECS["fp8-current"]).sum().backward()
    assert weight.grad is not None
    assert x.grad is None
    assert bias.grad is None
