"""Errors of rounding that papers and other libraries' measurements give, to the digits given."""

import math

import numpy as np
import pytest
import torch

from halfstep import round_to


@pytest.mark.parametrize(
    ("format", "error"),
    [("bf16", 1.6578e-3), ("fp16", 2.0683e-4), ("tf32", 2.0683e-4), ("e4m3fn", 2.6527e-2), ("e5m2", 5.2727e-2)],
)
def test_relative_rms_error_of_normal_numbers(format, error):
    x = torch.from_numpy(np.random.default_rng(0).standard_normal(65536).astype(np.float32)).double()
    found = ((round_to(x.float(), format).double() - x).norm() / x.norm()).item()
    assert found == pytest.approx(error, rel=5e-5)


@pytest.mark.parametrize(
    ("rounding", "largest", "bias"),
    [("nearest_even", 2.0**-8 / (1 + 2.0**-8), 0.0), ("toward_zero", 2.0**-7, -2.81e-3)],
)
def test_bfloat16_study_relative_error_and_bias(rounding, largest, bias):
    """Truncation shrinks by 2.8e-3 on average, rounding to nearest by nothing: the study's reason for the latter."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal(10**6).astype(np.float32))
    rounded = round_to(x, "bf16", rounding).double()
    relative = (rounded.abs() - x.double().abs()) / x.double().abs()
    assert 0.98 * largest < relative.abs().max() <= largest
    assert relative.mean().item() == pytest.approx(bias, abs=1e-5)


def test_bfloat16_study_dot_product_shows_where_the_sum_is_kept():
    """4096 values in U(0.5, 1.5): inputs rounded to nearest cost 1e-5, truncated ones 6e-3, a bf16 sum 83 %."""
    random = np.random.default_rng(0)
    a, b = (torch.from_numpy(random.uniform(0.5, 1.5, 4096).astype(np.float32)) for _ in range(2))
    true = (a.double() @ b.double()).item()

    def error(product: float) -> float:
        return product / true - 1

    nearest = error((round_to(a, "bf16") @ round_to(b, "bf16")).item())
    truncated = error((round_to(a, "bf16", "toward_zero") @ round_to(b, "bf16", "toward_zero")).item())
    total = torch.zeros(())
    for term in round_to(a, "bf16") * round_to(b, "bf16"):
        total = round_to(total + term, "bf16")
    assert abs(nearest) < 1e-4
    assert truncated == pytest.approx(-5.9e-3, abs=5e-4)
    assert error(total.item()) == pytest.approx(-0.83, abs=0.1)


@pytest.mark.parametrize(("scale", "lost"), [(1, 1 / 3), (8, 2 / 15), (2**10, 0.0)])
def test_underflow_of_gradients_in_fp16_and_what_the_loss_scale_saves(scale, lost):
    """g = 2^U(-30, -15): fp16 makes zero of what is below 2^-25 after scaling."""
    count = 100_000
    g = torch.from_numpy(2.0 ** np.random.default_rng(0).uniform(-30, -15, count))
    fraction = (round_to(g.float() * scale, "fp16") == 0).double().mean().item()
    assert abs(fraction - lost) <= 4 * math.sqrt(lost * (1 - lost) / count)


def test_half_of_the_smallest_fp16_value_is_a_tie_that_goes_to_zero():
    g = torch.tensor([2.0**-25, np.nextafter(np.float32(2.0**-25), np.float32(1))])
    torch.testing.assert_close(round_to(g, "fp16"), torch.tensor([0.0, 2.0**-24]), rtol=0, atol=0)
