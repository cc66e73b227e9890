"""Plots 3 to 5, one row per recipe: its final gap to fp32, the time of its step, and the bytes of a parameter."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from halfstep.lab.interval import Interval
from halfstep.lab.report.results import (
    BAND,
    BASELINE,
    FAINT,
    INK,
    PERCENT,
    ROLES,
    Look,
    Picture,
    Plot,
    Results,
    looks,
    name_rows,
    new_axes,
    percent_ticks,
    plain,
    signed,
    times,
    whisker,
)
from halfstep.lab.verdict import DEGRADES, DIVERGED, UNDECIDED, RecipeVerdict, timings


@dataclass(frozen=True)
class Gap:
    """One recipe: its mean difference from fp32 with the same seeds, the interval, and a text that replaces both."""

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
    """The plot's data."""
    judged = (v for v in results.verdicts if v.recipe != BASELINE)
    return Gaps(tuple(Gap(v.recipe, v.paired_gap, v.interval, _note(v)) for v in judged), results.experiment.margin)


def _note(verdict: RecipeVerdict) -> str | None:
    if verdict.status == DIVERGED:
        return f"diverged at step {verdict.diverged_at}"
    return "not finished" if verdict.final_loss is None else None


def gap_picture(results: Results) -> Picture:
    """The plot with its text."""
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
    return Picture(
        "gap", heading, look_for, _gap_finding(data), draw_gaps(data, looks(list(results.runs)), title), title
    )


def _gap_finding(data: Gaps) -> str:
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


def draw_gaps(data: Gaps, look: Mapping[str, Look], title: str) -> Figure:
    """Draw one row per recipe: a dot at its gap with a bar over its interval, or words if it has neither."""
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


@dataclass(frozen=True)
class Speed:
    """One recipe's milliseconds per step: the median, the range of the middle 80%, and the median relative to
    fp32's."""

    recipe: str
    median: float
    low: float
    high: float
    ratio: float | None
    steps: int

    @property
    def certain(self) -> bool:
        """Whether there are enough steps for a statement."""
        return self.steps >= _ENOUGH


_ENOUGH = 10


def speeds(results: Results) -> list[Speed]:
    """The plot's data; a run's first step, which warms up, counts only if it is the only one."""
    found = []
    for verdict in results.verdicts:
        if verdict.ms_per_step is None:
            continue
        times = [1000 * seconds for seconds in timings(results.runs[verdict.recipe].values())]
        deciles = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else []
        low, high = (deciles[0], deciles[-1]) if deciles else (verdict.ms_per_step, verdict.ms_per_step)
        found.append(
            Speed(verdict.recipe, verdict.ms_per_step, low, high, results.slowdown(verdict), max(len(times), 1))
        )
    return found


def _speed_title(data: list[Speed], results: Results) -> str:
    fastest = min([s for s in data if s.certain] or data, key=lambda s: s.median)
    if len(data) == 1:
        return f"A step of {plain(fastest.recipe)} takes {_ms(fastest.median)}"
    if fastest.recipe == BASELINE:
        return f"No recipe's step is faster than fp32's {_ms(fastest.median)}"
    more = "" if fastest.ratio is None else f", {times(fastest.ratio)} times fp32's"
    return f"{plain(fastest.recipe)} has the fastest step: {_ms(fastest.median)}{more}"


def _speed_finding(data: list[Speed], results: Results) -> str:
    data = [s for s in data if s.certain] or data
    slowest = max(data, key=lambda s: s.median)
    sentence = f"The slowest is {slowest.recipe} with {_ms(slowest.median)} a step"
    if slowest.ratio is None:
        return sentence + "; without fp32 there is no ratio to state."
    if slowest.recipe == BASELINE:
        return sentence + "."
    faster = sum(s.ratio is not None and s.ratio < 1 for s in data)
    count = f"{faster or 'none'} of the {len(data) - 1} others {'are' if faster > 1 else 'is'} faster"
    return f"{sentence}, {times(slowest.ratio)} times fp32's; {count}."


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def draw_speed(data: list[Speed], results: Results, title: str) -> Figure:
    """Draw one bar per recipe; milliseconds below, multiples of fp32's above."""
    figure, axes = new_axes(1.5 + 0.36 * len(data), title)
    look = looks(results.runs)
    for row, s in enumerate(data):
        axes.barh(row, s.median, color=look[s.recipe].colour, height=0.62, zorder=2, alpha=1.0 if s.certain else 0.35)
        if s.high > s.low:
            whisker(axes, row, s.low, s.high, 3.6)
        ratio = "" if s.ratio is None or s.recipe == BASELINE else f", {times(s.ratio)}×"
        few = "" if s.certain else f", {s.steps} step{'s' if s.steps > 1 else ''} only"
        axes.text(
            1.02,
            row,
            _ms(s.median) + ratio + few,
            transform=axes.get_yaxis_transform(),
            va="center_baseline",
            fontsize=9,
        )
    name_rows(axes, [plain(s.recipe) for s in data], 0.55)
    longest = 1.03 * max(max(s.median, s.high) for s in data)
    axes.set(xlim=(0, longest), xlabel="milliseconds a step: median, whisker 10th to 90th percentile")
    base = next((s.median for s in data if s.recipe == BASELINE), None)
    if base:
        axes.axvline(base, color="black", linewidth=1, linestyle=(0, (4, 3)), zorder=5)
        above = axes.secondary_xaxis("top", functions=_ratio(base))
        above.set_xlabel("times fp32's")
        above.spines["top"].set_visible(True)
    return figure


