"""What holds of every format, stated as properties of round_to."""

from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from halfstep import formats, round_to
from oracles.numbers import same_bits
from oracles.rounding import neighbours


every_format = pytest.mark.parametrize("format", [formats.get(n) for n in formats.names()], ids=lambda f: f.name)
deterministic = st.sampled_from(["nearest_even", "nearest_away", "toward_zero"])
overflows = st.sampled_from(["saturate", "ieee"])
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def rounded(x, format, rounding="nearest_even", overflow="saturate"):
    return round_to(torch.tensor(x, dtype=torch.float32), format, rounding, overflow)


@every_format
@given(x=finite, y=finite, rounding=deterministic)
def test_monotone(format, x, y, rounding):
    x, y = sorted((x, y))
    assert rounded(x, format, rounding) <= rounded(y, format, rounding)


@every_format
@given(x=st.floats(width=32), rounding=deterministic, overflow=overflows)
def test_idempotent(format, x, rounding, overflow):
    once = rounded(x, format, rounding, overflow)
    same_bits(round_to(once, format, rounding, overflow), once)


@every_format
@given(x=finite, rounding=deterministic, overflow=overflows)
def test_odd(format, x, rounding, overflow):
    same_bits(rounded(-x, format, rounding, overflow), -rounded(x, format, rounding, overflow))


@every_format
@given(x=finite)
def test_nearest_is_off_by_half_a_gap_at_most(format, x):
    assume(abs(x) <= format.max)
    below, above = neighbours(abs(Fraction(x)), format)
    error = abs(abs(Fraction(rounded(x, format).item())) - abs(Fraction(x)))
    assert error == min(abs(Fraction(x)) - below, above - abs(Fraction(x)))
    assert error <= (above - below) / 2


@every_format
@given(x=finite, seed=st.integers(0, 2**64 - 1))
def test_stochastic_gives_a_neighbour(format, x, seed):
    assume(abs(x) <= format.max)
    result = abs(Fraction(round_to(torch.tensor(x), format, "stochastic", generator=seed).item()))
    below, above = neighbours(abs(Fraction(x)), format)
    assert result in (below, min(above, Fraction(format.max)))


@every_format
@given(x=finite, overflow=overflows)
def test_toward_zero_never_grows(format, x, overflow):
    assert abs(rounded(x, format, "toward_zero", overflow).item()) <= abs(x)


@pytest.mark.parametrize("format", [f for f in map(formats.get, formats.names()) if f.bits <= 8], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_value_of_the_format_is_its_own_image(format, dtype):
    values = torch.tensor([float(v) for v in format.values()], dtype=torch.float64).to(dtype)
    for rounding in ("nearest_even", "nearest_away", "toward_zero", "stochastic"):
        same_bits(round_to(values, format, rounding, "ieee", generator=0), values)
        same_bits(round_to(-values, format, rounding, generator=0), -values)
