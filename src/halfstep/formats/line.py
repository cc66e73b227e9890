"""A format's values in ascending order, by number: also of formats that are too wide to list."""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from fractions import Fraction
from functools import cache
from itertools import groupby
from math import inf, isfinite, isnan

from halfstep.formats.base import Format
from halfstep.formats.floating import Float
from halfstep.formats.posit import Posit


class Line(ABC):
    """The finite values of a format, ascending, numbered by `numbers`."""

    numbers: range

    @abstractmethod
    def value(self, number: int) -> float:
        """The value of that number."""

    @abstractmethod
    def code(self, number: int) -> int:
        """Its code (the first one, where several stand for it)."""

    def at_most(self, x: Fraction | float) -> int:
        """The number of the largest value that is at most x; one less than all numbers where every value is larger."""
        return self.numbers.start + bisect_right(self.numbers, x, key=self.value) - 1

    def count(self, low: Fraction | float, high: Fraction | float) -> int:
        """How many values v there are with low <= v < high."""
        return bisect_left(self.numbers, high, key=self.value) - bisect_left(self.numbers, low, key=self.value)


class _Mirrored(Line):
    """Floats and posits: positive codes are in the order of their values, and a negative value has its own code."""

    def __init__(self, format: Float | Posit) -> None:
        self._format = format
        positive = range(1 << format.bits - 1)
        top = bisect_left(positive, format.max, key=lambda code: _finite_or_inf(format.decode(code)))
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
    """The values of a format, by number.

    >>> e4m3 = line(Float("e4m3", 4, 3, 7, "fn", source="OFP8"))
    >>> e4m3.value(e4m3.at_most(3.3)), hex(e4m3.code(e4m3.at_most(3.3)))
    (3.25, '0x45')
    """
    return _Mirrored(format) if isinstance(format, (Float, Posit)) else _Listed(format)


def negated(format: Float, code: int) -> int:
    """The code with the other sign."""
    return code ^ 1 << format.bits - 1


def nan_codes(format: Format) -> tuple[range, ...]:
    """The codes that stand for NaN, in runs."""
    sign = 1 << format.bits - 1
    if isinstance(format, Posit):
        return (range(sign, sign + 1),)
    if not isinstance(format, Float):
        return tuple(_runs(code for code in format.codes() if isnan(format.decode(code))))
    if not format.has_nan:
        return ()
    if format.specials == "fnuz":
        return (range(sign, sign + 1),)
    first = infinity_code(format) + 1 if format.has_infinity else sign - 1
    return range(first, sign), range(first | sign, 2 * sign)


def infinity_code(format: Float) -> int:
    """The code of +infinity in a format that has one: what follows the largest value."""
    return line(format).numbers[-1] + 1


def _finite_or_inf(value: float) -> float:
    return value if isfinite(value) else inf


def _runs(codes: Iterable[int]) -> Iterable[range]:
    for _, run in groupby(enumerate(codes), lambda pair: pair[1] - pair[0]):
        members = [code for _, code in run]
        yield range(members[0], members[-1] + 1)
