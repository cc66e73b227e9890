"""Read numbers exactly; write them so that an inexact text is recognisable; format tables, as text and as JSON."""

import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from decimal import Context, Decimal, Inexact
from fractions import Fraction
from math import copysign, isfinite
from typing import Any

from halfstep.cli.terminal import table_text
from halfstep.errors import FormatError
from halfstep.formats import BlockFormat, Codebook, Float, Format, Integer, Posit, PowerOfTwo
from halfstep.formats.exact import is_finite


_LONGEST = 400  # characters
_LARGEST_POWER = 4000  # of two; powers of ten beyond 1000 are refused too, far beyond any format
_DIGITS = 28  # digits of a number written in full

_DECIMAL = re.compile(r"([+-]?)(\d+\.?\d*|\.\d+)(?:e([+-]?\d+))?", re.IGNORECASE)
_HEX = re.compile(r"([+-]?)0x([0-9a-f]+\.?[0-9a-f]*|\.[0-9a-f]+)(?:p([+-]?\d+))?", re.IGNORECASE)
_RATIO = re.compile(r"([+-]?\d+)/(\d+)")
_POWER = re.compile(r"([+-]?)(?:([\d.]+)\*)?2(?:\^|\*\*)\(?([+-]?\d+)\)?")


def read_number(text: str) -> Fraction | float:
    """The exact value of a number's text: a fraction, or one of the floats inf, -inf, nan, -0.0.

    >>> read_number("0.1"), read_number("-0x1.8p3"), read_number("1/3"), read_number("2^-24")
    (Fraction(1, 10), Fraction(-12, 1), Fraction(1, 3), Fraction(1, 16777216))

    Raises:
        FormatError: the text is not a number, or its value is beyond 2^±4000.
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
    """A number in full if that is short, else as a power of two or a ratio, else shortened with a leading tilde."""
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
    """`2^k`, or an empty string if the number is not a power of two."""
    exact = Fraction(value)
    if exact <= 0 or exact.numerator & exact.numerator - 1 or exact.denominator & exact.denominator - 1:
        return ""
    return f"2^{exact.numerator.bit_length() - exact.denominator.bit_length()}"


def value_text(value: float | None) -> str:
    """A parameter's value as text: a power of two as such, anything else with six digits."""
    return "-" if value is None else (power_text(value) if not 1 <= value <= 65536 else "") or f"{value:.6g}"


def short_text(value: Fraction | float, digits: int = 4) -> str:
    """A number with that many digits, also outside the range of a float."""
    exact = Fraction(value)
    if float_holds(exact):
        return f"{float(exact):.{digits}g}"
    return f"{Context(prec=digits).divide(Decimal(exact.numerator), Decimal(exact.denominator)):g}"


def plain(x: Fraction | float | None) -> Any:
    """x for JSON, which has no infinities: a float if finite, else a string."""
    if x is None:
        return None
    if isinstance(x, float):
        return x if isfinite(x) else f"{x:g}"
    return float(x) if float_holds(x) else short_text(x, 17)


def float_holds(x: Fraction) -> bool:
    """Whether x lies within a float's range (it may be rounded in it)."""
    return x == 0 or Fraction(2) ** -1074 <= abs(x) < Fraction(2) ** 1023


def share_text(part: Fraction, whole: Fraction) -> str:
    """part / whole in per cent."""
    return f"{short_text(100 * part / whole, 3)}%"


def width() -> int:
    """The number of columns of the terminal."""
    return shutil.get_terminal_size().columns


def labelled(rows: Iterable[tuple[str, str]], indent: int = 0) -> str:
    """Lines `label  text`; long texts wrap below their text column."""
    pairs = list(rows)
    edge = indent + max((len(label) for label, _ in pairs), default=0) + 2
    wrap = textwrap.TextWrapper(max(width(), edge + 24), subsequent_indent=" " * edge, break_long_words=False)
    lines = []
    for label, text in pairs:
        wrap.initial_indent = f"{' ' * indent}{label}".ljust(edge)
        lines.append(wrap.fill(text) if len(text) + edge > wrap.width else wrap.initial_indent + text)
    return "\n".join(line.rstrip().replace("\xa0", " ") for line in lines)


