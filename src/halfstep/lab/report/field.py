"""Plot 2: the task's metric over the steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from halfstep.lab.experiment import Metric
from halfstep.lab.folder import Row
from halfstep.lab.report.results import BASELINE, FAINT, Look, Picture, Results, looks, new_axes, plain
from halfstep.lab.verdict import DIVERGED


@dataclass(frozen=True)
class Course:
    """A run's metric by step."""

    recipe: str
    seed: int
    steps: tuple[int, ...]
    values: tuple[float, ...]


def courses(results: Results) -> list[Course]:
    """The data of the plot: every run of every recipe, those that diverged to where they did."""
    return [
        Course(recipe, seed, tuple(points), tuple(points.values()))
        for recipe, runs in results.runs.items()
        for seed, rows in runs.items()
        if (points := _points(rows))
    ]


def _points(rows: Sequence[Row]) -> dict[int, float]:
    """The metric by step."""
    return {r["step"]: r["metric"] for r in rows if r["kind"] == "validation" and r.get("metric") is not None}


def picture(results: Results) -> Picture:
    """The plot with its words."""
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
    title = f"{metric.name}: {_best([c for c in data if c.recipe not in diverged] or data, metric)}"
    drawn = draw(data, looks(list(results.runs)), metric, title)
    return Picture("metric", heading, look_for, _finding(data, metric, diverged), drawn, title)


def _ends(data: Sequence[Course]) -> dict[str, float]:
    """The mean of each recipe's last values over its seeds."""
    return {recipe: fmean(c.values[-1] for c in data if c.recipe == recipe) for recipe in {c.recipe: 0 for c in data}}


def _best(data: Sequence[Course], metric: Metric) -> str:
    ends = _ends(data)
    pick = max if metric.higher_is_better else min
    best = pick(ends, key=lambda recipe: ends[recipe])
    return f"{plain(best)} ends best at {metric.show(ends[best])}" if len(ends) > 1 else metric.show(ends[best])


def _finding(data: Sequence[Course], metric: Metric, diverged: Sequence[str]) -> str:
    ends = _ends(data)
    words = [f"{r} {metric.show(v)}" + " before it diverged" * (r in diverged) for r, v in ends.items()]
    return f"The last values, means over the seeds: {', '.join(words)}."


def draw(data: Sequence[Course], look: Mapping[str, Look], metric: Metric, title: str) -> Figure:
    """A line a recipe: its first seed; fp32's other seeds faint."""
    figure, axes = new_axes(3.8, title, "y")
    axes.margins(x=0.02)
    axes.set(xlabel="step", ylabel=metric.name)
    if "%" in metric.form:
        axes.yaxis.set_major_formatter(lambda value, _: metric.show(value))
    handles: dict[str, Line2D] = {}
    for course in sorted(data, key=lambda c: c.recipe != BASELINE):
        mark, first = look[course.recipe], course.recipe not in handles
        if first:
            width = 2.6 if course.recipe == BASELINE else 1.4
            (line,) = axes.plot(
                course.steps,
                course.values,
                mark.line,
                color=mark.colour,
                linewidth=width,
                zorder=3,
                label=plain(course.recipe),
            )
            handles[course.recipe] = line
        elif course.recipe == BASELINE:
            axes.plot(course.steps, course.values, "-", color=FAINT, linewidth=0.8, alpha=0.6, zorder=2)
    figure.legend(handles=list(handles.values()), loc="outside lower center", ncols=4, fontsize=9)
    return figure
