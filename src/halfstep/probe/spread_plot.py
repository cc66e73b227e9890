"""Plot standard deviations of every tensor of a step, in the order of execution, with the ranges of formats."""

import math
from collections.abc import Sequence
from typing import Any

from halfstep import formats
from halfstep.drawing import FAINT, INK, Figure, drawing
from halfstep.formats import Format
from halfstep.probe.spread import KINDS, Scales, Spread


_BANDS = ("#e9edf1", "#d3dce4", "#bccad6", "#a5b7c7")
_LOOKS = {
    "activation": ("#0072b2", "o"), "activation gradient": ("#d55e00", "v"),
    "weight": ("#111111", "s"), "weight gradient": ("#cc3399", "D"),
}  # fmt: skip
_GAP = 9.5
"""The smallest distance between two labels, in points."""
_MANY = 60
"""From this many modules on, blocks are labelled, not modules."""
_LONG = 34


def figure(title: str, found: Sequence[tuple[str, Scales]]) -> Figure:
    """One panel for each of the scales, side by side: log2 of standard deviations, the first tensor on top.

    Bands behind them span each format's range, from its smallest subnormal to its largest value; darker lines mark its
    smallest normal value. Tensors without a spread (zeros, or one value) are not drawn.

    Args:
        found: pairs of a panel's title and its scales.
    """
    height = min(11.0, 2.4 + 0.16 * max(len(_places(scales)) for _, scales in found))
    with drawing(2.2 + 4.6 * len(found), height) as drawn:
        panels = drawn.subplots(1, len(found), sharex=True, squeeze=False)[0]
        low, high = _ends([scales for _, scales in found])
        for axes, (name, scales) in zip(panels, found, strict=True):
            _panel(axes, name, scales, low, high, 0.8 * 72 * height / len(_places(scales)))
        handles, labels = panels[0].get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside lower center", ncols=len(KINDS), frameon=False)
        drawn.suptitle(_plain(title), x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK)
    return drawn


def _panel(axes: Any, name: str, scales: Scales, low: float, high: float, room: float) -> None:
    places = _places(scales)
    bottom = len(places)
    kept = sorted(map(formats.get, scales.formats), key=lambda format: -_held(format)[1] + _held(format)[0])
    strip = bottom * 0.022 + 0.45  # the height of a line of words above the first tensor
    for number, format in enumerate(kept):
        first, last = _held(format)
        axes.axvspan(first, last, color=_BANDS[min(number, len(_BANDS) - 1)], linewidth=0, zorder=0)
        height = -strip * (1.2 * (len(kept) - number) + 0.4)
        normal = math.log2(getattr(format, "min_normal", format.smallest))
        axes.plot([normal, last], [height, height], color=INK, linewidth=2.4, solid_capstyle="butt", zorder=3)
        axes.plot([first, normal], [height, height], color=INK, linewidth=1, linestyle=(0, (2, 1.5)), zorder=3)
        axes.text(
            last + 0.6, height, format.name.removeprefix("float8_"), va="center", ha="left", fontsize=8, color=INK
        )
        axes.axvline(normal, color=FAINT, linewidth=0.6, linestyle=":", zorder=1)
    for kind in KINDS:
        colour, marker = _LOOKS[kind]
        shown = _shown(scales, kind)
        x, y = [math.log2(spread.std) for spread in shown], [places[spread.site.module] for spread in shown]
        look = {"color": colour, "marker": marker, "linewidths": 0, "alpha": 0.85, "zorder": 4}
        axes.scatter(x, y, 20 if bottom < 80 else 9, label=kind, **look)
    top = -strip * (1.2 * len(kept) + 1.1)
    axes.set(ylim=(bottom + 0.5, top), xlim=(low, high), xlabel="log2 of the standard deviation")
    axes.set_title(name, loc="left", fontsize=9, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    ticks = _labels(scales, places, room)
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=7.5)
    axes.tick_params(axis="y", length=2)


def _places(scales: Scales) -> dict[str, int]:
    """The height of each module: its index in the order of execution."""
    return {name: place for place, name in enumerate(dict.fromkeys(spread.site.module for spread in scales.spreads))}


def _shown(scales: Scales, kind: str) -> list[Spread]:
    return [spread for spread in scales.of(kind) if 0 < spread.std < math.inf]


def _labels(scales: Scales, places: dict[str, int], room: float) -> dict[int, str]:
    """The label at each height: a module's path; for repeated blocks the block's path at its first module.

    Args:
        room: points available for a module.
    """
    folded = {spread.site.module: spread.folded for spread in scales.spreads}
    labels: dict[int, str] = {}
    seen: set[str] = set()
    for module, place in places.items():
        parts = folded[module].split(".")
        depth = parts.index("*") + 1 if "*" in parts else None
        name = ".".join(module.split(".")[:depth]) if len(places) > _MANY else module
        if name not in seen and not (labels and (place - max(labels)) * room < _GAP):
            labels[place] = _short(name)
        seen.add(name)
    return labels


def _short(name: str) -> str:
    """A path from a file made safe for a figure; of a long path the end."""
    plain = _plain(name) or "the model"
    return plain if len(plain) <= _LONG else "…" + plain[1 - _LONG :]


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() and ord(c) < 0x250 else "?" for c in text)


def _held(format: Format) -> tuple[float, float]:
    """log2 of the smallest and of the largest value of a format."""
    return math.log2(format.smallest), math.log2(format.max)


def _ends(found: Sequence[Scales]) -> tuple[float, float]:
    """The ends of the axis: all formats and all points, and space for the formats' names."""
    points = [math.log2(s.std) for scales in found for kind in KINDS for s in _shown(scales, kind)]
    held = [end for scales in found for name in scales.formats for end in _held(formats.get(name))]
    return min(points + held) - 1.5, max(points + held) + 6
