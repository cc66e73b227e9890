"""All values of a format in order, and exact rounding of one number, with the intermediate results."""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import groupby
from math import copysign, inf, isfinite, isnan, nan

from halfstep.errors import FormatError, one_of
from halfstep.formats.floating import Float, Format
from halfstep.formats.posit import Posit


class Line(ABC):
    """The finite values of a format, ascending, each with a number from the range `numbers`."""

    numbers: range

    @abstractmethod
    def value(self, number: int) -> float:
        """The value with that number."""

    @abstractmethod
    def code(self, number: int) -> int:
        """The code of the value with that number (the first one, if several codes have the value)."""

    def at_most(self, x: Fraction | float) -> int:
        """The number of the largest value <= x; `numbers.start - 1` where every value is larger."""
        return self.numbers.start + bisect_right(self.numbers, x, key=self.value) - 1

    def count(self, low: Fraction | float, high: Fraction | float) -> int:
        """The number of values v with low <= v < high."""
        return bisect_left(self.numbers, high, key=self.value) - bisect_left(self.numbers, low, key=self.value)


class _Mirrored(Line):
    """Floats and posits: positive codes increase with their values, and every negative value has a code."""

    def __init__(self, format: Float | Posit) -> None:
        self._format = format
        top = bisect_left(range(1 << format.bits - 1), format.max, key=lambda code: _finite_or_inf(format.decode(code)))
        self.numbers = range(-top, top + 1)

    def value(self, number: int) -> float:
        magnitude = self._format.decode(abs(number))
        return -magnitude if number < 0 else magnitude

    def code(self, number: int) -> int:
        if number >= 0:
            return number
        return (1 << self._format.bits) + number if isinstance(self._format, Posit) else negated(self._format, -number)


class _Listed(Line):
    def __init__(self, format: Format) -> None:
        self._values = format.values()
        self._code_of: dict[float, int] = {}
        for code in format.codes():
            self._code_of.setdefault(format.decode(code) + 0.0, code)
        self.numbers = range(len(self._values))

    def value(self, number: int) -> float:
        return self._values[number]

    def code(self, number: int) -> int:
        return self._code_of[self._values[number]]


@cache
def line(format: Format) -> Line:
    """The numbered values of a format.

    >>> e4m3 = line(Float("e4m3", 4, 3, 7, "fn", source="OFP8"))
    >>> e4m3.value(e4m3.at_most(3.3)), hex(e4m3.code(e4m3.at_most(3.3)))
    (3.25, '0x45')
    """
    return _Mirrored(format) if isinstance(format, (Float, Posit)) else _Listed(format)


def negated(format: Float, code: int) -> int:
    """The code of the negated value."""
    return code ^ 1 << format.bits - 1


def nan_codes(format: Format) -> tuple[range, ...]:
    """The codes of NaN, as ranges."""
    sign = 1 << format.bits - 1
    if isinstance(format, Posit) or (isinstance(format, Float) and format.specials == "fnuz"):
        return (range(sign, sign + 1),)
    if not isinstance(format, Float):
        return tuple(_runs(code for code in format.codes() if isnan(format.decode(code))))
    if not format.has_nan:
        return ()
    first = infinity_code(format) + 1 if format.has_infinity else sign - 1
    return range(first, sign), range(first | sign, 2 * sign)


def infinity_code(format: Float) -> int:
    """The code of +infinity in a format that has it: the one after the largest value."""
    return line(format).numbers[-1] + 1


def _finite_or_inf(value: float) -> float:
    return value if isfinite(value) else inf


def _runs(codes: Iterable[int]) -> Iterable[range]:
    for _, run in groupby(enumerate(codes), lambda pair: pair[1] - pair[0]):
        members = [code for _, code in run]
        yield range(members[0], members[-1] + 1)


ROUNDINGS = ("nearest_even", "nearest_away", "nearest_up", "toward_zero", "up", "down", "stochastic")
OVERFLOWS = ("saturate", "ieee")


