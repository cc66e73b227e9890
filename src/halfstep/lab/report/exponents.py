"""Plots 6 and 7: the loss scale over the steps; the exponents of gradients, and their underflow in float16."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MultipleLocator

from halfstep import formats
from halfstep.bits.histogram import ExponentHistogram, binades
from halfstep.formats import Float
from halfstep.lab.experiment import Row
from halfstep.lab.report.results import (
    BASELINE,
    FAINT,
    INK,
    Plot,
    Results,
    looks,
    new_axes,
    new_figure,
    plain,
    power,
    share,
    spread,
)


@dataclass(frozen=True)
class History:
    """The loss scale of one run: log2 of it at each step, and the steps that were skipped."""

    recipe: str
    seed: int
    steps: tuple[int, ...]
    exponents: tuple[float, ...]
    skipped: tuple[int, ...]


def histories(results: Results) -> list[History]:
    """The plot's data: the first seed of each recipe whose scale was ever not 1, or that skipped a step."""
    found = []
    for recipe in results.runs:
        if (first := results.first_seed(recipe)) is None:
            continue
        rows = [r for r in first[1] if r["kind"] == "step" and r["loss_scale"]]
        if any(r["loss_scale"] != 1 or r["skipped"] for r in rows):
            skipped = tuple(r["step"] for r in rows if r["skipped"])
            exponents = tuple(math.log2(r["loss_scale"]) for r in rows)
            found.append(History(recipe, first[0], tuple(r["step"] for r in rows), exponents, skipped))
    return found


def _scale_title(data: list[History], results: Results) -> str:
    skips = sum(len(h.skipped) for h in data)
    ends = {h.exponents[-1] for h in data}
    title = f"The loss scale ends at {power(round(ends.pop()))}" if len(ends) == 1 else "Loss scales by step"
    if skips:
        title += f"; {skips} step{'s were' if skips > 1 else ' was'} skipped"
    return title + (f"; seed {data[0].seed}" if results.experiment.seeds > 1 else "")


def _scale_finding(data: list[History], results: Results) -> str:
    parts = []
    for h in data:
        low, high = power(round(min(h.exponents))), power(round(max(h.exponents)))
        moved = f"stayed at {low}" if low == high else f"moved between {low} and {high}"
        parts.append(f"{h.recipe}'s scale {moved} and {len(h.skipped)} of {len(h.steps)} steps were skipped")
    return "; ".join(parts) + "."


def draw_scale(data: list[History], results: Results, title: str) -> Figure:
    """Draw a staircase per recipe, and a cross at each skipped step."""
    figure, axes = new_axes(3.1, title, "y")
    look = looks(results.runs)
    for h in data:
        colour = look[h.recipe].colour
        axes.step(h.steps, h.exponents, look[h.recipe].line, where="post", color=colour, linewidth=1.8)
        at = dict(zip(h.steps, h.exponents, strict=True))
        axes.plot(
            h.skipped, [at[s] for s in h.skipped], "X", color=colour, markeredgecolor="white", markersize=9, zorder=4
        )
    values = [e for h in data for e in h.exponents]
    axes.set(ylim=(min(values) - 1.2, max(values) + 1.2), ylabel="loss scale", xlabel="step")
    axes.margins(x=0.02)
    axes.yaxis.set_major_locator(MultipleLocator(max(1, round((max(values) - min(values)) / 6))))
    axes.yaxis.set_major_formatter(lambda v, _: power(round(v)))
    (low, high), (left, right) = axes.get_ylim(), axes.get_xlim()
    ends = [(h.exponents[-1] - low) / (high - low) for h in data]
    for h, y, place in zip(data, ends, spread(ends, 0.1), strict=True):
        x = (h.steps[-1] - left) / (right - left)
        axes.plot(
            [x, 1.0, 1.04], [y, y, place], ":", color=look[h.recipe].colour, linewidth=1, clip_on=False,
            transform=axes.transAxes,
        )  # fmt: skip
        axes.text(1.05, place, plain(h.recipe), transform=axes.transAxes, va="center", fontsize=9, color=INK)
    if any(h.skipped for h in data):
        cross = Line2D([], [], linestyle="", marker="X", color=INK, markersize=8, label="skipped: gradients overflowed")
        figure.legend(handles=[cross], loc="outside lower center", fontsize=9)
    return figure


scale_picture = Plot(
    "loss-scale",
    "Loss scale",
    "A dynamic scale doubles after a run of good steps and halves where gradients overflow; that step is skipped. "
    "A few skips are its way of finding the largest scale that fits; a scale that only falls is a run going under.",
    "Not drawn: no recipe in this experiment scales its loss.",
    histories,
    _scale_title,
    _scale_finding,
    draw_scale,
)


