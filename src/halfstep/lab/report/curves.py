"""Plots 1 and 2: the validation loss over the steps, its distance from fp32's, and the task's metric."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from halfstep.lab.experiment import Metric, Row
from halfstep.lab.report.results import (
    BAND,
    BASELINE,
    FAINT,
    INK,
    PERCENT,
    Look,
    Picture,
    Plot,
    Results,
    looks,
    new_axes,
    new_figure,
    percent_ticks,
    plain,
    signed,
    spread,
    unit,
)
from halfstep.lab.verdict import DEGRADES, DIVERGED, UNDECIDED, Band, band


@dataclass(frozen=True)
class Curve:
    """One run's validation losses; `end`, if it diverged: the step and the last finite loss before it."""

    recipe: str
    seed: int
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    end: tuple[int, float] | None
    finished: bool


@dataclass(frozen=True)
class Curves:
    """The first seed of each recipe; fp32's band by step, if it has more than one seed."""

    curves: tuple[Curve, ...]
    fp32: Mapping[int, Mapping[int, float]]
    """fp32's losses by seed and step."""
    bands: Mapping[int, Band]

    def __bool__(self) -> bool:
        return any(curve.steps for curve in self.curves)

    def gaps(self, curve: Curve) -> tuple[list[int], list[float]]:
        """The steps at which fp32 was measured too, and the loss's relative distance from fp32's with the same seed."""
        base = self.fp32.get(curve.seed, {})
        both = [(s, loss) for s, loss in zip(curve.steps, curve.losses, strict=True) if base.get(s)]
        return [s for s, _ in both], [(loss - base[s]) / abs(base[s]) for s, loss in both]


def loss_curves(results: Results) -> Curves:
    """The plot's data."""
    firsts = {recipe: results.first_seed(recipe) for recipe in results.runs}
    curves = [curve for recipe, found in firsts.items() if found and (curve := _curve(recipe, *found))]
    fp32 = {seed: _points(rows) for seed, rows in results.runs.get(BASELINE, {}).items()}
    steps = sorted({step for losses in fp32.values() for step in losses})
    at = {step: [losses[step] for losses in fp32.values() if step in losses] for step in steps}
    return Curves(tuple(curves), fp32, {step: b for step, losses in at.items() if (b := band(losses))})


def _points(rows: Sequence[Row], name: str = "loss") -> dict[int, float]:
    """Validation losses, or metrics, by step."""
    return {row["step"]: row[name] for row in rows if row["kind"] == "validation" and row.get(name) is not None}


def _curve(recipe: str, seed: int, rows: Sequence[Row]) -> Curve | None:
    points = _points(rows)
    losses = [r["loss"] for r in rows if r["kind"] in ("validation", "step") and r["loss"] is not None]
    bad = next((r["step"] for r in rows if r["kind"] == "diverged"), None)
    if not losses:
        return None
    end = None if bad is None else (bad, losses[-1])
    return Curve(recipe, seed, tuple(points), tuple(points.values()), end, rows[-1]["kind"] == "end")


def _loss_title(data: Curves, results: Results) -> str:
    judged = [v for v in results.verdicts if v.recipe != BASELINE]
    diverged = sum(v.status == DIVERGED for v in judged)
    if diverged or any(v.interval for v in judged):
        degraded, unsure = (sum(v.status == status for v in judged) for status in (DEGRADES, UNDECIDED))
        counts = {"diverged": diverged, "degraded": degraded, "undecided": unsure}
        found = ", ".join(f"{count} {word}" for word, count in counts.items() if count) or "all match fp32"
        return f"Of {len(judged)} recipes beside fp32: {found}"
    first = next(curve for curve in data.curves if curve.steps)
    start, end = first.losses[0], first.losses[-1]
    return f"{plain(first.recipe)}'s validation loss goes from {start:.2f} to {end:.2f}{unit(results.facts.loss_unit)}"


def _loss_finding(data: Curves, results: Results) -> str:
    ends = {c.recipe: (c.steps[-1], c.losses[-1]) for c in data.curves if c.steps and c.end is None}
    if not ends:
        return "No run got to its end."
    best = min(ends, key=lambda recipe: ends[recipe][1])
    sentence = (
        f"Curves are of seed {data.curves[0].seed}: the lowest last validation loss is {best}'s, "
        f"{ends[best][1]:.4f}{unit(results.facts.loss_unit)} at step {ends[best][0]}"
    )
    gaps = {
        c.recipe: g[-1] for c in data.curves if c.recipe in ends and c.recipe != BASELINE and (g := data.gaps(c)[1])
    }
    if gaps:
        worst = max(gaps, key=lambda recipe: gaps[recipe])
        sentence += f"; the largest gap to fp32 of the runs that did not diverge is {worst}'s, {signed(gaps[worst])}"
    return sentence + "."


