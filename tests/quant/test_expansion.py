"""COAT's range expansion against its formula in float64 and published figures; log2 and exp2 against numpy's."""

import math

import numpy as np
import pytest
import torch

import halfstep
from families import for_each
from halfstep import formats
from halfstep.errors import QuantizationError, RecipeError
from halfstep.quant import Quantizer, Scales, Tile
from halfstep.quant.logarithm import exp2, log2
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import TENSOR
from halfstep.recipe import get_recipe, get_storage
from oracles.numbers import same_bits


GROUP = 128
VARIANTS = {"expansion": (448 / 2**-9, None), "expansion_sixteenths": (448**2 / 2, 16)}
every_variant = pytest.mark.parametrize("name", VARIANTS)


def quantizer(name, columns=GROUP, format="e4m3fn"):
    return Quantizer(formats.get(format), scales=Scales(Tile(1, columns), get_scaling(name)))


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def chi_square(*shape):
    """Sums of five squares: distributed as second moments are."""
    return gaussian(*shape, 5, seed=1).square().sum(-1)


def relative_error(found, x):
    return ((found - x) / x).abs()[x != 0].median().item()


def float64_expansion(group, name):
    """One group in float64: (k before rounding, codes, values after the round trip), by numpy's powers and
    ml_dtypes."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = group.double().numpy()
    size = np.abs(x)
    largest, smallest = size.max(), size[size > 0].min()
    range_, sixteenths = VARIANTS[name]
    k = math.log(range_) / math.log(largest / smallest)
    exact = k
    if sixteenths:
        k = math.floor(k * sixteenths) / sixteenths
    k = min(k, 8.0)
    c = math.sqrt(largest) * math.sqrt(smallest)
    y = np.sign(x) * (size / c) ** k
    scale = (largest / c) ** k / 448
    q = np.clip(y / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    wide = q.astype(np.float64)
    return exact, q, np.sign(wide) * (np.abs(wide) * scale) ** (1 / k) * c


@every_variant
@for_each("spread", [0.3, 1.0, 3.0, 8.0])
def test_codes_and_values_agree_with_the_float64_formula(name, spread):
    """Codes equal float64's but for near-ties; where they do, values agree to 2e-5."""
    x = gaussian(64, GROUP) * (gaussian(64, GROUP, seed=2) * spread).exp()
    x[:, ::9] = 0
    made = quantizer(name).quantize(x)
    values, compared = made.dequantize(), 0
    for row in range(64):
        k, codes, expected = float64_expansion(x[row], name)
        if VARIANTS[name][1] and abs(16 * k - round(16 * k)) < 1e-4:
            continue  # k itself is a near-tie
        alike = torch.from_numpy(codes.view(np.uint8)) == made.codes[row]
        assert alike.double().mean() > 0.98
        error = np.abs(values[row].numpy() - expected) / np.maximum(np.abs(expected), 1e-300)
        assert error[alike.numpy()].max() < 2e-5
        compared += 1
    assert compared > 48


@pytest.mark.quick("expansion")
@every_variant
def test_published_errors_and_exponents(name):
    """The medians of Gaussian first and chi-square second moments: 0.0216 to 0.0115, and 0.0215 to 0.0070."""
    for x, before, after, exponent in (
        (gaussian(400, 1280), 0.0216, 0.0115, 1.9),
        (chi_square(400, 1280), 0.0215, 0.0070, 3.1),
    ):
        made = quantizer(name).quantize(x)
        assert relative_error(quantizer("absmax")(x), x) == pytest.approx(before, rel=0.02)
        assert relative_error(made.dequantize(), x) == pytest.approx(after, rel=0.12)
        assert made.tensors["exponent"].median().item() == pytest.approx(exponent, rel=0.1)


@for_each("ratio, exponent, gain", [(1e1, 5.0, 4.7), (1e3, 1.625, 1.6), (1e5, 1.0, 1.0), (1e8, 0.625, 1.0)])
def test_expansion_gains_nothing_where_the_exponent_is_at_most_one(ratio, exponent, gain):
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(2000, GROUP, generator=generator) * math.log(ratio)).exp()
    x[:, 0], x[:, 1] = 1, ratio
    made = quantizer("expansion_sixteenths").quantize(x)
    assert (made.tensors["exponent"] == exponent).all()
    found = relative_error(quantizer("absmax")(x), x) / relative_error(made.dequantize(), x)
    assert found == pytest.approx(gain, rel=0.07)


@every_variant
def test_expansion_lowers_the_error_of_adams_step(name):
    """The error of m / sqrt(v) with both rounded: the paper's Table 1 has 20.10 without and 12.31 with expansion."""
    m, v = gaussian(64, 1280), chi_square(64, 1280) * 1e-2 + 1e-8

    def error(rule):
        rounded = quantizer(rule)(m) / (quantizer(rule)(v).sqrt() + 1e-8)
        return (rounded - m / (v.sqrt() + 1e-8)).square().mean()

    assert error(name) < error("absmax") / 1.5