def scalar_table(members: Sequence[Format]) -> str:
    """A table of scalar formats."""
    columns = ["format", "bits", "kind", "fields", "max", "normal", "smallest", "eps", "beyond", "also"]
    rows = [
        (
            f.name,
            str(f.bits),
            kind(f),
            layout(f),
            f"{f.max:.6g}",
            value_text(f.min_normal) if isinstance(f, Float) else "-",
            value_text(f.smallest),
            value_text(f.eps),
            specials(f),
            ", ".join(f.aliases),
        )
        for f in members
    ]
    return _what_fits(columns, rows, ("also", "beyond", "kind", "normal", "eps", "fields"), ("bits", "max"))


def block_table(members: Sequence[BlockFormat]) -> str:
    """A table of block formats."""
    columns = ["block format", "bits/value", "element", "tile", "scale rules", "also"]
    rows = [
        (b.name, bits_per_value(b), b.element.name, tile_text(b), ", ".join(b.rules), ", ".join(b.aliases))
        for b in members
    ]
    return _what_fits(columns, rows, ("also", "scale rules"), ("bits/value",))


def _what_fits(
    columns: Sequence[str], rows: Sequence[Sequence[str]], optional: Sequence[str], right: Sequence[str]
) -> str:
    """Drop columns, in the order of `optional`, until the table fits the terminal, and say which were dropped."""
    sizes = {c: max(len(c), *(len(row[i]) for row in rows)) + 2 for i, c in enumerate(columns)}
    dropped: list[str] = []
    while sum(sizes.values()) - 2 > width() and len(dropped) < len(optional):
        dropped.append(optional[len(dropped)])
        del sizes[dropped[-1]]
    kept = [i for i, c in enumerate(columns) if c in sizes]
    table = table_text([columns[i] for i in kept], [[row[i] for i in kept] for row in rows], right)
    said = textwrap.fill(f"({', '.join(dropped)}: in a wider terminal, or with --json)", width())
    return f"{table}\n{said}" if dropped else table


def kind(format: Format) -> str:
    """The format's kind in words."""
    return re.sub(r"(?<!^)(?=[A-Z])", " ", type(format).__name__).lower()


def layout(format: Format) -> str:
    """How the bits are split."""
    if isinstance(format, Float):
        return f"1-{format.exponent_bits}-{format.mantissa_bits}, bias {format.bias}"
    if isinstance(format, Posit):
        return f"es {format.es}"
    if isinstance(format, Integer):
        return f"{format.low}..{format.high}" + (f"/{1 << format.fraction_bits}" if format.fraction_bits else "")
    return "0-8-0, bias 127" if isinstance(format, PowerOfTwo) else f"{1 << format.bits} entries"


def specials(format: Format) -> str:
    """Whether the format has infinity and NaN, in two words."""
    return {(True, True): "inf, NaN", (True, False): "inf", (False, True): "NaN"}.get(
        (format.has_infinity, format.has_nan), "none"
    )


def parameters(format: Format) -> dict[str, Any]:
    """A format as JSON."""
    data: dict[str, Any] = {"name": format.name, "aliases": list(format.aliases), "kind": kind(format)}
    names = ["bits", "storage_bits", "bytes", "max", "min", "smallest", "eps", "signed", "has_infinity", "has_nan"]
    data |= {name: getattr(format, name) for name in [*names, "has_negative_zero", "ties", "source"]}
    own = {
        Float: ("exponent_bits", "mantissa_bits", "bias", "specials", "min_normal", "min_subnormal"),
        Posit: ("es",),
        Integer: ("low", "high", "fraction_bits"),
        Codebook: ("table",),
    }
    return data | {name: getattr(format, name) for name in own.get(type(format), ())}


def block_parameters(block: BlockFormat) -> dict[str, Any]:
    """A block format as JSON."""
    return {**asdict(block), "element": block.element.name, "bits_per_value": block.bits}


def tile_text(block: BlockFormat) -> str:
    """Which values share a scale."""
    rows, columns = block.tile
    if rows == columns == 0:
        return "the tensor"
    return "a row" if (rows, columns) == (1, 0) else f"{rows or 'all'} x {columns or 'all'}"


def bits_per_value(block: BlockFormat) -> str:
    """Bits per value as text; the scale of a whole row or tensor is not counted."""
    return f"{block.bits:.6g}" if all(block.tile) else f"{block.bits:g} + scale"
