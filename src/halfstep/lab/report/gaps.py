"""Plot 2: how far each recipe's final loss lies from fp32's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from halfstep.lab.report.results import BASELINE, Results
from halfstep.lab.report.style import BAND, INK, PERCENT, Look, Picture, looks, new_figure, percent_ticks, plain, signed
from halfstep.lab.verdict import DEGRADES, DIVERGED, TOLERANCE


@dataclass(frozen=True)
class Gap:
    """One recipe: its gap to fp32's mean, the one to fp32's runs with the same seeds, and what stands in for both."""

    recipe: str
    gap: float | None
    paired: float | None
    note: str | None


@dataclass(frozen=True)
class Gaps:
    """Every recipe but fp32, in the experiment's order; half of fp32's band, relative to its mean."""

    gaps: tuple[Gap, ...]
    half_width: float | None


def final_gaps(results: Results) -> Gaps:
    """The data of the plot."""
    gaps = []
    for v in results.verdicts:
        if v.recipe == BASELINE:
            continue
        note = None
        if v.status == DIVERGED:
            note = f"diverged at step {v.diverged_at}"
        elif v.final_loss is None:
            note = "not finished"
        gaps.append(Gap(v.recipe, v.gap, v.paired_gap, note))
    return Gaps(tuple(gaps), results.band.half_width / results.band.mean if results.band else None)


def picture(results: Results) -> Picture:
    """The plot with its words."""
    heading = "Final gap to fp32"
    look_for = (
        "Dots inside the grey band or left of it match fp32. The hollow mark is the paired gap, against fp32 with the "
        "same first weights and batches: it has less noise, and shows effects that hide in the band."
    )
    data = final_gaps(results)
    if not data.gaps or (results.baseline and results.baseline.final_loss is None) or results.baseline is None:
        why = "there is no finished fp32 run to measure a gap to" if data.gaps else "only fp32 was trained"
        return Picture("gap", heading, look_for, f"Not drawn: {why}.")
    degraded = results.with_status(DEGRADES)
    count = f"{len(degraded)} of {len(data.gaps)} recipes"
    if data.half_width is None:
        title = "Paired gaps to fp32, whose band is not measured"
    elif degraded:
        title = f"{count} end{'s' if len(degraded) == 1 else ''} above fp32's band of ±{100 * data.half_width:.2g}%"
    else:
        title = f"None that finished is above fp32's band of ±{100 * data.half_width:.2g}%"
    diverged = sum(g.note is not None and g.note.startswith(DIVERGED) for g in data.gaps)
    title += f"; {diverged} diverged" if diverged else ""
    return Picture("gap", heading, look_for, _finding(data), draw(data, looks(list(results.runs)), title), title)


def _finding(data: Gaps) -> str:
    shown = {g.recipe: g.paired for g in data.gaps if g.paired is not None}
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
    """A row a recipe: a dot at its gap, a hollow one at its paired gap, words where it has neither."""
    figure = new_figure(1.7 + 0.36 * len(data.gaps), title)
    axes = figure.subplots()
    axes.grid(axis="x")
    axes.axvline(0, color="black", linewidth=1.2)
    handles: list[Line2D | Patch] = []
    if data.half_width is not None:
        axes.axvspan(-data.half_width, data.half_width, color=BAND, linewidth=0, zorder=0)
        handles += [Patch(color=BAND, label="fp32's band"), _mark(INK, INK, "gap to fp32's mean")]
    handles.append(_mark("white", INK, "paired gap"))
    for row, gap in enumerate(data.gaps):
        colour = look[gap.recipe].colour
        label = [] if gap.note is None else [gap.note]
        if gap.gap is not None:
            axes.plot(gap.gap, row - 0.14, "o", color=colour, markersize=8, zorder=3)
        if gap.paired is not None:
            axes.plot(
                gap.paired,
                row + (0 if gap.gap is None else 0.14),
                "D",
                color="white",
                markeredgecolor=colour,
                markersize=6.5,
                zorder=4,
            )
        label += [] if gap.gap is None else [signed(gap.gap)]
        label += [] if gap.paired is None else [f"paired {signed(gap.paired)}"]
        axes.text(
            1.02, row, ", ".join(label), transform=axes.get_yaxis_transform(), va="center_baseline", fontsize=9,
            color=INK, fontweight="normal" if gap.note is None else "bold",
        )  # fmt: skip
        if gap.note and gap.note.startswith(DIVERGED):
            axes.plot(0.985, row, "X", color=colour, markersize=10, transform=axes.get_yaxis_transform(), clip_on=False)
    axes.set_yticks(range(len(data.gaps)), [plain(g.recipe) for g in data.gaps])
    axes.set_ylim(len(data.gaps) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    half = data.half_width or TOLERANCE
    shown = [x for g in data.gaps for x in (g.gap, g.paired) if x is not None]
    low, high = min([*shown, -1.6 * half]), max([*shown, 1.6 * half])
    if max(high, -low) > 10 * half:
        axes.set_xscale("symlog", linthresh=2 * half, linscale=1.0)
        axes.set_xlim(1.5 * low, 2.5 * high)
        axes.set_xticks(percent_ticks(1.5 * low, 2.5 * high, 2 * half))
        axes.minorticks_off()
    else:
        axes.set_xlim(1.3 * low, 1.5 * high)
    axes.xaxis.set_major_formatter(PERCENT)
    axes.set_xlabel("final validation loss against fp32 (%)")
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9)
    return figure


def _mark(face: str, edge: str, label: str) -> Line2D:
    marker = "o" if face == edge else "D"
    return Line2D([], [], linestyle="", marker=marker, color=face, markeredgecolor=edge, markersize=7, label=label)
