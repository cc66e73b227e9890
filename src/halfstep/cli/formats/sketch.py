"""A code's bits, field by field; the number line in lines of text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import frexp, isinf, isnan, log2

from halfstep.cli.formats.table import exact_text, labelled, value_text, width
from halfstep.formats import Codebook, Float, Format, Integer, Posit, PowerOfTwo
from halfstep.formats.line import line
from halfstep.formats.posit import parts


@dataclass(frozen=True)
class Field:
    """Some bits of a code and what they mean."""

    name: str
    bits: str
    meaning: str


def bits_text(format: Format, code: int) -> str:
    """The bits of a code, a space between fields: `0 1000 101`."""
    return " ".join(field.bits for field in fields(format, code) if field.bits)


def hex_text(format: Format, code: int) -> str:
    """A code in hexadecimal, with the digits its bits need."""
    return f"0x{code:0{-(-format.bits // 4)}x}"


def fields(format: Format, code: int) -> list[Field]:
    """The fields of a code, from the highest bit."""
    bits = f"{code:0{format.bits}b}"
    if isinstance(format, Float):
        return _float_fields(format, code)
    if isinstance(format, Posit):
        return _posit_fields(format, code)
    if isinstance(format, Integer):
        n = format.decode(code) * (1 << format.fraction_bits)
        steps = f" of 1/{1 << format.fraction_bits}" if format.fraction_bits else ""
        return [Field("two's complement" if format.low else "unsigned", bits, f"{n:.0f}{steps}")]
    if isinstance(format, PowerOfTwo):
        return [Field("exponent", bits, "all ones: NaN" if code == 255 else f"{code} - 127: 2^{code - 127}")]
    return [Field("table index" if isinstance(format, Codebook) else "code", bits, f"entry {code}")]


def _float_fields(format: Float, code: int) -> list[Field]:
    sign, exponent, mantissa = format.fields(code)
    value = format.decode(code)
    power = f"{exponent} - {format.bias}: 2^{exponent - format.bias}"
    if exponent == 0:
        power = f"0, subnormal: 2^{format.min_exponent}"
    fraction = f"{int(exponent > 0)} + {mantissa}/{1 << format.mantissa_bits}"
    if isnan(value) or isinf(value):
        power, fraction = "NaN" if isnan(value) else "infinity", ""
    return [
        Field("sign", str(sign), "-" if sign else "+"),
        Field("exponent", f"{exponent:0{format.exponent_bits}b}", power),
        Field("mantissa", f"{mantissa:0{format.mantissa_bits}b}" if format.mantissa_bits else "", fraction),
    ]


def _posit_fields(format: Posit, code: int) -> list[Field]:
    sign, top = code >> format.bits - 1, 1 << format.bits - 1
    if code in (0, top):
        return [Field("sign", str(sign), ""), Field("rest", "0" * (format.bits - 1), "NaR" if sign else "zero")]
    lead, regime, power, fraction = parts(f"{(2 * top - code if sign else code):0{format.bits - 1}b}", format.es)
    stored = int(power.ljust(format.es, "0") or "0", 2)
    return [
        Field("sign", str(sign), "-: the rest is shown negated (two's complement)" if sign else "+"),
        Field("regime", lead, f"{regime}: 2^({regime} * {1 << format.es}) = 2^{regime << format.es}"),
        Field("exponent", power, f"{stored}: 2^{stored}" if format.es else "the format has none"),
        Field("fraction", fraction, f"1 + {int(fraction, 2)}/{1 << len(fraction)}" if fraction else "1"),
    ]


def point_text(format: Format, value: Fraction | float, code: int | None) -> str:
    """A value with its code and the bits of that, which a line break does not part."""
    bits = "" if code is None else bits_text(format, code).replace(" ", "\xa0")
    return f"{exact_text(value):<22}  {'no code' if code is None else hex_text(format, code)}  {bits}"


def fields_text(format: Format, code: int, indent: int) -> str:
    """A line for each field of a code."""
    found = fields(format, code)
    wide = max(len(field.bits) for field in found)
    return labelled([(field.name, f"{field.bits or '-':<{wide}}  {field.meaning}") for field in found], indent)


ROWS = 4
FEW = 16
"""So many codes are shown one by one."""


def binades(format: Format) -> range:
    """The exponents k for which [2^k, 2^(k+1)) holds a value."""
    return range(frexp(format.smallest)[1] - 1, frexp(format.max)[1])


def per_binade(format: Format, exponents: range) -> list[int]:
    """How many values there are in [2^k, 2^(k+1)) for each k."""
    return [line(format).count(Fraction(2) ** k, Fraction(2) ** (k + 1)) for k in exponents]


def sketch(format: Format) -> str:
    """The number line: every value where there are few, else how many there are in each binade."""
    if 1 << format.bits <= FEW:
        return f"{_linear(format)}\n\n{_all_values(format)}"
    exponents = binades(format)
    marks = {exponents[0]: value_text(format.smallest), frexp(format.max)[1] - 1: value_text(format.max), 0: "1"}
    if isinstance(format, Float):
        marks.setdefault(format.min_exponent, value_text(format.min_normal))
    counts = per_binade(format, exponents)
    return f"positive values per binade: at most {max(counts)}\n{density(counts, exponents, max(counts), marks)}"


def density(counts: Sequence[int], exponents: range, most: int, marks: dict[int, str]) -> str:
    """Columns along log2 x, as high as the logarithm of the count; `marks` are written below their binades."""
    room = width() - 2
    group = -(-len(counts) // room)  # binades in a column, where there are more of them than columns
    grouped = [max(counts[i : i + group]) for i in range(0, len(counts), group)]
    repeat = max(1, min(6, room // len(grouped)))  # columns of a binade, where there are fewer
    levels = _levels()
    full = len(levels) - 1
    heights = [round(ROWS * full * (log2(n) + 1) / (log2(most) + 1)) if n else 0 for n in grouped]
    rows = [
        "".join(levels[max(0, min(full, height - full * row))] * repeat for height in heights).rstrip()
        for row in reversed(range(ROWS))
    ]
    at = {(k - exponents.start) // group * repeat: text for k, text in marks.items() if k in exponents}
    return "\n".join(f"  {row}" for row in [*rows, *_axis(at, len(grouped) * repeat, room)])


def _axis(marks: dict[int, str], length: int, room: int) -> list[str]:
    """A line with a tick for each text that fits, and the texts below it; the two ends go first."""
    ticks, below = ["-"] * length, [" "] * max(room, length)
    for place in sorted(marks, key=lambda place: (place not in (min(marks), max(marks)), place)):
        text = marks[place]
        start = max(0, min(place, room - len(text)))
        if "".join(below[max(0, start - 1) : start + len(text) + 1]).strip():
            continue
        ticks[place] = "+"
        below[start : start + len(text)] = text
    return ["".join(ticks), "".join(below).rstrip()]


def _linear(format: Format) -> str:
    """A bar for every value, in proportion."""
    room = width() - 2
    values = format.values()
    places = [round((v - format.min) / (format.max - format.min) * (room - 1)) for v in values]
    bars = [" "] * room
    for place, value in zip(places, values, strict=True):
        bars[place] = "0" if value == 0 else "|"
    marks = {place: f"{value:.3g}" for place, value in zip(places, values, strict=True)}
    return "\n".join(f"  {row}".rstrip() for row in ["".join(bars), *_axis(marks, room, room)])


def _all_values(format: Format) -> str:
    """Every code with its value, in columns."""
    cells = [f"{hex_text(format, c)} {bits_text(format, c):<8} {format.decode(c):>12.8g}" for c in format.codes()]
    wide = max(map(len, cells)) + 4
    columns = max(1, min(2, (width() + 2) // wide))
    deep = -(-len(cells) // columns)
    return "\n".join("  " + "".join(cell.ljust(wide) for cell in cells[i::deep]).rstrip() for i in range(deep))


def _levels() -> str:
    """What a column is drawn with, from empty to full: eighths of a block where the terminal has them."""
    blocks = " ▁▂▃▄▅▆▇█"
    try:
        blocks.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return " #"
    return blocks
