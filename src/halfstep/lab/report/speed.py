"""Plot 3: the time of a step, as it is and against fp32's."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from halfstep.lab.report.results import BASELINE, Plot, Results, looks, name_rows, new_axes, plain, times, whisker
from halfstep.lab.verdict import timings


@dataclass(frozen=True)
class Speed:
    """One recipe's milliseconds a step: the median, the range that holds the middle 80%, and the median over fp32's."""

    recipe: str
    median: float
    low: float
    high: float
    ratio: float | None
    steps: int

    @property
    def certain(self) -> bool:
        """Whether there are enough steps to speak of."""
        return self.steps >= _ENOUGH


_ENOUGH = 10


def speeds(results: Results) -> list[Speed]:
    """The data of the plot; a run's first step, which warms up, counts only where there is no other."""
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


def _title(data: list[Speed], results: Results) -> str:
    fastest = min([s for s in data if s.certain] or data, key=lambda s: s.median)
    if len(data) == 1:
        return f"A step of {plain(fastest.recipe)} takes {_ms(fastest.median)}"
    if fastest.recipe == BASELINE:
        return f"No recipe's step is faster than fp32's {_ms(fastest.median)}"
    more = "" if fastest.ratio is None else f", {times(fastest.ratio)} times fp32's"
    return f"{plain(fastest.recipe)} has the fastest step: {_ms(fastest.median)}{more}"


def _finding(data: list[Speed], results: Results) -> str:
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


def draw(data: list[Speed], results: Results, title: str) -> Figure:
    """A bar a recipe; milliseconds below, multiples of fp32's above."""
    figure, axes = new_axes(1.5 + 0.36 * len(data), title)
    look = looks(results.runs)
    for row, s in enumerate(data):
        alpha = 1.0 if s.certain else 0.35
        axes.barh(row, s.median, color=look[s.recipe].colour, height=0.62, zorder=2, alpha=alpha)
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
    """Milliseconds to multiples of `base`, and back."""
    return (lambda ms: ms / base), (lambda ratio: ratio * base)


picture = Plot(
    "speed",
    "Time of a step",
    "Bars left of fp32's line are faster. The whisker holds the middle 80% of the steps: differences smaller than "
    "it are the machine's mood. Where the processor has no matrix units for a format, emulating it costs time.",
    "Not drawn: no run has made a step.",
    speeds,
    _title,
    _finding,
    draw,
)
