"""Properties of round_to, encode and decode that hold for every format; a new format is tested by being registered.

The neighbours of a value are the results of rounding down and up; beyond that only the format's own attributes are
used."""

import math
from bisect import bisect_left
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

from families import for_each, slow_unless
from halfstep import decode, encode, formats, quantize, round_to
from halfstep.formats import Posit
from oracles import formats as oracle
from oracles.numbers import same_bits


FORMATS = [formats.get(name) for name in formats.names()]
BLOCKS = [(name, rule) for name in formats.block_names() for rule in formats.get_block(name).rules]
# For formats that an oracle knows, tests/quant/test_round_exactly.py compares every 16-bit value with it, which implies
# the properties; fast tests check one such format of each kind.
KINDS = {
    "fp32", "bf16", "float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e8m0fnu", "float4_e2m1fn",
    "int8", "uint8", "posit8_1", "dynamic8_unsigned", "nf4",
}  # fmt: skip


def fast(format):
    return format.name in KINDS or format.name not in oracle.NAMES


every_format = pytest.mark.parametrize("format", slow_unless(fast, FORMATS), ids=lambda f: f.name)
every_narrow_format = pytest.mark.parametrize(
    "format", slow_unless(fast, [f for f in FORMATS if f.bits <= 16]), ids=lambda f: f.name
)
every_block = pytest.mark.parametrize(("name", "rule"), BLOCKS, ids=["-".join(pair) for pair in BLOCKS])
first_rule = pytest.mark.parametrize(
    ("name", "rule"),
    slow_unless(lambda case: case[1] == formats.get_block(case[0]).rules[0], BLOCKS),
    ids=["-".join(pair) for pair in BLOCKS],
)
MODES = ("nearest_even", "nearest_away", "nearest_up", "toward_zero", "up", "down")
OVERFLOWS = ("saturate", "ieee")
lists = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=60)
any_lists = st.lists(st.floats(width=32), min_size=1, max_size=60)
some, few = settings(max_examples=20), settings(max_examples=10)  # examples; fewer for tests that loop over all modes


def rounded(x, format, rounding="nearest_even", overflow="saturate"):
    return round_to(torch.tensor(x, dtype=torch.float64), format, rounding, overflow)


def inside(x, format):
    """The values of x within the format's range; assumes that there are some (pure-exponent formats have no zero)."""
    kept = [v for v in x if format.min <= v <= format.max]
    assume(kept)
    return kept