@dataclass(frozen=True)
class Neighbour:
    """A neighbouring value of x, and its code: None for the value that would follow a float's largest one, where
    overflow is decided."""

    value: Fraction
    code: int | None


@dataclass(frozen=True)
class Rounded:
    """The result of rounding x, which is a Fraction, or one of the floats inf, -inf, nan and -0.0."""

    x: Fraction | float
    value: float | None
    """A value of the format, an infinity or NaN; None where stochastic rounding has a choice."""
    code: int | None
    """None also where the format has no code for the value (NaN in int8)."""
    below: Neighbour | None = None
    above: Neighbour | None = None
    """The neighbours of x are `below` and `above`; None where x is a value, or beyond the last value of a format that
    only saturates."""
    boundary: Fraction | None = None
    """The boundary between the neighbours in rounding to nearest."""
    overflow: bool = False
    """Whether x, once rounded, is beyond the largest value."""

    @property
    def tie(self) -> bool:
        """Whether x is on the boundary."""
        return self.boundary is not None and self.boundary == self.x

    @property
    def underflow(self) -> bool:
        """Whether a nonzero x became zero."""
        return self.value == 0 and self.x != 0

    @property
    def gap(self) -> Fraction | None:
        """The distance between the neighbours."""
        return self.above.value - self.below.value if self.below and self.above else None

    @property
    def error(self) -> Fraction | None:
        """value - x, where both are finite."""
        if self.value is None or not isfinite(self.value) or not is_finite(self.x):
            return None
        return Fraction(self.value) - Fraction(self.x)

    @property
    def chance_up(self) -> Fraction | None:
        """The probability that stochastic rounding takes the value above."""
        if self.below is None or self.gap is None:
            return None
        return max(Fraction(0), min(Fraction(1), (Fraction(self.x) - self.below.value) / self.gap))


def round_exactly(
    x: Fraction | float, format: Format, rounding: str = "nearest_even", overflow: str = "saturate"
) -> Rounded:
    """x rounded onto a format as by `halfstep.round_to`, computed from the definitions, with intermediate results.

    Raises:
        FormatError: unknown rounding or overflow.

    >>> r = round_exactly(Fraction(33, 10), Float("e4m3", 4, 3, 7, "fn", source="OFP8"))
    >>> r.value, r.boundary, r.error
    (3.25, Fraction(27, 8), Fraction(-1, 20))
    """
    for kind, name, known in (("rounding", rounding, ROUNDINGS), ("overflow", overflow, OVERFLOWS)):
        one_of(kind, name, known, FormatError)
    if x != x or (format.min > 0 and x <= 0):
        return Rounded(x, nan, nan_code(format))
    end = format.max if x > 0 else format.min
    if not is_finite(x):
        lost = isinstance(format, Posit) or (isinstance(format, Float) and format.specials == "fnuz")
        return _beyond(Rounded(x, end, None, overflow=True), end, format, rounding, "ieee" if lost else overflow)
    below, above = neighbours(Fraction(x), format)
    at = next((n for n in (below, above) if n is not None and n.value == x), None)
    if at is not None and at.code is not None:
        return _landed(Rounded(x, None, None), at.value, format)
    if below is None or above is None:  # with positive values alone, x may be below the smallest one
        last = format.max if below else format.min
        return _beyond(Rounded(x, last, None, overflow=True), last, format, rounding, overflow)
    turn = boundary(below.value, above.value, format)
    between = Rounded(x, None, None, below, above, turn)
    chance = between.chance_up
    certain = rounding != "stochastic" or chance in (0, 1)
    rises = chance == 1 if rounding == "stochastic" else _rises(Fraction(x), below, above, turn, rounding, format)
    chosen = above if rises else below
    if certain and chosen.code is not None:
        # A directed mode may give the largest value where x itself would round beyond it: that is an overflow too.
        past = any(n.code is None and abs(Fraction(x)) >= abs(n.value) for n in (below, above))
        return _landed(replace(between, overflow=past), chosen.value, format)
    if certain or (None in (below.code, above.code) and _saturates(format, overflow)):
        return _beyond(replace(between, overflow=True), end, format, rounding, overflow)
    return between


