"""A code's bit fields, and the number line of a format as text or as a picture."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from math import frexp, isinf, isnan, log2
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.cli.formats.table import exact_text, float_holds, kind, labelled, layout, short_text, value_text, width
from halfstep.errors import FormatError
from halfstep.formats import Codebook, Float, Format, Integer, Posit, PowerOfTwo
from halfstep.formats.exact import Rounded, is_finite, line
from halfstep.formats.posit import parts


@dataclass(frozen=True)
class Field:
    """A bit field of a code, with its meaning."""

    name: str
    bits: str
    meaning: str


def bits_text(format: Format, code: int) -> str:
    """The bits of a code, fields separated by spaces: `0 1000 101`."""
    return " ".join(field.bits for field in fields(format, code) if field.bits)


def hex_text(format: Format, code: int) -> str:
    """A code in hexadecimal, zero-padded to the format's bits."""
    return f"0x{code:0{-(-format.bits // 4)}x}"


def fields(format: Format, code: int) -> list[Field]:
    """The fields of a code, highest bit first."""
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
    stored = f"{exponent} - {format.bias}: 2^{exponent - format.bias}"
    power = stored if exponent else f"0, subnormal: 2^{format.min_exponent}"
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
    """A value with its code and the code's bits, which a line break does not split."""
    bits = "" if code is None else bits_text(format, code).replace(" ", "\xa0")
    return f"{exact_text(value):<22}  {'no code' if code is None else hex_text(format, code)}  {bits}"


def fields_text(format: Format, code: int, indent: int) -> str:
    """One line for each field of a code."""
    found = fields(format, code)
    wide = max(len(field.bits) for field in found)
    return labelled([(field.name, f"{field.bits or '-':<{wide}}  {field.meaning}") for field in found], indent)


ROWS = 4
FEW = 16
"""Up to this many codes are listed one by one."""


def binades(format: Format) -> range:
    """The exponents k for which [2^k, 2^(k+1)) contains a value."""
    return range(frexp(format.smallest)[1] - 1, frexp(format.max)[1])


def per_binade(format: Format, exponents: range) -> list[int]:
    """The number of values in [2^k, 2^(k+1)), for each k."""
    return [line(format).count(Fraction(2) ** k, Fraction(2) ** (k + 1)) for k in exponents]


def sketch(format: Format) -> str:
    """The number line as text: every value if there are few, else the number of values per binade."""
    if 1 << format.bits <= FEW:
        return f"{_linear(format)}\n\n{_all_values(format)}"
    exponents = binades(format)
    marks = {exponents[0]: value_text(format.smallest), frexp(format.max)[1] - 1: value_text(format.max), 0: "1"}
    if isinstance(format, Float):
        marks.setdefault(format.min_exponent, value_text(format.min_normal))
    counts = per_binade(format, exponents)
    return f"positive values per binade: at most {max(counts)}\n{density(counts, exponents, max(counts), marks)}"