@every_narrow_format
def test_significant_bits_represent_every_value(format):
    numerators = [abs(Fraction(v).numerator) for v in format.values() if v and math.isfinite(v)]
    longest = max((n // (n & -n)).bit_length() for n in numerators)
    assert longest <= format.significant_bits
    assert longest == format.significant_bits or format.significant_bits == 53


@every_format
@few
@given(x=lists)
def test_rounding_is_monotone(format, x):
    x = sorted(inside(x, format) if format.min > 0 else x)
    for rounding in MODES:
        result = rounded(x, format, rounding)
        assert (result.diff() >= 0).all()


@pytest.mark.quick("fp32", "float8_e4m3fn", "float8_e8m0fnu", "posit8_1", "nf4")
@every_format
@few
@given(x=any_lists)
def test_rounding_is_idempotent(format, x):
    for rounding in MODES:
        for overflow in OVERFLOWS:
            once = rounded(x, format, rounding, overflow)
            same_bits(round_to(once, format, rounding, overflow), once)


@every_format
@few
@given(x=any_lists)
def test_rounding_is_symmetric_for_symmetric_formats(format, x):
    """round(-x) is -round(x) with up and down exchanged; also for ties, if they go to the even code."""
    values = format.values() if format.bits <= 16 else (format.min, format.max)
    if values != tuple(-v for v in reversed(values)):
        return
    exchanged = {"up": "down", "down": "up"}
    even = [mode for mode in MODES if mode != "nearest_up"]  # its mirror image sends ties to the lower value
    modes = even if format.ties == "even" else ["toward_zero", "up", "down"]
    x = torch.tensor(x, dtype=torch.float64)
    for rounding in modes:
        for overflow in OVERFLOWS:
            mirrored = round_to(-x, format, exchanged.get(rounding, rounding), overflow)
            plain = -round_to(x, format, rounding, overflow)
            same_bits(mirrored, plain if format.has_negative_zero else plain + 0.0)


@pytest.mark.quick("fp32", "float8_e4m3fn", "float8_e8m0fnu", "posit8_1", "nf4")
@every_format
@some
@given(x=lists)
def test_nearest_is_the_nearer_neighbour(format, x):
    """Nearest gives the nearer neighbour (for posits: either neighbour, but never zero)."""
    x = inside(x, format)
    low, high, near = (rounded(x, format, r).tolist() for r in ("down", "up", "nearest_even"))
    for value, below, above, result in zip(map(Fraction, x), low, high, near, strict=True):
        assert below <= value <= above
        assert result in (below, above)
        if isinstance(format, Posit):
            assert value == 0 or result != 0
        else:
            assert abs(Fraction(result) - value) == min(value - Fraction(below), Fraction(above) - value)


@every_narrow_format
@some
@given(x=lists)
def test_up_and_down_give_the_adjacent_values(format, x):
    x, values = inside(x, format), format.values()
    for value, below, above in zip(x, *(rounded(x, format, r).tolist() for r in ("down", "up")), strict=True):
        place = bisect_left(values, value)
        assert above == values[place]
        assert below == (values[place] if values[place] == value else values[place - 1])


@pytest.mark.quick("fp32", "float8_e4m3fn", "float8_e8m0fnu", "posit8_1", "nf4")
@every_format
@some
@given(x=lists, seed=st.integers(0, 2**64 - 1))
def test_stochastic_gives_a_neighbour(format, x, seed):
    x = inside(x, format)
    low, high = (rounded(x, format, r) for r in ("down", "up"))
    result = round_to(torch.tensor(x, dtype=torch.float64), format, "stochastic", generator=seed)
    assert ((result == low) | (result == high)).all()


@every_format
@few
@given(x=lists)
def test_toward_zero_never_increases_the_magnitude(format, x):
    if format.min > 0:
        x = inside(x, format)
    for overflow in OVERFLOWS:
        assert (rounded(x, format, "toward_zero", overflow).abs() <= torch.tensor(x, dtype=torch.float64).abs()).all()


@every_format
@some
@given(x=lists)
def test_decoded_codes_equal_the_rounded_values(format, x):
    x = torch.tensor(x)
    codes = encode(x, format) if format.has_nan or format.min <= 0 else encode(x[:0], format)
    same_bits(decode(codes, format, torch.float64), round_to(x, format, dtype=torch.float64)[: len(codes)])


@every_narrow_format
@for_each("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_values_of_the_format_are_unchanged(format, dtype):
    values = torch.tensor(format.values(), dtype=torch.float64)
    held = values.to(dtype)
    held = held[held.double() == values]
    for rounding in (*MODES, "stochastic"):
        same_bits(round_to(held, format, rounding, "ieee", generator=0), held)
        same_bits(round_to(held, format, rounding, generator=0), held)


@every_narrow_format
def test_boundaries_separate_adjacent_values(format):
    values, cuts = (torch.tensor(v, dtype=torch.float64) for v in (format.values(), format.boundaries()))
    assert len(cuts) == len(values) - 1
    assert ((values[:-1] <= cuts) & (cuts <= values[1:])).all()
    inner = (values[:-1] < cuts) & (cuts < values[1:])
    for side, neighbours in ((-math.inf, values[:-1]), (math.inf, values[1:])):
        beside = torch.nextafter(cuts, torch.full_like(cuts, side))
        same_bits(round_to(beside, format)[inner] + 0.0, neighbours[inner])


block_numbers = st.lists(
    st.one_of(
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        st.sampled_from([0.0, -0.0, 2.0**-149, -(2.0**-127), 3.4028234663852886e38, 448.0, 449.0, 6.0, 1.0]),
    ),
    min_size=1,
    max_size=70,
)


@pytest.mark.quick(
    "fp8_1x128-absmax", "dynamic8-absmax", "int8_tensor-absmax", "mxfp6_e3m2-floor", "bnb_fp4-absmax", "mxfp4-floor"
)
@first_rule
@some
@given(x=block_numbers)
def test_scales_of_finite_values_are_never_nan(name, rule, x):
    x = torch.tensor(x)
    found = quantize(x, name, scale=rule)
    result = found.dequantize()
    assert result.isfinite().all()
    assert result.shape == x.shape
    if found.scale.is_floating_point():
        assert found.scale.isfinite().all()
    else:
        assert (found.scale != 255).all() or rule in ("double_absmax",)
    same_bits(round_to(x, name, scale=rule), result)


@every_block
@for_each("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@for_each("size", ["zero", "subnormal", "huge", "one among zeros"])
def test_extreme_blocks(name, rule, dtype, size):
    info = torch.finfo(dtype)
    x = {
        "zero": torch.zeros(3, 300),
        "subnormal": torch.randn(3, 300).double() * min(info.smallest_normal, 2.0**-126),
        "huge": torch.randn(3, 300).clamp(-1, 1).double() * min(info.max, 3.4e38),
        "one among zeros": torch.eye(3, 300),
    }[size].to(dtype)
    result = quantize(x, name, scale=rule).dequantize()
    assert result.isfinite().all()
    assert (result[x == 0] == 0).all() or rule == "double_absmax"
    assert (result.double().abs() <= 2 * x.double().abs().max()).all()