def draw_loss(data: Curves, results: Results, title: str) -> Figure:
    """Draw the losses; below them the distance from fp32's mean, if fp32 and others took part."""
    look, loss_unit = looks(results.runs), results.facts.loss_unit
    others = any(data.gaps(c)[0] for c in data.curves if c.recipe != BASELINE)
    figure = new_figure(6.0 if others else 3.8, title)
    if others:
        top, bottom = figure.subplots(2, 1, sharex=True)
        _loss_panel(top, data, look, loss_unit)
        _gap_panel(bottom, data, look)
    else:
        top = bottom = figure.subplots()
        _loss_panel(top, data, look, loss_unit)
        _label_ends(top, [(c, c.steps[-1], c.losses[-1]) for c in data.curves if c.steps and not c.end], look)
    bottom.set_xlabel("step")
    _legend(figure, data, look)
    return figure


def _loss_panel(axes: Axes, data: Curves, look: Mapping[str, Look], loss_unit: str) -> None:
    axes.grid(axis="y")
    axes.margins(x=0.02)
    axes.set_ylabel(f"validation loss ({loss_unit})" if loss_unit else "validation loss")
    if data.bands:
        steps = sorted(data.bands)
        low, high = ([data.bands[s].mean + sign * data.bands[s].half_width for s in steps] for sign in (-1, 1))
        axes.fill_between(steps, low, high, color=BAND, linewidth=0, zorder=1)
    for curve in sorted(data.curves, key=lambda c: c.recipe != BASELINE):
        mark, width = look[curve.recipe], 2.6 if curve.recipe == BASELINE else 1.4
        axes.plot(curve.steps, curve.losses, mark.line, color=mark.colour, linewidth=width, zorder=3)
    top = _ceiling(data)
    if top is not None:
        least = min(loss for c in data.curves for loss in c.losses)
        axes.set_ylim(least - 0.05 * (top - least), top)
    for curve in data.curves:
        if curve.end:
            colour, step = look[curve.recipe].colour, curve.end[0]
            loss = min(curve.end[1], axes.get_ylim()[1])
            before = (curve.steps[-1], curve.losses[-1]) if curve.steps else (step, loss)
            axes.plot([before[0], step], [before[1], loss], ":", color=colour, linewidth=1.2, zorder=3)
            axes.plot(step, loss, "X", color=colour, markeredgecolor="white", markersize=10, zorder=5, clip_on=False)


def _ceiling(data: Curves) -> float | None:
    """The upper limit of the loss axis, so that a run that explodes does not flatten the others."""
    sound = [loss for c in data.curves if c.end is None or c.recipe == BASELINE for loss in c.losses]
    sound += [c.losses[0] for c in data.curves if c.losses]
    highest = max([loss for c in data.curves for loss in (*c.losses, c.end[1] if c.end else 0.0)], default=0.0)
    return 1.1 * max(sound) if sound and highest > 1.1 * max(sound) else None


def _legend(figure: Figure, data: Curves, look: Mapping[str, Look]) -> None:
    """Draw a legend below the plot, where it covers no curve: the band and the runs that diverged."""
    handles: list[Line2D | Patch] = []
    if data.bands:
        handles.append(Patch(color=BAND, label="fp32's band over its seeds"))
    ended = {f"{plain(c.recipe)} diverged at step {c.end[0]}": look[c.recipe].colour for c in data.curves if c.end}
    cross: dict[str, Any] = {"linestyle": "", "marker": "X", "markersize": 8}
    handles += [Line2D([], [], color=colour, label=label, **cross) for label, colour in ended.items()]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=9)


def _label_ends(axes: Axes, ends: Sequence[tuple[Curve, int, float]], look: Mapping[str, Look]) -> None:
    """Names in a column to the right of the plot, each with a line to the (step, y) where its curve ends."""
    axes.set_xlim(axes.get_xlim())
    axes.set_ylim(axes.get_ylim())  # fixes the limits, so that label positions stay valid
    places = [axes.transAxes.inverted().transform(axes.transData.transform(end[1:])) for end in ends]
    last = max((step for _, step, _ in ends), default=1)
    for (curve, step, _), (x, y), place in zip(ends, places, spread([y for _, y in places], 0.075), strict=True):
        axes.plot(
            [x, 1.0, 1.04], [y, y, place], "-" if step == last else ":", color=look[curve.recipe].colour, linewidth=0.9,
            transform=axes.transAxes, clip_on=False, zorder=2,
        )  # fmt: skip
        name = plain(curve.recipe) + ("" if curve.finished else f" (to step {curve.steps[-1]})")
        axes.text(1.05, place, name, transform=axes.transAxes, va="center", fontsize=9, color=INK)


