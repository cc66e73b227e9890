"""The number line as text: how densely a format's values lie, and all of them where they are few."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fractions import Fraction
from math import frexp, log2

from halfstep.cli.formats.fields import bits_text, hex_text
from halfstep.cli.formats.number import value_text, width
from halfstep.formats import Float, Format
from halfstep.formats.line import line


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
