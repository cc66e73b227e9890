"""Matmuls of quantized operands, emulated in a wider dtype: the exact result, rounded once."""

import itertools

import pytest
import torch

from families import in_turn, slow_unless
from halfstep import formats, get_quantizer, ops, quant
from halfstep.kernels.cpu import cast as kernel
from halfstep.ops import amax_of
from halfstep.ops.casts import round_scaled
from halfstep.ops.operand import operand
from halfstep.quant import Quantizer, Scales
from halfstep.quant.scaling import get_scaling
from halfstep.quant.scaling.power_of_two import Fixed
from halfstep.quant.tile import ROW, TENSOR
from halfstep.recipe import linear_spec
from tiny import assert_same


pytestmark = pytest.mark.cpu


def tensorwise(format, scaling="current", **options):
    return Quantizer(formats.get(format), scales=Scales(TENSOR, get_scaling(scaling, **options)))


PAIRS = {
    "current": (tensorwise("e4m3fn"), tensorwise("e5m2")),
    "margin": (tensorwise("e4m3fnuz", "rceil", margin=3), tensorwise("e5m2fnuz", "rceil", margin=3)),
    "fixed": (tensorwise("e4m3fn", "fixed"), tensorwise("e4m3fn", "fixed")),
    "rowwise": (Quantizer(formats.get("e4m3fn"), scales=Scales(ROW, get_scaling("rceil"))),) * 2,
    "int8": (get_quantizer("int8_tensor"), get_quantizer("int8_row")),
    "block": (get_quantizer("fp8_1x128", scale="rceil"), get_quantizer("fp8_128x128", scale="rceil")),
    "block float32": (get_quantizer("fp8_1x128"), get_quantizer("fp8_128x128")),
    "mxfp8": (get_quantizer("mxfp8_e4m3", scale="rceil"), get_quantizer("mxfp8_e5m2")),
    "mxfp6": (get_quantizer("mxfp6_e3m2"), get_quantizer("mxfp6_e2m3")),
    "mxfp4": (get_quantizer("mxfp4"), get_quantizer("mxfp4")),
    "nvfp4": (get_quantizer("nvfp4"), get_quantizer("nvfp4")),
}
every_pair = pytest.mark.parametrize("pair", PAIRS.values(), ids=list(PAIRS))
both_kinds_of_cpu = pytest.mark.usefixtures("products")


def reference(x, quantizer):
    """The operand's values in float64."""
    return quantizer.quantize(x).dequantize(torch.float64)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.quick("carried-dtype0-0.0-int8", "carried-dtype3-3.0-fixed", "carried-dtype3-3.0-int8")
@every_pair
@both_kinds_of_cpu
@pytest.mark.parametrize(
    ("dtype", "spread"),
    slow_unless(
        in_turn([torch.bfloat16, torch.float32], [0.0, 3.0]).__contains__,
        itertools.product([torch.bfloat16, torch.float32], [0.0, 3.0]),
    ),
)
def test_an_operand_equals_its_quantizers_values(pair, dtype, spread):
    x = (draw(40, 256) * torch.exp(spread * draw(40, 1, seed=1))).to(dtype)
    for quantizer in pair:
        made = operand(x, quantizer, torch.bfloat16)
        value = made.values.double() * (1.0 if made.scale is None else made.scale.double())
        exact = reference(x.double() if quantizer.scales.rule.name == "fixed" else x.float(), quantizer)
        # The reference rounds a float32 scale times a value to float32; the operand keeps them separate.
        torch.testing.assert_close(value, exact, rtol=2.0**-23, atol=0)


@every_pair
@both_kinds_of_cpu
@pytest.mark.parametrize("shared", [256, 1024])
def test_a_matmul_is_the_exact_one_rounded_once(pair, shared):
    left, right = draw(96, shared), draw(64, shared, seed=1) * torch.exp(draw(64, 1, seed=2))
    lhs, rhs = (operand(x, q, torch.bfloat16) for x, q in zip((left, right), pair, strict=True))
    scale = lhs.scale if rhs.scale is None else rhs.scale if lhs.scale is None else lhs.scale * rhs.scale
    found = ops.matmul(lhs.values, rhs.values.t(), None, scale, torch.bfloat16)
    a, b = (x.values.double() * (1.0 if x.scale is None else x.scale.double()) for x in (lhs, rhs))
    exact, bound = a @ b.t(), shared * 2.0**-24 * (a.abs() @ b.abs().t())
    assert found.dtype == torch.bfloat16
    equal = (found == exact.to(torch.bfloat16)).double().mean()
    assert equal >= 0.999
    assert ((found.double() - exact).abs() <= exact.abs() * 2.0**-8 + bound).all()
    assert (found.double() - left.double() @ right.double().t()).abs().max() > 0  # something was rounded


