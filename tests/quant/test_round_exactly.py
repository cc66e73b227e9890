"""round_to is rounding by definition: for every 16-bit input, at every boundary, from float64 in one step."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep import formats, round_to
from oracles.numbers import boundaries, every_16_bit_value, same_bits
from oracles.rounding import exact, largest_shared, on_grid


FORMATS = [formats.get(name) for name in formats.names()]
LISTED = [f for f in FORMATS if f.bits <= 16]
every_format = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
every_rounding = pytest.mark.parametrize("rounding", ["nearest_even", "nearest_away", "toward_zero"])
every_overflow = pytest.mark.parametrize("overflow", ["saturate", "ieee"])


@pytest.mark.parametrize("format", LISTED, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_rounding
@every_overflow
def test_every_16_bit_value(format, dtype, rounding, overflow):
    x = every_16_bit_value(dtype)
    largest = largest_shared(format.name, str(dtype).removeprefix("torch."))
    expected = torch.from_numpy(on_grid(x.double().numpy(), format, rounding, overflow, largest))
    same_bits(round_to(x, format, rounding, overflow), expected.to(dtype))


@pytest.mark.parametrize("format", ["fp32", "tf32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_rounding
def test_a_wide_format_holds_every_16_bit_value(format, dtype, rounding):
    x = every_16_bit_value(dtype)
    same_bits(round_to(x, format, rounding, "ieee"), x)
    same_bits(round_to(x, format, rounding), x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max))


@every_format
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@every_rounding
@every_overflow
def test_boundaries(format, dtype, rounding, overflow):
    x = boundaries(format, dtype)
    expected = torch.tensor([exact(v, format, rounding, overflow) for v in x], dtype=torch.float64)
    actual = round_to(torch.from_numpy(np.array(x, dtype)), format, rounding, overflow)
    same_bits(actual, expected.to(actual.dtype))


@every_format
@every_rounding
@given(x=st.floats(width=32))
def test_any_float32(format, rounding, x):
    expected = torch.tensor(exact(x, format, rounding, "ieee"), dtype=torch.float64).float()
    same_bits(round_to(torch.tensor(x), format, rounding, "ieee"), expected)


@every_format
@given(x=st.floats())
def test_any_float64_is_rounded_once(format, x):
    wide = torch.tensor(x, dtype=torch.float64)
    same_bits(round_to(wide, format), torch.tensor(exact(x, format, "nearest_even", "saturate"), dtype=torch.float64))


@pytest.mark.parametrize(
    ("x", "format", "expected"),
    [(17 + 2.0**-30, "e4m3fn", 18.0), (257 * (1 + 2.0**-30), "bf16", 258.0), (2049 + 1e-9, "fp16", 2050.0)],
)
def test_values_that_other_libraries_round_twice(x, format, expected):
    """Through float32 each of these lands on a tie, and then on the wrong side of it."""
    wide = torch.tensor(x, dtype=torch.float64)
    assert round_to(wide, format).item() == expected
    assert round_to(wide.float(), format).item() != expected


@pytest.mark.parametrize(
    ("format", "x", "rounding", "overflow", "expected"),
    [
        ("e4m3fn", 464.0, "nearest_even", "ieee", 448.0),  # a tie, and 448 is the even one
        ("e4m3fn", 464.01, "nearest_even", "ieee", np.nan),
        ("e4m3fn", 464.0, "nearest_away", "ieee", np.nan),
        ("e4m3fn", np.inf, "nearest_even", "ieee", np.nan),
        ("e4m3fn", np.inf, "nearest_even", "saturate", 448.0),
        ("e4m3fn", 1e6, "toward_zero", "ieee", 448.0),
        ("e5m2", 61440.0, "nearest_even", "ieee", np.inf),  # a tie, and 57344 is odd
        ("e5m2", 61439.0, "nearest_even", "ieee", 57344.0),
        ("e5m2", 61440.0, "nearest_even", "saturate", 57344.0),
        ("fp16", 65519.0, "nearest_even", "ieee", 65504.0),
        ("fp16", 65520.0, "nearest_even", "ieee", np.inf),
        ("fp16", np.inf, "toward_zero", "ieee", np.inf),
    ],
)
def test_overflow_is_decided_after_rounding(format, x, rounding, overflow, expected):
    for sign in (1, -1):
        same_bits(round_to(torch.tensor(sign * x), format, rounding, overflow), torch.tensor(sign * expected))


@pytest.mark.parametrize(
    ("dtype", "format", "largest"),
    [(torch.float16, "bf16", 65280.0), (torch.bfloat16, "fp16", 65280.0), (torch.float16, "fp32", 65504.0)],
)
def test_saturation_stays_inside_the_dtype_that_holds_the_values(dtype, format, largest):
    for x in (float("inf"), torch.finfo(dtype).max):
        assert round_to(torch.tensor(x, dtype=dtype), format).item() == largest