def is_finite(x: Fraction | float) -> bool:
    """Whether x is finite; a Fraction is, even if it is beyond every float.

    >>> is_finite(Fraction(10) ** 999), is_finite(inf)
    (True, False)
    """
    return isinstance(x, Fraction) or isfinite(x)


def neighbours(x: Fraction, format: Format) -> tuple[Neighbour | None, Neighbour | None]:
    """The largest value <= x and the next one. Beyond the ends of a float format, the value that would follow; beyond
    the ends of other formats, None."""
    values = line(format)
    number = values.at_most(x)

    def at(number: int) -> Neighbour | None:
        if number in values.numbers:
            return Neighbour(Fraction(values.value(number)), values.code(number))
        if not isinstance(format, Float):
            return None
        end = Fraction(format.max)
        follows = end + Fraction(2) ** (format.max_exponent - format.mantissa_bits)
        return Neighbour(follows if number > 0 else -follows, None)

    return at(number), at(number + 1)


def boundary(below: Fraction, above: Fraction, format: Format) -> Fraction:
    """The boundary between two neighbouring values in rounding to nearest.

    It is half way, except for a posit, whose boundary is the posit with one bit more between them: the geometric mean
    where neighbours are four times apart or more (the cut is in the exponent or regime), and zero next to zero.
    """
    if isinstance(format, Posit):
        near, far = sorted((abs(below), abs(above)))
        if near == 0:
            return near
        if far >= 4 * near:
            mean = near * Fraction(2) ** ((far / near).numerator.bit_length() // 2)
            return mean if above > 0 else -mean
    return (below + above) / 2


def nan_code(format: Format, negative: bool = False) -> int | None:
    """The code that rounding gives for NaN; None where the format has none."""
    runs = nan_codes(format)
    if not runs:
        return None
    if isinstance(format, Float) and format.has_infinity:
        return infinity_code(format) | 1 << format.mantissa_bits - 1
    return runs[-1 if negative else 0][0]


def _rises(x: Fraction, below: Neighbour, above: Neighbour, turn: Fraction, rounding: str, format: Format) -> bool:
    if not rounding.startswith("nearest"):
        return {"toward_zero": x < 0, "up": True, "down": False}[rounding]
    if x != turn:
        return x > turn
    if rounding == "nearest_away":
        return abs(above.value) >= abs(below.value)
    if rounding == "nearest_up":
        return True
    if format.ties != "even":
        return format.ties == "upper"
    return above.code % 2 == 0 if above.code is not None else below.code is not None and below.code % 2 == 1


def _landed(rounded: Rounded, value: Fraction, format: Format) -> Rounded:
    """The result where it is a value of the format."""
    values = line(format)
    code, number = values.code(values.at_most(value)), float(value)
    if value == 0 and isinstance(format, Float) and format.has_negative_zero and copysign(1, rounded.x) < 0:
        code, number = negated(format, code), -0.0
    return replace(rounded, value=number, code=code)


def _saturates(format: Format, overflow: str) -> bool:
    return overflow == "saturate" or not (format.has_infinity or format.has_nan)


def _beyond(rounded: Rounded, end: float, format: Format, rounding: str, overflow: str) -> Rounded:
    """The result where it is beyond the values of the format."""
    negative = rounded.x < 0
    if _saturates(format, overflow) or not _leaves(rounded.x, format, rounding):
        return _landed(rounded, Fraction(end), format)
    if isinstance(format, Float) and format.has_infinity:
        code = infinity_code(format)
        return replace(rounded, value=-inf if negative else inf, code=negated(format, code) if negative else code)
    return replace(rounded, value=nan, code=nan_code(format, negative))


def _leaves(x: Fraction | float, format: Format, rounding: str) -> bool:
    """Whether a number beyond the last value becomes infinity or NaN, where the format does not saturate."""
    if isinstance(format, Float):
        return True
    if isinstance(format, Posit) or rounding in ("toward_zero", "down"):
        return not is_finite(x)
    return rounding == "up" or x >= format.overflow_from