SCALED = "fp16-mixed"
DEFAULT_SCALE = 16  # log2 of torch.amp.GradScaler's initial scale
KINDS = {"activation_gradients": "activation gradients", "gradients": "weight gradients"}


@dataclass(frozen=True)
class Cast:
    """Values multiplied by a power of two: the share in each bin [2^e, 2^(e+1)), and the shares that a format zeroes or
    overflows.

    Shares are of the non-zero values, with the loss scale divided out.
    """

    shares: Mapping[int, float]
    zeroed: float
    subnormal: float
    overflowing: float


@dataclass(frozen=True)
class Exponents:
    """The gradients of one step of one run, by kind, and the loss scale to show them with, as log2."""

    recipe: str
    seed: int
    step: int
    values: Mapping[str, ExponentHistogram]
    shift: int
    shift_from: str


def cast_to(values: ExponentHistogram, format: Float, shift: int) -> Cast:
    """The values times 2^shift after a cast to `format`."""
    total, scale = sum(values.counts.values()), 2.0**shift
    return Cast(
        {e + shift: n / total for e, n in sorted(values.counts.items())},
        values.share_zeroed(format, scale),
        values.share_subnormal(format, scale),
        values.share_beyond(format, scale),
    )


def gradient_exponents(results: Results) -> Exponents | None:
    """The plot's data: fp32's last statistics, else those of the first recipe that has any."""
    for recipe in sorted(results.runs, key=lambda r: r != BASELINE):
        for seed, rows in sorted(results.runs[recipe].items()):
            for row in reversed(rows):
                if row["kind"] == "statistics" and (values := _values(row)):
                    return Exponents(recipe, seed, row["step"], values, *_scale(results))
    return None


def _values(row: Row) -> dict[str, ExponentHistogram]:
    taken_out = round(math.log2(row["loss_scale"] or 1))
    found = {}
    for kind in KINDS:
        data = row.get(kind) or {"counts": {}}
        counts = {int(e) - taken_out: n for e, n in data["counts"].items() if n}
        if counts:
            found[kind] = ExponentHistogram(counts, data["zeros"], data["nonfinite"])
    return found


def _scale(results: Results) -> tuple[int, str]:
    first = results.first_seed(SCALED)
    steps = [r for r in first[1] if r["kind"] == "step" and r["loss_scale"]] if first else []
    if steps:
        return round(math.log2(steps[-1]["loss_scale"])), f"{SCALED}'s last loss scale"
    return DEFAULT_SCALE, "the usual first loss scale"


def _exponents_title(data: Exponents, results: Results) -> str:
    kind, values = next(iter(data.values.items()))
    fp16 = formats.get("fp16", Float)
    before, after = cast_to(values, fp16, 0), cast_to(values, fp16, data.shift)
    return (
        f"{share(before.zeroed)} of {plain(data.recipe)}'s {KINDS[kind]} become zero in fp16; "
        f"multiplied by {power(data.shift)}, {share(after.zeroed)} do"
    )


def _exponents_finding(data: Exponents, results: Results) -> str:
    fp16 = formats.get("fp16", Float)
    sentences = [f"From {data.recipe}, seed {data.seed}, step {data.step}; {power(data.shift)} is {data.shift_from}"]
    if data.recipe != BASELINE:
        sentences[0] += " (there is no fp32 run to take them from: what this recipe made zero counts as exact zeros)"
    for kind, values in data.values.items():
        before, after = cast_to(values, fp16, 0), cast_to(values, fp16, data.shift)
        sentences.append(
            f"{KINDS[kind].capitalize()}: {share(before.zeroed)} become zero unscaled and {share(after.zeroed)} at "
            f"{power(data.shift)}; {share(before.subnormal)} and {share(after.subnormal)} become subnormal"
        )
    sentences.append(f"Not drawn: {'; '.join(_zeros(kind, values) for kind, values in data.values.items())}")
    return ". ".join(sentences) + "."


def _zeros(kind: str, values: ExponentHistogram) -> str:
    text = f"{values.zeros:,} {KINDS[kind]} that are exactly zero ({share(values.zeros / values.size)})"
    return text + (f" and {values.nonfinite:,} that are not finite" if values.nonfinite else "")