@both_kinds_of_cpu
def test_the_bias_is_added_before_the_one_rounding():
    x, w, b = draw(32, 64), draw(16, 64, seed=1), draw(16, seed=2).to(torch.bfloat16)
    lhs, rhs = (operand(t, tensorwise("e4m3fn"), torch.bfloat16) for t in (x, w))
    scale = lhs.scale * rhs.scale
    found = ops.matmul(lhs.values, rhs.values.t(), b, scale, torch.bfloat16)
    exact = (lhs.values.double() @ rhs.values.double().t()) * scale.double() + b.double()
    assert (found == exact.to(torch.bfloat16)).double().mean() >= 0.999


@pytest.mark.quick("mxfp8_e4m3-along rows", "mxfp8_e4m3-down columns", "fp8_128x128-along rows")
@pytest.mark.parametrize("down", [False, True], ids=["along rows", "down columns"])
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "fp8_1x128", "fp8_128x128"])
def test_subnormal_bf16_values_use_float32(name, down, carry):
    """CPUs' bf16 matmuls flush values below 2^-126 to zero."""
    carry()
    quantizer, x = get_quantizer(name, scale="rceil"), torch.ones(256, 256)
    used, turned = (quantizer.down, x.t()) if down else (quantizer, x)
    x[:128, :128] = 0.0
    assert operand(turned.contiguous(), used, torch.bfloat16).values.dtype == torch.bfloat16
    for smallest, dtype in ((2.0**-126, torch.bfloat16), (2.0**-127, torch.float32)):
        x[128:, 128:] = 2.0**-119  # the scale of its block is 2^-127: elements come in steps of 2^-136
        x[140, 140] = smallest
        made = operand(turned.contiguous(), used, torch.bfloat16)
        assert made.values.dtype == dtype
        expected = reference(x, quantizer)
        torch.testing.assert_close(made.values.double(), expected.t() if down else expected, rtol=0, atol=0)


@pytest.mark.quick("mxfp8_e4m3")
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "fp8_1x128"])
def test_an_operand_rounded_down_columns_is_contiguous_along_them(name):
    """The contracted dimension is contiguous, so that the matmul sums in the order of a transposed copy."""
    quantizer, x = get_quantizer(name, scale="rceil"), draw(256, 96).bfloat16()
    made, copied = (
        operand(t, q, torch.bfloat16).values for t, q in ((x, quantizer.down), (x.t().contiguous(), quantizer))
    )
    assert made.t().is_contiguous()
    assert_same(made, copied.t())


def test_values_that_the_compute_dtype_cannot_represent_use_float32():
    wide = operand(draw(4, 32), tensorwise("e5m2"), torch.float16)
    assert wide.values.dtype == torch.float16
    exact = operand(draw(4, 32), Quantizer(formats.get("e8m10")), torch.bfloat16)
    assert exact.values.dtype == torch.float32
    assert operand(draw(4, 32), get_quantizer("fp8_1x128"), torch.bfloat16).values.dtype == torch.float32