def density(counts: Sequence[int], exponents: range, most: int, marks: dict[int, str]) -> str:
    """Columns along log2 x, with heights proportional to the logarithm of the count; `marks` label their binades."""
    room = width() - 2
    group = -(-len(counts) // room)  # binades per column, if there are more binades than columns
    grouped = [max(counts[i : i + group]) for i in range(0, len(counts), group)]
    repeat = max(1, min(6, room // len(grouped)))  # columns per binade, if there are fewer
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
    """Two lines: ticks, and below them the labels that fit, both ends first."""
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
    """One bar per value, on a linear axis."""
    room = width() - 2
    placed = {round((v - format.min) / (format.max - format.min) * (room - 1)): v for v in format.values()}
    bars = "".join(" " if i not in placed else "0" if placed[i] == 0 else "|" for i in range(room))
    marks = {place: f"{value:.3g}" for place, value in placed.items()}
    return "\n".join(f"  {row}".rstrip() for row in [bars, *_axis(marks, room, room)])


def _all_values(format: Format) -> str:
    """Every code with its value, in columns."""
    cells = [f"{hex_text(format, c)} {bits_text(format, c):<8} {format.decode(c):>12.8g}" for c in format.codes()]
    wide = max(map(len, cells)) + 4
    deep = -(-len(cells) // max(1, min(2, (width() + 2) // wide)))
    return "\n".join("  " + "".join(cell.ljust(wide) for cell in cells[i::deep]).rstrip() for i in range(deep))


def _levels() -> str:
    """The characters of a column from empty to full: eighths of a block if the terminal's encoding has them."""
    blocks = " ▁▂▃▄▅▆▇█"
    try:
        blocks.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return " #"
    return blocks


if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = (".png", ".pdf", ".svg")
LISTED = 256
"""Formats with more values than this are drawn by density only."""
_WIDEST = 2.0**40  # largest over smallest value: beyond this a linear axis shows nothing
INK, FAINT, BLUE, ORANGE = "#1d2228", "#6b737c", "#0072b2", "#d55e00"
SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}


def draw(format: Format, path: Path, rounded: Rounded | None = None) -> None:
    """Draw the picture into a file, replacing an existing one.

    Raises:
        FormatError: matplotlib is missing; the file's ending is unknown; the file cannot be written.
    """
    if path.suffix.lower() not in KINDS:
        raise FormatError(f"cannot draw to {str(path)!r}; the name ends in one of {', '.join(KINDS)}")
    if find_spec("matplotlib") is None:
        raise FormatError("--plot draws with matplotlib: install it with pip install 'halfstep[lab]'")
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    listed = len(line(format).numbers) <= LISTED and format.max <= _WIDEST * format.smallest
    with rc_context(SETTINGS):
        figure = Figure(figsize=(8, 4.6 if listed else 3.2), dpi=160, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(f"{format.name}: {kind(format)}, {layout(format)}", x=0.01, ha="left", weight="bold")
        density = figure.subplots(2, 1, height_ratios=(1, 2.2)) if listed else [figure.subplots()]
        if listed:
            _draw_values(density[0], format)
        _draw_density(density[-1], format)
        if rounded is not None:
            _mark(density[-1], format, rounded)
        try:
            figure.savefig(path)
        except OSError as error:
            raise FormatError(
                f"cannot write {str(path)!r}: {error.strerror}; name a file in a folder that exists"
            ) from None


def _draw_values(axes: "Axes", format: Format) -> None:
    """Every value as a bar on a linear axis."""
    values = format.values()
    least = format.min_normal if isinstance(format, Float) else 0.0
    axes.vlines([v for v in values if abs(v) >= least], 0, 1, color=BLUE, lw=0.9)
    axes.vlines([v for v in values if abs(v) < least], 0, 0.6, color=ORANGE, lw=0.9)
    few = len(values) <= 16
    if few:
        for value in values:
            axes.text(value, 1.08, f"{value:.2g}".replace("-", "−"), ha="center", fontsize=7.5, color=FAINT)
    axes.set(ylim=(0, 1.4 if few else 1.05), yticks=[], xlabel=f"all {len(values)} finite values")
    axes.spines.left.set_visible(False)
    axes.margins(x=0.01)


def _draw_density(axes: "Axes", format: Format) -> None:
    """The number of values in each positive binade, on logarithmic axes."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    exponents = binades(format)
    counts = per_binade(format, exponents)
    least = format.min_exponent if isinstance(format, Float) else exponents.start
    colours = [ORANGE if k < least else BLUE for k in exponents]
    heights = [log2(n) + 1 if n else 0.0 for n in counts]
    axes.bar([k + 0.5 for k in exponents], heights, width=0.92 if len(exponents) < 64 else 1.0, color=colours)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda k, _: f"$2^{{{k:.0f}}}$"))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda y, _: f"{2 ** (y - 1):.0f}" if 1 <= y < 15 else f"$2^{{{y - 1:.0f}}}$" if y >= 1 else "0")
    )
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.set(xlim=(exponents.start - 0.3, exponents.stop + 0.3), xlabel="magnitude", ylabel="values per binade")
    ends = [f"least positive {_typeset(format.smallest)}", f"largest {_typeset(format.max)}"]
    if isinstance(format, Float):
        ends.insert(1, f"least normal {_typeset(format.min_normal)} (orange: subnormal)")
    axes.set_title(",  ".join(ends), loc="left", fontsize=9, color=FAINT)


def _mark(axes: "Axes", format: Format, rounded: Rounded) -> None:
    """Mark the number and the value that it was rounded to."""
    if rounded.value is None or not is_finite(rounded.x) or not float_holds(Fraction(rounded.x)) or rounded.x == 0:
        return
    place = log2(abs(Fraction(rounded.x)))
    low, high = axes.get_xlim()
    if low <= place <= high:
        axes.set_ylim(top=1.12 * axes.get_ylim()[1])
        axes.axvline(place, color=INK, lw=1, ls="--")
        result = f"{rounded.value:g}" if rounded.error is None else short_text(rounded.value, 6)
        text = f"{short_text(rounded.x, 6)} becomes {result}"
        right = place > (low + high) / 2
        axes.annotate(
            text,
            (place, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-4 if right else 4, -2),
            textcoords="offset points",
            ha="right" if right else "left",
            va="top",
            fontsize=8.5,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
        )


def _typeset(value: float) -> str:
    return re.sub(r"2\^(-?\d+)", r"$2^{\1}$", value_text(value))