def draw_exponents(data: Exponents, results: Results, title: str) -> Figure:
    """Draw two panels over one axis: the unscaled values, and the values times the loss scale."""
    fp16 = formats.get("fp16", Float)
    figure = new_figure(5.6, title)
    panels = figure.subplots(2, 1, sharex=True, sharey=True)
    casts = [{kind: cast_to(values, fp16, shift) for kind, values in data.values.items()} for shift in (0, data.shift)]
    ends = binades(fp16)
    drawn = [e for by_kind in casts for cast in by_kind.values() for e, s in cast.shares.items() if s > 2e-5]
    low, high = min([*drawn, ends.zeroed - 9]), max([*drawn, ends.normal + 14]) + 1
    names = ("unscaled", f"multiplied by {power(data.shift)}, {data.shift_from}")
    for axes, by_kind, name in zip(panels, casts, names, strict=True):
        axes.set_xlim(low, high)
        _regions(axes, by_kind, (low, ends.zeroed, ends.normal, ends.beyond, high))
        for kind, cast in by_kind.items():
            bins = [e for e in cast.shares if low <= e < high]
            heights = [cast.shares[e] for e in bins]
            if kind == "activation_gradients":
                axes.bar(bins, heights, width=1, align="edge", color=_BARS, edgecolor="white", linewidth=0.5, zorder=3)
            else:
                steps = [cast.shares.get(e, 0.0) for e in range(low, high)]
                axes.stairs(steps, range(low, high + 1), color=INK, linewidth=1.3, zorder=4)
        axes.set_title(name, loc="left", fontsize=10)
        axes.yaxis.set_major_formatter(lambda v, _: f"{100 * v:g}")
        axes.set_ylabel("share of values (%)")
    panels[0].set_ylim(
        0, 1.65 * max(share for by_kind in casts for cast in by_kind.values() for share in cast.shares.values())
    )
    left_out = " and ".join(f"{v.zeros:,} ({share(v.zeros / v.size)})" for v in data.values.values())
    panels[0].set_title(f"not drawn: exact zeros, {left_out}", loc="right", fontsize=8.5, color=FAINT)
    panels[1].xaxis.set_major_locator(MultipleLocator(5))
    panels[1].xaxis.set_major_formatter(lambda v, _: power(round(v)))
    panels[1].set_xlabel("magnitude of a gradient in the backward pass")
    handles: list[Patch | Line2D] = []
    if "activation_gradients" in data.values:
        handles.append(Patch(color=_BARS, label=f"{KINDS['activation_gradients']}, upper number"))
    if "gradients" in data.values:
        handles.append(Line2D([], [], color=INK, linewidth=1.3, label=f"{KINDS['gradients']}, lower number"))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=9)
    return figure


_BARS, _ZERO, _SUBNORMAL = "#4f83b6", "#f6d5cf", "#fdf0d2"
_RED = "#a8281c"


def _regions(axes: Axes, by_kind: Mapping[str, Cast], edges: tuple[int, int, int, int, int]) -> None:
    """Shade where fp16 makes values zero, subnormal or infinite, and write the shares above the bars."""
    low, zero, normal, beyond, high = edges
    axes.axvspan(low, zero, color=_ZERO, linewidth=0, zorder=0)
    axes.axvspan(zero, normal, color=_SUBNORMAL, linewidth=0, zorder=0)
    axes.axvline(zero, color=_RED, linewidth=1.3, zorder=2)
    regions = [
        (low, zero, "becomes zero", "zeroed", _RED),
        (zero, normal, "subnormal", "subnormal", INK),
        (normal, min(high, beyond), "normal", "", FAINT),
    ]
    if high > beyond:
        axes.axvspan(beyond, high, color=_ZERO, linewidth=0, zorder=0)
        regions.append((beyond, high, "overflows", "overflowing", _RED))
    for left, right, name, field, colour in regions:
        x = (left + right) / 2
        axes.text(
            x, 0.96, name, transform=axes.get_xaxis_transform(), ha="center", va="top", fontsize=9.5, color=colour
        )
        for y, (kind, cast) in zip((0.87, 0.76), by_kind.items() if field else (), strict=False):
            axes.text(
                x, y, share(getattr(cast, field)), transform=axes.get_xaxis_transform(), ha="center", va="top",
                fontsize=11.5, fontweight="bold", color=INK if kind == "gradients" else "#2c629a",
            )  # fmt: skip


exponents_picture = Plot(
    "gradient-exponents",
    "Gradients in float16",
    "Each bar is the share of values with that binary exponent. Left of the red line float16 has no number but "
    "zero; between the lines it has ever fewer bits. A loss scale moves all values to the right before the "
    "backward pass, and the update divides it out again in float32.",
    "Not drawn: no run has written statistics yet.",
    gradient_exponents,
    _exponents_title,
    _exponents_finding,
    draw_exponents,
)