def test_quantizing_again_changes_nothing_where_the_exponent_stays():
    x = gaussian(2000, GROUP)
    first = quantizer("expansion_sixteenths").quantize(x)
    second = quantizer("expansion_sixteenths").quantize(first.dequantize())
    same = (first.tensors["exponent"] == second.tensors["exponent"]).flatten()
    assert 0.6 < same.double().mean() < 0.9  # 73% of Gaussian groups
    same_bits(second.codes[same], first.codes[same])
    torch.testing.assert_close(second.dequantize()[same], first.dequantize()[same], rtol=2e-6, atol=0)
    assert not second.dequantize()[~same].equal(first.dequantize()[~same])


@every_variant
def test_zeros_stay_and_nonzero_values_do_not_become_zero(name):
    x = gaussian(50, GROUP) * (gaussian(50, GROUP, seed=2) * 10).exp()
    for first in (x[:, 0].clone(), torch.zeros(50)):  # at any position of the zero
        x[:, 0] = first
        x[:, 77] = -0.0
        found = quantizer(name)(x)
        assert ((found == 0) == (x == 0)).all()
        assert found[:, 77].signbit().all()
    x[:, 0], x[:, 77] = x[:, 1], x[:, 1]
    without = quantizer(name).quantize(x)
    x[:, 77] = 0
    with_one = quantizer(name).quantize(x)
    for part in ("scale", "exponent", "center"):
        same_bits(without.tensors[part], with_one.tensors[part])


@every_variant
def test_groups_of_one_magnitude_are_restored(name):
    for value in (2.5, -1.0, 3e38, 1e-40, 2.0**-149):
        x = torch.full((1, 200), value)
        made = quantizer(name).quantize(x)
        torch.testing.assert_close(made.dequantize(), x, rtol=2e-6, atol=0)
        assert (made.tensors["exponent"] == 8).all()
    zeros = quantizer(name).quantize(torch.zeros(3, 200))
    assert not zeros.dequantize().any()
    assert all(zeros.tensors[part].isfinite().all() for part in ("scale", "exponent", "center"))
    near = torch.tensor([[1.0, 1.0 + 2.0**-23]])
    torch.testing.assert_close(quantizer(name)(near), near, rtol=0.01, atol=0)


@every_variant
def test_the_widest_group_keeps_its_large_numbers(name):
    x = torch.tensor([[2.0**-149, 1e-40, 1.0, -3e38, 0.0]])
    found = quantizer(name)(x)
    assert found[0, 3].item() == pytest.approx(-3e38, rel=1e-4)
    assert 0.2 < found[0, 2].item() < 5  # an exponent of an eighth
    assert found[0, 4] == 0


@every_variant
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_nan_or_infinity_makes_its_group_nan(name, bad):
    x = gaussian(2, 300)
    x[1, 130] = bad
    made = quantizer(name).quantize(x)
    lost = torch.zeros(2, 300, dtype=torch.bool)
    lost[1, 128:256] = True
    assert (made.dequantize().isnan() == lost).all()
    assert not made.codes[lost].any()


@every_variant
def test_expansion_needs_a_floating_point_format(name):
    for format in ("int8", "dynamic8", "posit8_2", "bf16"):
        with pytest.raises(QuantizationError, match=f"onto .*{format[:3]}.* expected a floating-point format"):
            quantizer(name, format=format)(gaussian(2, 32))
    for format in ("e5m2", "e4m3fnuz", "e2m1fn", "e3m2fn", "fp16"):
        x = gaussian(2, 32)
        assert relative_error(quantizer(name, 32, format)(x), x) < 0.25


def test_expansion_is_for_stored_tensors_and_no_matmul_operand():
    coat = get_storage(quantizer("expansion"), flat=True)
    assert (coat.bytes, get_recipe("coat").bytes_per_parameter().states) == (1.09375, 2.1875)
    with pytest.raises(RecipeError, match=r"is for stored tensors .*Take current"):
        halfstep.recipe.linear_spec(input=coat.quantizer)
    operand = {"format": "e4m3fn", "tile": "1x128", "scale": "expansion"}
    mine = {"name": "mine", "base": "fp8-current", "rules": [{"path": "*", "input": operand}]}
    with pytest.raises(RecipeError, match="is for stored tensors"):
        halfstep.recipe.from_data(mine, get_recipe)
    whole = Quantizer(formats.get("e4m3fn"), scales=Scales(TENSOR, get_scaling("expansion")))
    assert whole(gaussian(3, 5)).isfinite().all()


# ---- log2 and exp2 ---------------------------------------------------------------------------------------------------


def ulps(found, exact):
    """The largest error of float32 values against exact ones, in units of the last place."""
    distance = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    return float((np.abs(found.double().numpy() - exact) / distance).max())


@for_each("exponent", [-126, -20, -2, -1, 0, 1, 127])
def test_log2_is_within_its_error_bound(exponent):
    """Every 37th value of a binade; all of them in tests/exhaustive/logarithm.py."""
    x = torch.arange((exponent + 127 << 23) + 1, exponent + 128 << 23, 37, dtype=torch.int32).view(torch.float32)
    assert ulps(log2(x), np.log2(x.double().numpy())) < 2.2
    assert log2(torch.tensor([2.0**exponent])).item() == exponent


def test_exp2_is_within_its_error_bound():
    x = torch.linspace(-126, 127, 1 << 18, dtype=torch.float64).float()
    assert ulps(exp2(x), np.exp2(x.double().numpy())) < 1.3
    whole = torch.arange(-126, 128).float()
    same_bits(exp2(whole), torch.ldexp(torch.ones(254), whole.int()))
