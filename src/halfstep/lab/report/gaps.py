"""Plot 2: how far each recipe's final loss lies from fp32's with the same seeds, and how sure that is."""

from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from halfstep.lab.interval import Interval
from halfstep.lab.report.results import (
    BAND,
    BASELINE,
    INK,
    PERCENT,
    Look,
    Picture,
    Results,
    looks,
    name_rows,
    new_axes,
    percent_ticks,
    plain,
    signed,
)
from halfstep.lab.verdict import DEGRADES, DIVERGED, UNDECIDED, RecipeVerdict


@dataclass(frozen=True)
class Gap:
    """One recipe: its mean difference from fp32 with the same seeds, the interval, and what stands in for both."""

    recipe: str
    gap: float | None
    interval: Interval | None
    note: str | None


@dataclass(frozen=True)
class Gaps:
    """Every recipe but fp32, in the experiment's order, and the margin."""

    gaps: tuple[Gap, ...]
    margin: float


def final_gaps(results: Results) -> Gaps:
    """The data of the plot."""
    judged = (v for v in results.verdicts if v.recipe != BASELINE)
    gaps = tuple(Gap(v.recipe, v.paired_gap, v.interval, _note(v)) for v in judged)
    return Gaps(gaps, results.experiment.margin)


def _note(verdict: RecipeVerdict) -> str | None:
    if verdict.status == DIVERGED:
        return f"diverged at step {verdict.diverged_at}"
    return "not finished" if verdict.final_loss is None else None


def picture(results: Results) -> Picture:
    """The plot with its words."""
    heading = "Final gap to fp32"
    look_for = (
        "Every dot is the mean difference from fp32 with the same first weights and batches, its bar the 95% interval. "
        "A bar that ends inside the grey area or left of it matches; one that lies wholly to the right degrades; one "
        "that crosses its right edge leaves the question open."
    )
    data = final_gaps(results)
    if not data.gaps or (results.baseline and results.baseline.final_loss is None) or results.baseline is None:
        why = "there is no finished fp32 run to measure a gap to" if data.gaps else "only fp32 was trained"
        return Picture("gap", heading, look_for, f"Not drawn: {why}.")
    degraded, unsure = len(results.with_status(DEGRADES)), len(results.with_status(UNDECIDED))
    more = f"more than {100 * data.margin:.2g}%"
    title = f"{degraded} of {len(data.gaps)} recipes lose{'s' if degraded == 1 else ''} {more}"
    title += f"; of {unsure} it cannot be told" if unsure else ""
    diverged = sum(g.note is not None and g.note.startswith(DIVERGED) for g in data.gaps)
    title += f"; {diverged} diverged" if diverged else ""
    return Picture("gap", heading, look_for, _finding(data), draw(data, looks(list(results.runs)), title), title)


def _finding(data: Gaps) -> str:
    shown = {g.recipe: g.gap for g in data.gaps if g.gap is not None}
    if not shown:
        return "No recipe finished with a seed that fp32 finished with too."
    best, worst = min(shown, key=lambda r: shown[r]), max(shown, key=lambda r: shown[r])
    if best == worst:
        return f"With the same seeds, {best} ends {signed(shown[best])} from fp32."
    return (
        f"With the same seeds, the finished recipes lie between {signed(shown[best])} ({best}) and "
        f"{signed(shown[worst])} ({worst})."
    )


def draw(data: Gaps, look: Mapping[str, Look], title: str) -> Figure:
    """A row a recipe: a dot at its gap with a bar over its interval, words where it has neither."""
    figure, axes = new_axes(1.7 + 0.36 * len(data.gaps), title, "x")
    axes.axvline(0, color="black", linewidth=1.2)
    axes.axvspan(-data.margin, data.margin, color=BAND, linewidth=0, zorder=0)
    handles = [
        Patch(color=BAND, label=f"the margin, {100 * data.margin:.2g}%"),
        Line2D([], [], color=INK, marker="o", markersize=7, label="mean and 95% interval"),
    ]
    shown = [-1.6 * data.margin, 1.6 * data.margin]
    for row, gap in enumerate(data.gaps):
        colour = look[gap.recipe].colour
        label = [] if gap.note is None else [gap.note]
        if gap.interval is not None:
            ends = [gap.interval.low, gap.interval.high]
            axes.plot(ends, [row, row], "|-", color=colour, linewidth=2, markersize=9, zorder=3)
            shown += ends
        if gap.gap is not None:
            axes.plot(gap.gap, row, "o", color=colour, markersize=8, zorder=4)
            shown.append(gap.gap)
            label.append(signed(gap.gap))
        axes.text(
            1.02, row, ", ".join(label), transform=axes.get_yaxis_transform(), va="center_baseline", fontsize=9,
            color=INK, fontweight="normal" if gap.note is None else "bold",
        )  # fmt: skip
        if gap.note and gap.note.startswith(DIVERGED):
            axes.plot(0.985, row, "X", color=colour, markersize=10, transform=axes.get_yaxis_transform(), clip_on=False)
    name_rows(axes, [plain(g.recipe) for g in data.gaps], 0.6)
    low, high = min(shown), max(shown)
    if max(high, -low) > 10 * data.margin:
        axes.set_xscale("symlog", linthresh=2 * data.margin, linscale=1.0)
        axes.set_xlim(1.5 * low, 2.5 * high)
        axes.set_xticks(percent_ticks(1.5 * low, 2.5 * high, 2 * data.margin, most=3))
        axes.minorticks_off()
    else:
        axes.set_xlim(1.3 * low, 1.5 * high)
    axes.xaxis.set_major_formatter(PERCENT)
    axes.set_xlabel("final validation loss against fp32's, same seeds (%)")
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=9)
    return figure
