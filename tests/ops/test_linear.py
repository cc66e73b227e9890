"""A linear layer's three matmuls: equal to torch's without rounding, and to a written-out reference with it."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from families import for_each, slow_unless
from halfstep import formats, ops, round_to
from halfstep.kernels import carried
from halfstep.ops.operand import operand
from halfstep.quant import Quantizer, get_quantizer
from halfstep.quant.tile import block, square
from halfstep.recipe import LinearSpec, Matmul
from oracles.numbers import same_bits
from tiny import assert_same


pytestmark = pytest.mark.cpu
SHAPES = [(5,), (3, 5), (2, 3, 5), (2, 1, 3, 5), (0, 5)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
A, B, C, D, E, G = (
    Quantizer(formats.get(f), r)
    for f, r in [
        ("e4m3fn", "nearest_even"),
        ("e5m2", "toward_zero"),
        ("e5m2", "nearest_even"),
        ("e4m3fn", "toward_zero"),
        ("e5m2", "nearest_away"),
        ("bf16", "toward_zero"),
    ]
)
SPEC = LinearSpec(Matmul(A, B), Matmul(C, D), Matmul(E, G))


def operands(shape, dtype, bias, seed=0):
    generator = torch.Generator().manual_seed(seed)
    make = lambda *s: torch.randn(*s, generator=generator).to(dtype).requires_grad_()  # noqa: E731
    return make(*shape), make(4, 5), make(4) if bias else None


def results(function, x, w, b):
    y = function(x, w, b)
    torch.manual_seed(1)
    grads = torch.autograd.grad(y, [t for t in (x, w, b) if t is not None], torch.randn(y.shape).to(y.dtype))
    return y.detach(), *grads


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_an_empty_spec_equals_torchs_linear(shape, dtype, bias, carry):
    carry()
    x, w, b = operands(shape, dtype, bias)
    found = results(lambda *t: ops.linear(*t, LinearSpec()), x, w, b)
    expected = results(F.linear, x, w, b)
    for actual, wanted in zip(found, expected, strict=True):
        same_bits(actual, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_an_empty_spec_under_autocast_equals_torchs_linear_under_autocast(dtype, bias, carry):
    carry()
    x, w, b = operands((3, 5), torch.float32, bias)
    with torch.autocast("cpu", dtype):
        found = results(lambda *t: ops.linear(*t, LinearSpec()), x, w, b)
        expected = results(F.linear, x, w, b)
    assert found[0].dtype == dtype
    assert_same(found, expected)


def reference(x, w, b):
    """The three matmuls of SPEC in float32."""
    x, w, b = x.detach(), w.detach(), b.detach()
    rows = x.reshape(-1, 5)
    y = round_to(rows, "e4m3fn") @ round_to(w, "e5m2", "toward_zero").t() + b
    torch.manual_seed(1)
    dy = torch.randn(*x.shape[:-1], 4).reshape(-1, 4)
    dx = round_to(dy, "e5m2") @ round_to(w, "e4m3fn", "toward_zero")
    dw = round_to(dy, "e5m2", "nearest_away").t() @ round_to(rows, "bf16", "toward_zero")
    return y.view(*x.shape[:-1], 4), dx.view(x.shape), dw, dy.sum(0)


@pytest.mark.parametrize(
    ("name", "size"), slow_unless(("nvfp4", 16).__eq__, [("nvfp4", 16), ("mxfp4", 32), ("mxfp8", 32)])
)
@for_each("fan_out, fan_in", [(37, 50), (32, 64), (3, 70)])
def test_square_tiles_are_rounded_once_for_both_matmuls(name, size, fan_out, fan_in):
    """Identity matrices as the other operand show the rounded weight of each matmul; stochastic rounding would differ
    the second time."""
    blocks = replace(get_quantizer(name), rounding="stochastic")
    tiles = replace(blocks, scales=replace(blocks.scales, tile=square(size)))
    w = torch.randn(fan_out, fan_in, requires_grad=True)
    for quantizer in (blocks, tiles):
        product = Matmul(rhs=quantizer)
        x = torch.eye(max(fan_out, fan_in), fan_in, requires_grad=True)
        y = ops.linear(x, w, None, LinearSpec(product, product))
        (forwards,) = torch.autograd.grad(y, x, torch.eye(len(x), fan_out))
        assert not torch.equal(y[:fan_in].t(), w)
        assert torch.equal(forwards[:fan_out], y[:fan_in].t()) == (quantizer is tiles)


@pytest.mark.parametrize("dtype", slow_unless({torch.float32}.__contains__, [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("tile", slow_unless({square(16)}.__contains__, [block(16), square(16)]), ids=str)
@pytest.mark.parametrize("rule", slow_unless("two_level".__eq__, ["two_level", "two_level_up"]))
def test_two_level_scales_equal_the_reference(rule, tile, dtype):
    """The tensor scales enter the matmul before its one rounding, and a traced graph has the same operands."""
    quantizer = get_quantizer("nvfp4", scale=rule)
    quantizer = replace(quantizer, scales=replace(quantizer.scales, tile=tile))
    product = Matmul(quantizer, quantizer)
    spec = LinearSpec(product, product, product)
    x, w, dy = (torch.randn(*shape).to(dtype) for shape in ((37, 50), (21, 50), (37, 21)))
    found = results_of(spec, x, w, dy)
    down = quantizer.down
    pairs = [(x, w.t(), quantizer, down), (dy, w, quantizer, down), (dy.t(), x, quantizer, down)]
    for actual, (lhs, rhs, one, other) in zip(found, pairs, strict=True):
        wanted = decoded(lhs, one) @ decoded(rhs, other)
        torch.testing.assert_close(actual.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-5)
    same_bits(operand(x.t(), down, torch.float32).values, operand(x, quantizer, torch.float32).values.t())
    traced = torch.compile(lambda x: values_and_scale(operand(x, down, dtype)), backend="aot_eager", fullgraph=True)
    for actual, wanted in zip(traced(x), values_and_scale(operand(x, down, dtype)), strict=True):
        same_bits(actual, wanted)


def values_and_scale(one):
    return one.values, one.scale


def results_of(spec, x, w, dy):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = ops.linear(x, w, None, spec)
    return y.detach(), *torch.autograd.grad(y, (x, w), dy)


def decoded(x, quantizer):
    """The quantized values of a matrix in float64, by the reference; views are made contiguous first."""
    return quantizer.quantize(x.contiguous()).dequantize(torch.float64)


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5), (7, 5)])
def test_a_spec_equals_the_reference_and_differs_from_the_stock_layer(shape):
    x, w, b = operands(shape, torch.float32, True)
    found = results(lambda *t: ops.linear(*t, SPEC), x, w, b)
    stock = results(F.linear, x, w, b)
    for actual, wanted, plain in zip(found[:3], reference(x, w, b)[:3], stock, strict=False):
        torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-6)
        assert (actual - plain).abs().max() > 1e-2
    torch.testing.assert_close(found[3], stock[3])


@pytest.mark.parametrize("product", ["output", "grad_input", "grad_weight"])
@pytest.mark.parametrize("side", ["lhs", "rhs"])
def test_each_operand_is_rounded_only_in_its_own_matmul(product, side):
    x, w, b = operands((3, 5), torch.float32, True)
    spec = LinearSpec(**{product: Matmul(**{side: A})})
    found, stock = results(lambda *t: ops.linear(*t, spec), x, w, b), results(F.linear, x, w, b)
    changed = [not torch.equal(a, s) for a, s in zip(found, stock, strict=True)]
    assert changed == [product == p for p in ("output", "grad_input", "grad_weight", "")]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_have_their_tensors_dtype_and_shape_for_any_layout(dtype):
    x, w, b = operands((2, 3, 5), dtype, True)
    turned = x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    found = results(lambda *t: ops.linear(*t, SPEC), turned, w, b)
    for grad, tensor in zip(found[1:], (x, w, b), strict=True):
        assert (grad.dtype, grad.shape) == (tensor.dtype, tensor.shape)
    assert_same(found, results(lambda *t: ops.linear(*t, SPEC), x, w, b))


def test_tensors_without_requires_grad_get_no_gradient():
    x, w, b = operands((3, 5), torch.float32, True)
    y = ops.linear(x.detach(), w, b.detach(), SPEC)
    y.sum().backward()
    assert w.grad is not None
    assert b.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_emulated_matmuls_are_exact_ones_rounded_once(dtype):
    """Sums of 16-bit products in float64, rounded once, differ at most by a float32 sum's error."""
    lhs, rhs, bias = (torch.randn(*s).to(dtype) for s in ((6, 32), (32, 4), (4,)))
    for b in (None, bias):
        exact = lhs.double() @ rhs.double() + (0 if b is None else b.double())
        product = carried.run(lhs, rhs, b)
        assert product.dtype == dtype
        ulp = torch.finfo(dtype).eps
        torch.testing.assert_close(product.double(), exact, rtol=ulp / 2 * 1.001, atol=1e-5)


@pytest.mark.parametrize("quantizer", [A, E, Quantizer(formats.get("bf16"), "stochastic")])
def test_the_gradient_of_fake_quantize_is_the_identity(quantizer):
    x = torch.randn(3, 4, requires_grad=True)
    torch.manual_seed(2)
    y = ops.fake_quantize(x, quantizer)
    torch.manual_seed(2)
    same_bits(y.detach(), quantizer(x.detach()))
    weights = torch.randn(3, 4)
    (y * weights).sum().backward()
    same_bits(x.grad, weights)
