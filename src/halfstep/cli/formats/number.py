"""Numbers on the command line: read exactly, written so that nothing exact is passed off as rounded, and in lines."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable
from decimal import Context, Decimal, Inexact
from fractions import Fraction
from math import copysign, isfinite
from typing import Any

from halfstep.errors import FormatError
from halfstep.formats.exact import is_finite


_LONGEST = 400  # characters
_LARGEST_POWER = 4000  # of two; ten to the thousandth is refused, too: nothing here is near
_DIGITS = 28  # of a number written out in full

_DECIMAL = re.compile(r"([+-]?)(\d+\.?\d*|\.\d+)(?:e([+-]?\d+))?", re.IGNORECASE)
_HEX = re.compile(r"([+-]?)0x([0-9a-f]+\.?[0-9a-f]*|\.[0-9a-f]+)(?:p([+-]?\d+))?", re.IGNORECASE)
_RATIO = re.compile(r"([+-]?\d+)/(\d+)")
_POWER = re.compile(r"([+-]?)(?:([\d.]+)\*)?2(?:\^|\*\*)\(?([+-]?\d+)\)?")


def read_number(text: str) -> Fraction | float:
    """The number that a text stands for, exactly: a fraction, or one of the floats inf, -inf, nan, -0.0.

    >>> read_number("0.1"), read_number("-0x1.8p3"), read_number("1/3"), read_number("2^-24")
    (Fraction(1, 10), Fraction(-12, 1), Fraction(1, 3), Fraction(1, 16777216))

    Raises:
        FormatError: it stands for none, or for one beyond 2^±4000.
    """
    found = text.strip().replace("_", "").lower() if len(text) <= _LONGEST else ""
    if found.lstrip("+-") in ("inf", "infinity", "nan") and len(found) - len(found.lstrip("+-")) <= 1:
        return float(found)
    value = _fraction(found)
    if value is None:
        raise FormatError(
            f"{_shortened(text)} is not a number; write 3.25, -1e-3, 0x1.8p3, 1/3, 2^-24, 1.5*2^7, inf or nan"
        )
    return -0.0 if value == 0 and found.startswith("-") else value


def _fraction(text: str) -> Fraction | None:
    if match := _DECIMAL.fullmatch(text):
        sign, digits, power = match.groups()
        return _signed(sign, Fraction(digits) * _ten_to(int(power or 0), text))
    if match := _HEX.fullmatch(text):
        sign, digits, power = match.groups()
        whole, _, rest = digits.partition(".")
        return _signed(sign, Fraction(int(whole + rest or "0", 16), 16 ** len(rest)) * _two_to(int(power or 0), text))
    if match := _RATIO.fullmatch(text):
        if int(match[2]) == 0:
            raise FormatError(f"{_shortened(text)} divides by zero; write inf, -inf or nan")
        return Fraction(int(match[1]), int(match[2]))
    if (match := _POWER.fullmatch(text)) and _DECIMAL.fullmatch(match[2] or "1"):
        return _signed(match[1], Fraction(match[2] or "1") * _two_to(int(match[3]), text))
    return None


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value


def _two_to(power: int, text: str) -> Fraction:
    if abs(power) > _LARGEST_POWER:
        raise FormatError(f"{_shortened(text)} is beyond 2^±{_LARGEST_POWER}; write inf, or a number nearer to 1")
    return Fraction(2) ** power


def _ten_to(power: int, text: str) -> Fraction:
    _two_to(4 * power, text)
    return Fraction(10) ** power


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def exact_text(x: Fraction | float) -> str:
    """A number in full where that is short; as a power of two or a ratio; else shortened, behind a tilde."""
    if not is_finite(x) or (x == 0 and copysign(1, x) < 0):
        return f"{x:g}"
    value = Fraction(x)
    context = Context(prec=_DIGITS, traps=[])
    decimal = context.divide(Decimal(value.numerator), Decimal(value.denominator))
    power, written = power_text(value), f"{decimal.normalize(context):f}"
    if power and len(written) > 12:
        return power
    if not context.flags[Inexact] and -12 <= decimal.adjusted() < 24:
        return written
    near = short_text(value, 10)
    return f"{value} (~{near})" if len(str(value)) <= 12 else f"~{near}"


def power_text(value: Fraction | float) -> str:
    """`2^k`, or nothing where the number is not a power of two."""
    exact = Fraction(value)
    if exact <= 0 or exact.numerator & exact.numerator - 1 or exact.denominator & exact.denominator - 1:
        return ""
    return f"2^{exact.numerator.bit_length() - exact.denominator.bit_length()}"


def value_text(value: float | None) -> str:
    """A parameter: a power of two as such, anything else in six digits."""
    if value is None:
        return "-"
    return (power_text(value) if not 1 <= value <= 65536 else "") or f"{value:.6g}"


def short_text(value: Fraction | float, digits: int = 4) -> str:
    """A number in that many digits; also where it is outside the range of a float."""
    exact = Fraction(value)
    if float_holds(exact):
        return f"{float(exact):.{digits}g}"
    return f"{Context(prec=digits).divide(Decimal(exact.numerator), Decimal(exact.denominator)):g}"


def plain(x: Fraction | float | None) -> Any:
    """For JSON, which has no infinities: a float where it is finite, else a text."""
    if x is None:
        return None
    if isinstance(x, float):
        return x if isfinite(x) else f"{x:g}"
    return float(x) if float_holds(x) else short_text(x, 17)


def float_holds(x: Fraction) -> bool:
    """Whether x lies within a float's range (it may be rounded in it)."""
    return x == 0 or Fraction(2) ** -1074 <= abs(x) < Fraction(2) ** 1023


def share_text(part: Fraction, whole: Fraction) -> str:
    """A ratio in per cent."""
    return f"{short_text(100 * part / whole, 3)}%"


def width() -> int:
    """Columns of the terminal."""
    return shutil.get_terminal_size().columns


def labelled(rows: Iterable[tuple[str, str]], indent: int = 0) -> str:
    """Lines `label  text`; a text that is too long goes on below itself."""
    pairs = list(rows)
    edge = indent + max((len(label) for label, _ in pairs), default=0) + 2
    wrap = textwrap.TextWrapper(max(width(), edge + 24), subsequent_indent=" " * edge, break_long_words=False)
    lines = []
    for label, text in pairs:
        wrap.initial_indent = f"{' ' * indent}{label}".ljust(edge)
        lines.append(wrap.fill(text) if len(text) + edge > wrap.width else wrap.initial_indent + text)
    return "\n".join(line.rstrip().replace("\xa0", " ") for line in lines)