def _gap_panel(axes: Axes, data: Curves, look: Mapping[str, Look]) -> None:
    axes.grid(axis="y")
    axes.margins(x=0.02)
    axes.axhline(0, color=FAINT, linewidth=0.8, zorder=2)
    largest, ends = 0.0, []
    for curve in sorted(data.curves, key=lambda c: c.recipe != BASELINE):
        mark, (at, gaps) = look[curve.recipe], data.gaps(curve)
        axes.plot(at, gaps, mark.line, color=mark.colour, marker=mark.marker, markersize=3.5, linewidth=1.4, zorder=3)
        largest = max([largest, *map(abs, gaps)])
        if gaps and not curve.end:
            ends.append((curve, at[-1], gaps[-1]))
    if largest > 0.05:
        axes.set_yscale("symlog", linthresh=0.01, linscale=0.7)
        axes.set_yticks(percent_ticks(*axes.get_ylim(), 0.01))
        axes.minorticks_off()
    axes.yaxis.set_major_formatter(PERCENT)
    axes.set_ylabel("to fp32, same seed (%)")
    _label_ends(axes, ends, look)


loss_picture = Plot(
    "loss",
    "Loss curves",
    "A recipe that works stays on fp32's curve: above, the loss itself, where the grey band is two standard "
    "deviations of fp32 from seed to seed; below, its distance from fp32 with the same seed.",
    "No run has a validation loss yet.",
    loss_curves,
    _loss_title,
    _loss_finding,
    draw_loss,
)


Courses = Mapping[str, Sequence[Mapping[int, float]]]
"""The metric by step of each run of each recipe, up to its divergence if it diverged."""


def courses(results: Results) -> Courses:
    """The data of the metric's plot; recipes without a metric are left out."""
    every = {recipe: [_points(rows, "metric") for rows in runs.values()] for recipe, runs in results.runs.items()}
    found = {recipe: [points for points in runs if points] for recipe, runs in every.items()}
    return {recipe: runs for recipe, runs in found.items() if runs}


def metric_picture(results: Results) -> Picture:
    """The metric's plot with its text."""
    metric = results.facts.metric
    if metric is None:
        why = "Not drawn: this task has no metric beside the loss, or the folder is older than metrics."
        return Picture("metric", "The field's metric", "", why)
    better = "Higher" if metric.higher_is_better else "Lower"
    heading, look_for = f"The field's metric: {metric.name}", f"{better} is better. Faint lines are fp32's other seeds."
    data = courses(results)
    if not data:
        return Picture("metric", heading, look_for, "No run has been validated yet.")
    diverged = results.with_status(DIVERGED)
    title = f"{metric.name}: {_best({r: runs for r, runs in data.items() if r not in diverged} or data, metric)}"
    drawn = draw_metric(data, looks(list(results.runs)), metric, title)
    return Picture("metric", heading, look_for, _metric_finding(data, metric, diverged), drawn, title)


def _ends(data: Courses) -> dict[str, float]:
    """The mean of each recipe's last values over its seeds."""
    return {recipe: fmean([*points.values()][-1] for points in runs) for recipe, runs in data.items()}


def _best(data: Courses, metric: Metric) -> str:
    ends = _ends(data)
    best = (max if metric.higher_is_better else min)(ends, key=lambda recipe: ends[recipe])
    return f"{plain(best)} ends best at {metric.show(ends[best])}" if len(ends) > 1 else metric.show(ends[best])


def _metric_finding(data: Courses, metric: Metric, diverged: Sequence[str]) -> str:
    words = [f"{r} {metric.show(v)}" + " before it diverged" * (r in diverged) for r, v in _ends(data).items()]
    return f"The last values, means over the seeds: {', '.join(words)}."


def draw_metric(data: Courses, look: Mapping[str, Look], metric: Metric, title: str) -> Figure:
    """Draw one line per recipe: its first seed; fp32's other seeds faintly."""
    figure, axes = new_axes(3.8, title, "y")
    axes.margins(x=0.02)
    axes.set(xlabel="step", ylabel=metric.name)
    if "%" in metric.form:
        axes.yaxis.set_major_formatter(lambda value, _: metric.show(value))
    handles: list[Line2D] = []
    for recipe in sorted(data, key=lambda recipe: recipe != BASELINE):
        mark, (first, *others) = look[recipe], data[recipe]
        handles += axes.plot(
            [*first],
            [*first.values()],
            mark.line,
            color=mark.colour,
            linewidth=2.6 if recipe == BASELINE else 1.4,
            zorder=3,
            label=plain(recipe),
        )
        for points in others if recipe == BASELINE else ():
            axes.plot([*points], [*points.values()], "-", color=FAINT, linewidth=0.8, alpha=0.6, zorder=2)
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9)
    return figure