def _ratio(base: float) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Functions from milliseconds to multiples of `base`, and back."""
    return (lambda ms: ms / base), (lambda ratio: ratio * base)


speed_picture = Plot(
    "speed",
    "Time of a step",
    "Bars left of fp32's line are faster. The whisker holds the middle 80% of the steps: differences smaller than "
    "it are the machine's mood. Where the processor has no matrix units for a format, emulating it costs time.",
    "Not drawn: no run has made a step.",
    speeds,
    _speed_title,
    _speed_finding,
    draw_speed,
)


PERSISTENT = {"weights": "weights", "grads": "gradients", "master": "master copy", "states": "optimizer states"}
"""The roles whose bytes persist from step to step: their names in `metrics.jsonl`, and for readers."""

_COLOURS = {"weights": "weights", "grads": "gradients", "master": "master", "states": "states"}


def total_bytes(by_role: Mapping[str, float]) -> float:
    """The persistent bytes per parameter of a `memory` row."""
    return sum(by_role.get(role, 0.0) for role in PERSISTENT)


def bytes_by_role(results: Results) -> dict[str, dict[str, float]]:
    """The plot's data: the bytes by role of each recipe's `memory` row, including copies that live only in a pass."""
    every = {v.recipe: v.bytes_per_parameter for v in results.verdicts}
    return {recipe: sizes for recipe, sizes in every.items() if sizes is not None}


def _memory_title(data: Mapping[str, Mapping[str, float]], results: Results) -> str:
    totals = {recipe: total_bytes(sizes) for recipe, sizes in data.items()}
    least, most = min(totals, key=totals.__getitem__), max(totals, key=totals.__getitem__)
    if totals[least] == totals[most]:
        return f"{plain(most) if len(data) == 1 else 'Every recipe'} keeps {_size(totals[most])} a parameter"
    return f"From {_size(totals[least])} a parameter ({plain(least)}) to {totals[most]:.3g} ({plain(most)})"


def _memory_finding(data: Mapping[str, Mapping[str, float]], results: Results) -> str:
    totals = {recipe: total_bytes(sizes) for recipe, sizes in data.items()}
    base = totals.get(BASELINE, 0.0)
    saved = ", ".join(f"{recipe} {1 - total / base:.0%}" for recipe, total in totals.items() if total < base)
    if saved:
        return f"Against fp32's {_size(base)} a parameter, these save: {saved}."
    if base and len(data) > 1:
        return f"None keeps less than fp32's {_size(base)} a parameter."
    return "; ".join(f"{recipe}: {_size(total)} a parameter" for recipe, total in totals.items()) + "."


def _size(value: float) -> str:
    return f"{value:.3g} bytes"


def draw_memory(data: Mapping[str, Mapping[str, float]], results: Results, title: str) -> Figure:
    """Draw one stack per recipe with its values, and transient copies to its right."""
    figure, axes = new_axes(1.75 + 0.36 * len(data), title)
    widest = max(map(total_bytes, data.values()))
    apart = 0.105 * widest  # room for the total between the stack and the hatched bar
    copies = {recipe: sizes.get("transient", 0.0) for recipe, sizes in data.items()}
    for row, (recipe, sizes) in enumerate(data.items()):
        left = 0.0
        for role, size in ((role, sizes[role]) for role in PERSISTENT if sizes.get(role, 0.0) > 0):
            axes.barh(row, size, left=left, height=0.62, color=ROLES[_COLOURS[role]], edgecolor="white", linewidth=0.8)
            if size > 0.05 * widest:
                ink = "white" if role in ("weights", "grads") else INK
                axes.text(left + size / 2, row, f"{size:.3g}", ha="center", va="center_baseline", fontsize=9, color=ink)
            left += size
        axes.text(left + 0.012 * widest, row, f"{left:.3g}", va="center_baseline", fontsize=10, fontweight="bold")
        if copy := copies[recipe]:
            axes.barh(row, copy, left=left + apart, height=0.62, color="white", edgecolor=FAINT, hatch="////")
            x = left + apart + copy + 0.012 * widest
            axes.text(x, row, f"+{copy:.3g}", va="center_baseline", fontsize=9, color=FAINT)
    name_rows(axes, [plain(recipe) for recipe in data], 0.55)
    longest = max(total_bytes(sizes) + copies[recipe] for recipe, sizes in data.items())
    axes.set(xlim=(0, longest + apart + 0.09 * widest), xlabel="bytes a parameter")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 4, 10]))
    used = {role: name for role, name in PERSISTENT.items() if any(sizes.get(role) for sizes in data.values())}
    handles = [Patch(color=ROLES[_COLOURS[role]], label=name) for role, name in used.items()]
    if any(copies.values()):
        handles.append(Patch(facecolor="white", edgecolor=FAINT, hatch="////", label="copies in a pass"))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9, columnspacing=1.2,
        handlelength=1.3, handletextpad=0.5,
    )  # fmt: skip
    return figure


memory_picture = Plot(
    "memory",
    "Memory of a parameter",
    "What lasts from step to step is solid; copies that autocast makes inside a pass are hatched and stand apart. "
    "Activations are not in it.",
    "Not drawn: no run has measured its memory yet.",
    bytes_by_role,
    _memory_title,
    _memory_finding,
    draw_memory,
)
