"""round_exactly, which rounds one number in exact fractions: equal to round_to for every format, and to published
values."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from families import for_each, slow_unless
from halfstep import formats, quant
from halfstep.errors import FormatError
from halfstep.formats import Posit
from halfstep.formats.exact import OVERFLOWS, ROUNDINGS, boundary, line, nan_codes, neighbours, round_exactly


FORMATS = [formats.get(name) for name in [*formats.names(), "posit5_1", "posit3_2", "posit32_0", "e6m3", "e5m0"]]
every_format = for_each("format", FORMATS, ids=lambda f: f.name)


def hard_numbers(format):
    """Values, boundaries and their neighbors, both ends, zeros, NaN; all exact in float64."""
    values = line(format)
    middle = [values.at_most(x) for x in (-1.0, 0.0, 1.0, format.smallest, format.max / 3)]
    found = [0.0, -0.0, math.nan, format.max, format.min, 1.5 * format.max, -1.5 * format.max, 1e300, -1e300]
    for number in [*middle, values.numbers[0] + 1, values.numbers[-1] - 1]:
        sides = [values.value(n) for n in (number, number + 1) if n in values.numbers]
        found += sides
        if len(sides) == 2:
            turn = float(boundary(*map(Fraction, sides), format))
            found += [turn, math.nextafter(turn, math.inf), math.nextafter(turn, -math.inf), sum(sides) / 3]
    return [*found, math.inf, -math.inf]


@pytest.mark.slow
@every_format
def test_round_exactly_equals_round_to_and_encode(format):
    numbers = hard_numbers(format)
    x = torch.tensor(numbers, dtype=torch.float64)
    for rounding in ROUNDINGS[:-1]:
        for overflow in OVERFLOWS:
            expected = quant.round_to(x, format, rounding, overflow)
            found = [round_exactly(n if is_special(n) else Fraction(n), format, rounding, overflow) for n in numbers]
            for n, r, e in zip(numbers, found, expected.tolist(), strict=True):
                assert (r.value, math.copysign(1, r.value)) == (
                    e,
                    math.copysign(1, e),
                ) or r.value != r.value != e != e, n
            coded = [(n, r) for n, r in zip(numbers, found, strict=True) if r.code is not None]
            numbered = torch.tensor([n for n, _ in coded], dtype=torch.float64)
            assert quant.encode(numbered, format, rounding, overflow).tolist() == [r.code for _, r in coded]


def is_special(x):
    return not math.isfinite(x) or (x == 0 and math.copysign(1, x) < 0)


@every_format
def test_only_nan_in_a_format_without_nan_has_no_code(format):
    assert (round_exactly(math.nan, format).code is None) == (not format.has_nan)


@pytest.mark.parametrize(
    "format", slow_unless(lambda f: f.bits <= 8, [f for f in FORMATS if f.bits <= 16]), ids=lambda f: f.name
)
def test_line_enumerates_the_formats_values_boundaries_and_nan_codes(format):
    values = line(format)
    assert tuple(map(values.value, values.numbers)) == format.values()
    step = max(1, len(values.numbers) // 500)
    assert all(format.decode(values.code(n)) == values.value(n) for n in values.numbers[::step])
    turns = format.boundaries()
    assert [
        float(boundary(*map(Fraction, format.values()[i : i + 2]), format)) for i in range(0, len(turns), step)
    ] == [*turns[::step]]
    listed = [code for code in format.codes() if math.isnan(format.decode(code))]
    assert [code for run in nan_codes(format) for code in run] == listed


@pytest.mark.parametrize(
    ("x", "name", "code"),
    [
        ("4194303", "posit8_2", 0x7E),
        ("4194304", "posit8_2", 0x7E),
        ("4194305", "posit8_2", 0x7F),
        ("1/4194304", "posit8_2", 0x02),
        ("1e-30", "posit8_2", 0x01),
        ("0.1", "posit32_2", 0x24CCCCCD),
        ("1/3", "posit32_2", 0x32AAAAAB),
        ("-1.5", "posit32_2", 0xBC000000),
        ("1e-5", "posit32_2", 0x03A7C5AC),
        ("0.1", "fp32", 0x3DCCCCCD),
        ("16777217", "fp32", 0x4B800000),
        ("464", "e4m3fn", 0x7E),
        ("257.00000001", "bf16", 0x4381),
        ("2.5", "e2m1fn", 0b0100),
    ],
)
def test_codes_equal_published_ones(x, name, code):
    """Posit vectors as stillwater-sc/universal gives them; the others by IEEE 754 and OCP's definitions."""
    assert round_exactly(Fraction(x), formats.get(name)).code == code


