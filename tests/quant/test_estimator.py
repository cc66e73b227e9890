"""The differentiable gradient estimator: the released code's values, and the curve whose derivative it is."""

from itertools import pairwise

import pytest
import torch

from halfstep import formats, get_quantizer
from halfstep.errors import QuantizationError
from halfstep.quant import Estimator, Quantizer, Scales
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import ROW


FP4 = formats.get("fp4")
GRIDS = ("fp4", "e3m0", "e2m3fn", "int4", "nf4", "float8_e4m3fn")
GOLDEN = (0.2002, 0.4375, 0.6055, 0.2168, 1.8359, 0.2695, 0.3027, 0.2695, 0.2402, 0.5781)
"""The released code's unit test: k = 5, cap 3, at 20 points from -6 to 6 in bf16; the other ten mirror these."""


def test_derivatives_equal_the_released_unit_test():
    found = Estimator(5.0, 3.0).derivative(torch.linspace(-6, 6, 20).bfloat16(), FP4).bfloat16().float()
    torch.testing.assert_close(found, torch.tensor(GOLDEN + GOLDEN[::-1]), rtol=0, atol=5e-5)


def derivative_by_equation(x, k, cap):
    """f' from the equation, in float64, interval by interval."""
    values = sorted({sign * v for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6) for sign in (-1, 1)})
    result = torch.full_like(x, 1 / k)
    for v, w in pairwise(values):
        inside = (x >= v) & (x <= w)
        u = (2 * (x - v) / (w - v) - 1).abs()
        result = torch.where(inside, (u ** (1 / k - 1) / k).clamp(max=cap), result)
    return result


@pytest.mark.parametrize("k", [1.0, 3.0, 5.0, 10.0])
@pytest.mark.parametrize("cap", [3.0, 10.0])
def test_the_derivative_equals_the_equations(k, cap):
    x = torch.linspace(-7, 7, 100_003, dtype=torch.float64).float().double()
    torch.testing.assert_close(
        Estimator(k, cap).derivative(x, FP4).double(), derivative_by_equation(x, k, cap), rtol=2e-5, atol=0
    )


@pytest.mark.parametrize("name", GRIDS)
def test_the_curve_passes_through_the_values_and_has_the_derivative(name):
    """f(v) = v at every value; f's finite differences equal f' where it is not steep; f' is at least 1/k, which it
    equals at the values."""
    format, estimator = formats.get(name), Estimator(5.0, None)
    values = torch.tensor(format.values(), dtype=torch.float64)
    assert torch.equal(estimator.curve(values, format), values)
    slopes = estimator.derivative(values, format)
    torch.testing.assert_close(slopes, torch.full_like(slopes, 0.2), rtol=2e-6, atol=0)
    low, gap = values[:-1, None], values.diff()[:, None]
    x = (low + gap * torch.tensor([0.05, 0.2, 0.4, 0.6, 0.83], dtype=torch.float64)).flatten()
    step = (gap * 1e-6).expand(-1, 5).flatten()
    difference = (estimator.curve(x + step, format) - estimator.curve(x - step, format)) / (2 * step)
    torch.testing.assert_close(estimator.derivative(x, format).double(), difference, rtol=2e-4, atol=0)
    assert estimator.derivative(x, format).min() >= 0.2


@pytest.mark.parametrize("name", GRIDS)
def test_the_uncapped_mean_derivative_between_two_values_is_one(name):
    """The integral over an interval is its width: substituting u = s^5 makes the integrand constant."""
    format, estimator = formats.get(name), Estimator(5.0, None)
    values = torch.tensor(format.values(), dtype=torch.float64)
    s = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    for low, gap in zip(values[:-1], values.diff(), strict=True):
        x = low + gap / 2 * (1 + s**5)
        weights = 5 * s**4
        found = (estimator.derivative(x, format).double() * weights)[s > 0.2].mean() * (s > 0.2).double().mean()
        assert found == pytest.approx(1 - 0.2, rel=2e-2)


@pytest.mark.quick("10.0-0.383")
@pytest.mark.parametrize(("k", "mean"), [(3.0, 0.778), (5.0, 0.5935), (10.0, 0.383)])
def test_mean_derivative_under_a_cap_of_three(k, mean):
    """The figures of the docstring and of the recipes' notes."""
    x = (torch.arange(2_000_000, dtype=torch.float64) + 0.5) / 2_000_000 * 2 + 2
    assert float(Estimator(k).derivative(x, FP4).double().mean()) == pytest.approx(mean, abs=6e-4)


def test_k_of_one_is_the_straight_through_estimator():
    x = torch.randn(1000)
    assert torch.equal(Estimator(1.0).derivative(x, FP4), torch.ones(1000))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_nan_infinity_and_empty_tensors(dtype):
    found = Estimator().derivative(torch.tensor([float("nan"), float("inf"), -float("inf"), 100.0], dtype=dtype), FP4)
    assert found.dtype == torch.float32
    assert found[0].isnan()
    assert found[1:].tolist() == pytest.approx([0.2, 0.2, 0.2])
    assert Estimator().derivative(torch.empty(3, 0, dtype=dtype), FP4).shape == (3, 0)


@pytest.mark.parametrize("tile", [ROW, ROW.transposed])
def test_a_quantizers_derivative_is_at_the_scaled_values(tile):
    x = torch.randn(7, 33, generator=torch.Generator().manual_seed(0)) * 100
    quantizer = Quantizer(FP4, scales=Scales(tile, get_scaling("current")), estimator=Estimator())
    scaled = x * (6 / x.abs().amax(1 if tile == ROW else 0, keepdim=True))
    torch.testing.assert_close(quantizer.derivative(x), Estimator().derivative(scaled, FP4), rtol=1e-4, atol=1e-5)
    with pytest.raises(QuantizationError, match="without an estimator"):
        get_quantizer("mxfp4").derivative(x)


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"k": 0.5}, "k = 0.5; expected a number from 1"), ({"cap": 0.0}, "cap = 0.0; expected a positive number, or")],
)
def test_invalid_estimators_raise(fields, words):
    with pytest.raises(QuantizationError, match=words):
        Estimator(**fields)


def test_an_estimator_of_a_16_bit_format_raises():
    with pytest.raises(QuantizationError, match=r"estimator k=5 cap=3 for bf16.*expected a format of at most 8 bits"):
        Quantizer(formats.get("bf16"), estimator=Estimator())
