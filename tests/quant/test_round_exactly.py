"""round_to against exact rounding: for every 16-bit input, at every boundary, from float64 in one step."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from families import in_turn, slow_unless
from halfstep import formats
from halfstep.quant import round_to
from oracles import formats as oracle
from oracles.numbers import every_16_bit_value, hard_inputs, largest_shared, same_bits


every_listed = pytest.mark.parametrize("name", oracle.LISTED)
every_wide = pytest.mark.parametrize("name", oracle.WIDE)
every_format = pytest.mark.parametrize("name", oracle.NAMES)
every_short_format = pytest.mark.parametrize(
    "name", slow_unless(lambda name: formats.get(name).bits != 16 or name == "bf16", oracle.NAMES)
)
every_rounding = pytest.mark.parametrize("rounding", oracle.MODES)
every_overflow = pytest.mark.parametrize("overflow", oracle.OVERFLOWS)
HALF, WIDE = [torch.bfloat16, torch.float16], [np.float32, np.float64]
half_precision = pytest.mark.parametrize("dtype", HALF, ids=str)
every_16_bits = pytest.mark.parametrize(
    ("dtype", "overflow"),
    slow_unless(in_turn(HALF, oracle.OVERFLOWS).__contains__, product(HALF, oracle.OVERFLOWS)),
)


def oracle_rounded(name, x, rounding, overflow):
    return torch.from_numpy(oracle.get(name).round(x.double().numpy(), rounding, overflow))


def test_every_named_format_has_an_oracle():
    assert set(formats.names()) == set(oracle.NAMES)


@pytest.mark.quick(
    "dtype0-saturate-fp16",
    "dtype0-saturate-int4",
    "dtype3-ieee-fp16",
    "dtype3-ieee-int8",
    "dtype3-ieee-dynamic8_unsigned",
)
@every_listed
@every_16_bits
def test_every_16_bit_value_rounds_as_the_oracle(name, dtype, overflow):
    x = every_16_bit_value(dtype)
    for rounding in oracle.MODES:
        same_bits(
            round_to(x, name, rounding, overflow, dtype=torch.float64), oracle_rounded(name, x, rounding, overflow)
        )


@pytest.mark.quick("saturate-torch.bfloat16-int4", "ieee-torch.bfloat16-int4", "ieee-torch.bfloat16-uint4")
@every_listed
@half_precision
@every_overflow
def test_16_bit_values_rounded_in_their_own_dtype(name, dtype, overflow):
    """Values of the format that the 16-bit dtype lacks are rounded to the dtype; saturation ends at the largest value
    of both."""
    x, end = every_16_bit_value(dtype), largest_shared(name, dtype)
    for rounding in ("nearest_even", "up"):
        exact = oracle_rounded(name, x, rounding, overflow)
        if overflow == "saturate":
            exact = exact.clamp(-end, end)
        same_bits(round_to(x, name, rounding, overflow), exact.to(dtype))


@pytest.mark.parametrize("name", ["fp32", "tf32"])
@half_precision
@every_rounding
def test_wide_formats_leave_16_bit_values_unchanged(name, dtype, rounding):
    x = every_16_bit_value(dtype)
    same_bits(round_to(x, name, rounding, "ieee"), x)
    same_bits(round_to(x, name, rounding), x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max))


@pytest.mark.quick(
    "saturate-nearest_even-torch.float16-posit32_2", "ieee-toward_zero-torch.float16-tf32", "ieee-up-torch.float16-tf32"
)
@pytest.mark.parametrize("name", ["fp32", "tf32", "posit32_2"])
@half_precision
@every_rounding
@every_overflow
def test_sampled_16_bit_values_in_wide_formats(name, dtype, rounding, overflow):
    x = every_16_bit_value(dtype)[::79]
    same_bits(round_to(x, name, rounding, overflow, dtype=torch.float64), oracle_rounded(name, x, rounding, overflow))


@pytest.mark.quick(
    "float32-saturate-float8_e5m2",
    "float32-saturate-uint8",
    "float32-saturate-uint4",
    "float64-ieee-float8_e3m4",
    "float64-ieee-float8_e8m0fnu",
    "float64-ieee-int4",
)
@every_short_format
@pytest.mark.parametrize(
    ("dtype", "overflow"), slow_unless(in_turn(WIDE, oracle.OVERFLOWS).__contains__, product(WIDE, oracle.OVERFLOWS))
)
def test_boundaries_round_as_the_oracle(name, dtype, overflow):
    """Every value and boundary with its neighbors, the ends of format and dtype, signed zeros, infinities, NaN."""
    x = torch.from_numpy(hard_inputs(name, dtype))
    for rounding in oracle.MODES:
        same_bits(
            round_to(x, name, rounding, overflow, dtype=torch.float64), oracle_rounded(name, x, rounding, overflow)
        )


@pytest.mark.quick("int8", "ocp_int8")
@every_format
@settings(max_examples=12)
@given(x=st.lists(st.floats(width=32), min_size=1, max_size=60))
def test_any_float32_rounds_as_the_oracle(name, x):
    x = torch.tensor(x)
    for rounding in oracle.MODES:
        same_bits(round_to(x, name, rounding, "ieee", dtype=torch.float64), oracle_rounded(name, x, rounding, "ieee"))


@pytest.mark.quick("uint8", "af4")
@every_format
@settings(max_examples=12)
@given(x=st.lists(st.floats(), min_size=1, max_size=60))
def test_any_float64_is_rounded_once(name, x):
    x = torch.tensor(x, dtype=torch.float64)
    for rounding in oracle.MODES:
        same_bits(round_to(x, name, rounding), oracle_rounded(name, x, rounding, "saturate"))


@pytest.mark.parametrize(
    ("x", "format", "nearest"),
    [
        (17 + 2.0**-30, "e4m3fn", 18.0),
        (257 * (1 + 2.0**-30), "bf16", 258.0),
        (2049 + 1e-9, "fp16", 2050.0),
        (2.5 + 2.0**-30, "e2m1fn", 3.0),
        (1.0625 + 2.0**-30, "posit8_2", 1.125),
        (2.5 + 2.0**-40, "int8", 3.0),
    ],
)
def test_float64_values_are_not_rounded_twice(x, format, nearest):
    """Through float32 each of these becomes a tie, and then goes to the wrong side."""
    wide = torch.tensor(x, dtype=torch.float64)
    assert round_to(wide, format).item() == nearest
    assert round_to(wide.float(), format).item() != nearest


@pytest.mark.parametrize(
    ("format", "x", "rounding", "overflow", "result"),
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
        ("e5m2", np.inf, "nearest_even", "ieee", np.inf),
        ("e5m2", np.inf, "nearest_even", "saturate", 57344.0),
        ("float8_e4m3", 248.0, "nearest_even", "ieee", np.inf),
        ("float8_e4m3fnuz", 247.9, "nearest_even", "ieee", 240.0),
        ("float8_e4m3fnuz", 248.0, "nearest_even", "ieee", np.nan),
        ("float8_e4m3fnuz", 1e6, "nearest_even", "saturate", 240.0),
        ("float8_e4m3fnuz", np.inf, "nearest_even", "saturate", np.nan),  # the table of ONNX
        ("float8_e5m2fnuz", 1e6, "nearest_even", "ieee", np.nan),
        ("float8_e5m2fnuz", 1e6, "nearest_even", "saturate", 57344.0),
        ("float8_e5m2fnuz", np.inf, "nearest_even", "ieee", np.nan),
        ("float8_e4m3b11fnuz", 31.0, "nearest_even", "ieee", np.nan),
        ("float6_e3m2fn", np.inf, "nearest_even", "ieee", 28.0),
        ("float4_e2m1fn", 1e6, "nearest_even", "ieee", 6.0),
        ("fp16", 65519.0, "nearest_even", "ieee", 65504.0),
        ("fp16", 65520.0, "nearest_even", "ieee", np.inf),
        ("fp16", np.inf, "toward_zero", "ieee", np.inf),
        ("int8", np.inf, "nearest_even", "ieee", 127.0),
        ("posit8_2", 1e30, "nearest_even", "ieee", 2.0**24),
        ("posit8_2", 1e-30, "nearest_even", "ieee", 2.0**-24),
        ("posit8_2", np.inf, "nearest_even", "saturate", np.nan),
    ],
)
def test_overflow_is_decided_after_rounding(format, x, rounding, overflow, result):
    for sign in (1, -1):
        same_bits(round_to(torch.tensor(sign * x), format, rounding, overflow), torch.tensor(sign * result))


@every_format
@every_overflow
def test_nan_stays_nan_and_zero_keeps_its_sign_where_the_format_has_it(name, overflow):
    x = torch.tensor([torch.nan, 0.0, -0.0])
    for rounding in oracle.MODES:
        result = round_to(x, name, rounding, overflow)
        assert result[0].isnan()
        if name == "float8_e8m0fnu":
            assert result.isnan().all()
        else:
            two = name in oracle.FLOATS and oracle.FLOATS[name][3] != "minus zero"
            same_bits(result[1:], torch.tensor([0.0, -0.0 if two else 0.0]))


@pytest.mark.parametrize(
    ("x", "exponent"),
    [(1.5, 1), (3.0, 2), (1.4999, 0), (2.0**-127, -127), (2.0**-140, -127), (2.0**127, 127), (1.49 * 2.0**127, 127)],
)
def test_e8m0_is_the_nearest_power_of_two_and_ties_go_up(x, exponent):
    assert round_to(torch.tensor(x, dtype=torch.float64), "e8m0", overflow="ieee").item() == 2.0**exponent
    assert round_to(torch.tensor(-x, dtype=torch.float64), "e8m0").isnan()


def test_e8m0_overflows_to_nan_or_saturates():
    x = torch.tensor([1.5 * 2.0**127, torch.inf])
    assert round_to(x, "e8m0", overflow="ieee").isnan().all()
    assert (round_to(x, "e8m0") == 2.0**127).all()


@pytest.mark.parametrize(
    ("dtype", "format", "largest"),
    [(torch.float16, "bf16", 65280.0), (torch.bfloat16, "fp16", 65280.0), (torch.float16, "fp32", 65504.0)],
)
def test_saturation_stays_within_the_result_dtype(dtype, format, largest):
    for x in (float("inf"), torch.finfo(dtype).max):
        assert round_to(torch.tensor(x, dtype=dtype), format).item() == largest