def test_neighbors_boundary_error_and_flags_of_one_number():
    r = round_exactly(Fraction("3.3"), formats.get("e4m3fn"))
    assert (r.below.value, r.above.value, r.boundary) == (Fraction(13, 4), Fraction(7, 2), Fraction(27, 8))
    assert (r.value, r.error, r.gap, r.chance_up) == (3.25, Fraction(-1, 20), Fraction(1, 4), Fraction(1, 5))
    assert not r.tie
    assert not r.overflow
    assert round_exactly(Fraction(5), formats.get("fp4")).tie
    assert round_exactly(Fraction(1, 10**9), formats.get("fp16")).underflow


@pytest.mark.parametrize(
    ("x", "name", "overflow", "value"),
    [
        ("464", "e4m3fn", "ieee", 448.0),
        ("464.01", "e4m3fn", "ieee", math.nan),
        ("464.01", "e4m3fn", "saturate", 448.0),
        ("61440", "e5m2", "ieee", math.inf),
        ("61439", "e5m2", "ieee", 57344.0),
        ("-61440", "e5m2", "ieee", -math.inf),
        ("7", "fp4", "ieee", 6.0),
        ("1e30", "posit8_2", "ieee", 2.0**24),
    ],
)
def test_rounding_beyond_the_largest_value(x, name, overflow, value):
    r = round_exactly(Fraction(x), formats.get(name), overflow=overflow)
    assert r.value == value or (math.isnan(r.value) and math.isnan(value))
    assert r.overflow == (x not in ("464", "61439"))


def test_stochastic_results_are_undetermined_only_between_values():
    fp16 = formats.get("fp16")
    assert round_exactly(Fraction("1.0003"), fp16, "stochastic").value is None
    assert round_exactly(Fraction(1), fp16, "stochastic").value == 1.0
    assert round_exactly(Fraction(65510), fp16, "stochastic", "saturate").value == 65504.0
    assert round_exactly(Fraction(65510), fp16, "stochastic", "ieee").value is None
    assert round_exactly(Fraction(70000), fp16, "stochastic", "ieee").value == math.inf


def test_unknown_roundings_and_overflows_raise():
    with pytest.raises(FormatError, match="unknown rounding 'nearest'; nearest: nearest"):
        round_exactly(Fraction(1), formats.get("fp16"), "nearest")
    with pytest.raises(FormatError, match="unknown overflow 'wrap'"):
        round_exactly(Fraction(1), formats.get("fp16"), overflow="wrap")


def test_modes_equal_those_of_round_to():
    assert ROUNDINGS == quant.rounding.ROUNDINGS
    assert OVERFLOWS == quant.cast.OVERFLOWS


def test_neighbors_beyond_the_largest_posit():
    posit = formats.get("posit8_0", Posit)
    below, above = neighbours(Fraction(100), posit)
    assert (below.value, above) == (64, None)


def assert_same_result(one, other):
    """Equality, of NaN values too, which dataclasses compare unequal from Python 3.13 on."""
    assert vars(one) | {"value": None} == vars(other) | {"value": None}
    assert repr(one.value) == repr(other.value)


@for_each("sign", [1, -1])
@for_each("name", formats.names())
def test_numbers_beyond_float64_overflow_and_underflow(name, sign):
    format = formats.get(name)
    for overflow in OVERFLOWS:
        far = round_exactly(sign * Fraction(10) ** 999, format, overflow=overflow)
        assert_same_result(far, replace(round_exactly(sign * Fraction(2) ** 900, format, overflow=overflow), x=far.x))
        near = round_exactly(sign * Fraction(10) ** -999, format, overflow=overflow)
        assert_same_result(
            near, replace(round_exactly(sign * Fraction(2) ** -900, format, overflow=overflow), x=near.x)
        )
    assert far.error is None or far.error == Fraction(far.value) - far.x
