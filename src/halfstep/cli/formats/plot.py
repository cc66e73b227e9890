"""The number line as a picture: how many values each binade has, how far apart they are, and the values themselves."""

from __future__ import annotations

import re
from fractions import Fraction
from importlib.util import find_spec
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.cli.formats.sketch import binades, per_binade
from halfstep.cli.formats.table import float_holds, kind, layout, short_text, value_text
from halfstep.errors import FormatError
from halfstep.formats import Float, Format
from halfstep.formats.exact import Rounded, is_finite
from halfstep.formats.line import line


if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = (".png", ".pdf", ".svg")
LISTED = 256
"""Formats with more values than this are drawn by their density alone."""
_WIDEST = 2.0**40  # largest over smallest: beyond, a linear axis shows nothing
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
    """Write the picture to a file; one that is there is written over.

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


def _draw_values(axes: Axes, format: Format) -> None:
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


def _draw_density(axes: Axes, format: Format) -> None:
    """How many values lie in each binade of the positive side, on two logarithmic axes."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    exponents = binades(format)
    counts = per_binade(format, exponents)
    least = format.min_exponent if isinstance(format, Float) else exponents.start
    colours = [ORANGE if k < least else BLUE for k in exponents]
    heights = [log2(n) + 1 if n else 0.0 for n in counts]
    axes.bar([k + 0.5 for k in exponents], heights, width=0.92 if len(exponents) < 64 else 1.0, color=colours)
    power = FuncFormatter(lambda k, _: f"$2^{{{k:.0f}}}$")
    axes.xaxis.set_major_formatter(power)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{2 ** (y - 1):.0f}" if 1 <= y < 15 else _power(y)))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.set(xlim=(exponents.start - 0.3, exponents.stop + 0.3), xlabel="magnitude", ylabel="values per binade")
    ends = [f"least positive {_typeset(format.smallest)}", f"largest {_typeset(format.max)}"]
    if isinstance(format, Float):
        ends.insert(1, f"least normal {_typeset(format.min_normal)} (orange: subnormal)")
    axes.set_title(",  ".join(ends), loc="left", fontsize=9, color=FAINT)


def _mark(axes: Axes, format: Format, rounded: Rounded) -> None:
    """Where the rounded number lies, and what became of it."""
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


def _power(height: float) -> str:
    return f"$2^{{{height - 1:.0f}}}$" if height >= 1 else "0"