@pytest.mark.parametrize("name", ["current", "rceil"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_nonfinite_value_makes_the_whole_tensor_nan(name, value):
    x = draw(4, 8)
    x[1, 2] = value
    assert operand(x, tensorwise("e4m3fn", name), torch.bfloat16).values.isnan().all()


def test_zero_and_empty_tensors_give_zeros():
    for quantizer in (tensorwise("e4m3fn"), tensorwise("e4m3fn", "rceil", margin=3), tensorwise("e4m3fn", "fixed")):
        for x in (torch.zeros(3, 4), torch.zeros(0, 4)):
            made = operand(x, quantizer, torch.bfloat16)
            assert made.values.shape == x.shape
            assert (made.values == 0).all()


def test_a_linear_layer_rounds_operands_along_the_contracted_dimension():
    """Blocks lie along `in` for the output, along `out` for dx, along the rows for dw."""
    quantizer = get_quantizer("mxfp8_e4m3", scale="rceil")
    x, w, dy = draw(64, 96).requires_grad_(), draw(32, 96, seed=1).requires_grad_(), draw(64, 32, seed=2)
    y = ops.linear(x, w, None, linear_spec(quantizer, quantizer, quantizer))
    y.backward(dy)
    q = lambda t: reference(t.detach().contiguous(), quantizer)  # noqa: E731
    for found, exact in (
        (y, q(x) @ q(w).t()),
        (x.grad, q(dy) @ q(w.t()).t()),
        (w.grad, q(dy.t()) @ q(x.t()).t()),
    ):
        torch.testing.assert_close(found.detach(), exact.float(), rtol=1e-5, atol=1e-5)


def test_a_margin_of_3_prevents_overflow_in_fp16_accumulation():
    """Perez et al. 2023: scaled amaxes lie in (120, 240] without and in (15, 30] with a margin of 3."""
    e4 = formats.get("e4m3fnuz")
    for seed in range(200):
        amax = (draw(1, seed=seed).abs() * 10.0 ** (12 * draw(1, seed=seed + 1000).tanh()))[0]
        assert 120 < amax * get_scaling("rceil").factor(amax, e4) <= 240
        assert 15 < amax * get_scaling("rceil", margin=3).factor(amax, e4) <= 30
    x, w = draw(64, 512), draw(512, 64, seed=1)
    raw = {}
    for margin in (0, 3):
        lhs, rhs = (operand(t, tensorwise("e4m3fnuz", "rceil", margin=margin), torch.float32) for t in (x, w))
        raw[margin] = (lhs.values @ rhs.values).abs().max()
    assert raw[0] > 65504 > 8 * raw[3]


def test_a_constant_scale_is_accurate_only_in_a_range():
    """Perez et al. 2023, Table 6: one exponent bias for all tensors."""
    x, w = draw(64, 512), draw(512, 64, seed=1) / 8
    exact, error = x.double() @ w.double(), {}
    for bias in (-8, 0, 3, 8):
        q = Quantizer(formats.get("e4m3fnuz"), scales=Scales(TENSOR, Fixed("constant", bias)))
        lhs, rhs = (operand(t, q, torch.float32) for t in (x, w))
        found = (lhs.values.double() @ rhs.values.double()) * (lhs.scale * rhs.scale).double()
        error[bias] = ((found - exact).norm() / exact.norm()).item()
    assert max(error[0], error[3]) < 0.05 < error[-8]
    assert error[8] > 4 * error[0]


DTYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
]


@pytest.mark.quick("nearest_even-e4m3fn-dtypes1", "nearest_even-e4m3fn-dtypes2", "nearest_even-int8-dtypes16")
@pytest.mark.parametrize(
    ("format", "dtypes"),
    slow_unless(
        lambda case: (
            (case[0] == "e4m3fn" and torch.float16 not in case[1])
            or (case[0] in ("e5m2", "e2m1fn", "int8") and case[1] == DTYPES[0])
        ),
        itertools.product(["e4m3fn", "e5m2", "e4m3fnuz", "e2m1fn", "int8", "e8m10"], DTYPES),
    ),
)
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic", pytest.param("up", marks=pytest.mark.slow)])
def test_scaled_rounding_multiplies_in_float32_then_rounds(format, dtypes, rounding):
    format, (source, target) = formats.get(format), dtypes
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e30, -1e-30, 2.0**-130])
    x = torch.cat([draw(20_001).exp(), special]).to(source)
    for factor in (torch.tensor(3.7), torch.tensor(2.0**-9), torch.tensor(torch.nan)):
        found = round_scaled(x, factor, format, rounding, target, generator=5)
        out = torch.empty(x.shape, dtype=target)
        assert_same(found, quant.round_to(x.float() * factor, format, rounding, "saturate", 5, out))


@pytest.mark.parametrize(
    "source",
    [torch.float32, torch.bfloat16, torch.float64, pytest.param(torch.float16, marks=pytest.mark.slow)],
)
def test_scaled_rounding_updates_an_amax_in_the_same_pass(source):
    format, factor = formats.get("e4m3fn"), torch.tensor(3.7)
    for size in (0, 1, 17, 16_384, 40_001):
        x = (draw(size) - 7.0).to(source)
        for special in (None, -torch.inf, torch.nan):
            y = x.clone()
            if special is not None and size:
                y[size // 2] = special
            for before in (0.0, 8.5, torch.inf, torch.nan):
                amax = torch.tensor([9.0, before, 9.0])
                found = round_scaled(y, factor, format, "nearest_even", torch.bfloat16, amax=amax[1])
                assert_same(found, round_scaled(y, factor, format, "nearest_even", torch.bfloat16))
                expected = torch.maximum(torch.tensor(before), amax_of(y))
                assert_same(amax, torch.tensor([9.0, expected, 9.0]))
                if source == torch.bfloat16:  # also in place
                    amax, z = torch.tensor(before), y.clone()
                    kernel.run(z, z, format, "nearest_even", "saturate", None, factor, amax)
                    assert_same(z, found)
                    assert_same(amax, expected)


@every_pair
def test_float64_operands_are_rounded_from_float64(pair):
    x, weight = draw(40, 256).double().requires_grad_(), draw(24, 256, seed=1).double().requires_grad_()
    y = ops.linear(x, weight, None, linear_spec(pair[0], pair[0], pair[1]))
    exact = reference(x.detach(), pair[0]) @ reference(weight.detach(), pair[0]).t()
    torch.testing.assert_close(y.detach(), exact, rtol=1e-6, atol=1e-6)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == weight.grad.dtype == torch.float64
