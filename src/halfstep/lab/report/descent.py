"""Plot 9: how much of each recipe's updates arrives in what it stores."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from matplotlib.figure import Figure

from halfstep.lab.report.results import Plot, Results, looks, new_figure, plain, share


@dataclass(frozen=True)
class Descent:
    """One recipe's first seed: descent quality and share of lost updates at the steps looked at."""

    recipe: str
    steps: tuple[int, ...]
    quality: Sequence[float]
    lost: Sequence[float]
    worst_layer: str
    """The parameter whose updates arrive least at the middle one of the steps."""
    medians: Sequence[float]
    """Of each seed, the quality at the middle one of its steps: the last says little, its updates are as small as the
    learning rate."""


def descents(results: Results) -> list[Descent]:
    """The data of the plot, a recipe at a time; a step in which nothing was wanted (skipped ones) is left out."""
    found = []
    for recipe, runs in results.runs.items():
        looks = [
            [row for row in rows if row["kind"] == "statistics" and row.get("descent", {}).get("quality") is not None]
            for rows in runs.values()
        ]
        first = next(iter(looks), [])
        if first:
            layers = first[len(first) // 2]["descent"]["layers"]
            known = {name: layer["quality"] for name, layer in layers.items() if layer["quality"] is not None}
            found.append(
                Descent(
                    recipe,
                    tuple(row["step"] for row in first),
                    [row["descent"]["quality"] for row in first],
                    [row["descent"]["lost_share"] for row in first],
                    min(known, key=lambda name: known[name], default=""),
                    [median(row["descent"]["quality"] for row in rows) for rows in looks if rows],
                )
            )
    return found


def _least(data: list[Descent]) -> Descent:
    return min(data, key=lambda d: fmean(d.medians))


def _title(data: list[Descent], results: Results) -> str:
    least = _least(data)
    arrives = share(max(0.0, fmean(least.medians)))
    return f"{arrives} of {plain(least.recipe)}'s update arrives (median of {len(least.steps)} steps)"


def _finding(data: list[Descent], results: Results) -> str:
    least = _least(data)
    seeds, low, high = len(least.medians), min(least.medians), max(least.medians)
    if low > 0.99:
        return "Every recipe's updates arrive whole at the median of the steps looked at."
    spread = f" (mean of {seeds} seeds, {share(max(0.0, low))} to {share(max(0.0, high))})" if seeds > 1 else ""
    return (
        f"At the median of {len(least.steps)} steps {least.recipe} keeps {share(max(0.0, fmean(least.medians)))} of "
        f"its update{spread}, {share(median(least.lost))} of its elements do not move, and {least.worst_layer} keeps "
        f"least. Curves are of the first seed."
    )


def draw(data: Sequence[Descent], results: Results, title: str) -> Figure:
    """Quality above, the share of lost updates below, over steps."""
    figure = new_figure(4.6, title)
    above, below = figure.subplots(2, 1, sharex=True)
    for d in data:
        own = looks(results.runs)[d.recipe]
        for axes, values in ((above, d.quality), (below, d.lost)):
            axes.plot(
                d.steps, values, own.line, color=own.colour, marker=own.marker, markersize=5, label=plain(d.recipe)
            )
    low, high = min(-0.03, *(min(d.quality) for d in data)), max(1.08, *(max(d.quality) for d in data)) + 0.02
    above.set(ylabel="descent quality", ylim=(low, high))
    below.set(ylabel="lost updates (%)", ylim=(-0.03, 1.03), xlabel="step")
    below.yaxis.set_major_formatter(lambda v, _: f"{100 * v:.0f}")
    for axes in (above, below):
        axes.grid(axis="y")
    figure.legend(*above.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    return figure


picture = Plot(
    "descent",
    "Descent quality",
    "The part of each update that arrives in what is stored, masters included: 1 when nothing is lost, 0 when "
    "everything stalls. Without a master it falls with the learning rate, as updates sink below half the gap "
    "between neighbours; stochastic rounding scatters around 1.",
    "Not drawn: no run has written what became of its updates.",
    descents,
    _title,
    _finding,
    draw,
)
