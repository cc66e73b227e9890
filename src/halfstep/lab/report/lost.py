"""Plots 8 and 9: the shares that casts to each format would zero, and how much of each recipe's updates arrives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from matplotlib.figure import Figure

from halfstep import formats
from halfstep.lab.report.results import (
    BASELINE,
    ROLES,
    Plot,
    Results,
    looks,
    name_rows,
    new_figure,
    plain,
    share,
    whisker,
)


WHAT = {
    "weights": "weights that become zero",
    "gradients": "weight gradients that become zero, unscaled",
    "updates": "updates lost, as the stored weight would not move",
}


@dataclass(frozen=True)
class Lost:
    """Shares lost, by kind of value and format, one for each step with statistics.

    Updates are missing if 16-bit weights are updated directly: their unrounded updates are not known.
    """

    recipe: str
    seed: int
    steps: tuple[int, ...]
    shares: Mapping[str, Mapping[str, Sequence[float]]]

    def median(self, what: str, format: str) -> float:
        """The share at the middle one of the steps. (The last step's updates are as small as its learning rate.)"""
        return median(self.shares[what][format])

    def formats(self, what: str) -> list[str]:
        """The formats of one table, widest first."""
        return sorted(
            self.shares[what], key=lambda n: (-formats.get(n).bits, -formats.get(n, formats.Float).mantissa_bits)
        )


def shares_lost(results: Results) -> Lost | None:
    """The plot's data: fp32's first run, else the first run with statistics, if necessary one without updates."""
    found = [
        (not looks[-1]["lost"], recipe != BASELINE, seed, recipe, looks)
        for recipe, runs in results.runs.items()
        for seed, rows in runs.items()
        if (looks := [row for row in rows if row["kind"] == "statistics"])
    ]
    if not found:
        return None
    _, _, seed, recipe, looks = min(found, key=lambda run: run[:3])
    tables = [{**row["zeroed"], "updates": row["lost"]} for row in looks]
    known = {what: [n for n in formats.names() if n in tables[-1].get(what, {})] for what in WHAT}
    shares = {
        what: {n: [table[what][n] for table in tables if n in table[what]] for n in names}
        for what, names in known.items()
        if names
    }
    return Lost(recipe, seed, tuple(row["step"] for row in looks), shares) if shares else None


def _zeroed_title(data: Lost, results: Results) -> str:
    what = next(what for what in ("updates", "gradients", "weights") if what in data.shares)
    names = data.formats(what)
    worst = max([n for n in names if formats.get(n).bits >= 16] or names, key=lambda n: data.median(what, n))
    return {
        "updates": f"In {worst} without a master copy, {share(data.median(what, worst))} of updates would be lost",
        "gradients": f"In {worst}, {share(data.median(what, worst))} of weight gradients become zero unless scaled",
        "weights": f"In {worst}, {share(data.median(what, worst))} of weights become zero",
    }[what]


def _zeroed_finding(data: Lost, results: Results) -> str:
    parts = [f"Medians over {_steps(data)} of {data.recipe}, seed {data.seed}"]
    for what in data.shares:
        shares = ", ".join(f"{share(data.median(what, n))} in {n}" for n in data.formats(what))
        parts.append(f"{WHAT[what].capitalize()}, {shares}")
    if "updates" not in data.shares:
        parts.append("Its 16-bit weights take the updates themselves, so what is lost of those is not seen")
    return ". ".join(parts) + "."


def _steps(data: Lost) -> str:
    return f"step {data.steps[0]}" if len(data.steps) == 1 else f"{len(data.steps)} steps"


def draw_zeroed(data: Lost, results: Results, title: str) -> Figure:
    """Draw bars at the median over the steps, whiskers over all of them; a group each for weights, gradients and
    updates."""
    heights = [len(names) for names in data.shares.values()]
    figure = new_figure(1.5 + 0.27 * sum(height + 1 for height in heights), title)
    groups = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, what in zip(groups, data.shares, strict=True):
        names = data.formats(what)
        rows = range(len(names))
        axes.barh(rows, [data.median(what, n) for n in names], height=0.66, color=ROLES[what], zorder=2)
        for row, name in zip(rows, names, strict=True):
            low, high = min(data.shares[what][name]), max(data.shares[what][name])
            if high - low > 0.002:
                whisker(axes, row, low, high, 3.2)
            words = share(data.median(what, name))
            axes.text(1.02, row, words, transform=axes.get_yaxis_transform(), va="center_baseline", fontsize=9)
        axes.set_title(WHAT[what], loc="left", fontsize=10)
        name_rows(axes, names, 0.6, fontsize=9)
        axes.grid(axis="x")
    groups[-1].set(xlim=(0, 1), xlabel=f"share (%): median and range over {_steps(data)} of {plain(data.recipe)}")
    groups[-1].xaxis.set_major_formatter(lambda v, _: f"{100 * v:.0f}")
    return figure


zeroed_picture = Plot(
    "zeroed",
    "What becomes zero, by format",
    "Long bars are what breaks a recipe that stores this part of training in that format: gradients call for a "
    "loss scale, updates for a master copy or stochastic rounding. Bars are medians over the steps looked at, "
    "whiskers their range.",
    "Not drawn: no run has written statistics yet.",
    shares_lost,
    _zeroed_title,
    _zeroed_finding,
    draw_zeroed,
)


@dataclass(frozen=True)
class Descent:
    """One recipe's first seed: descent quality and share of lost updates at the recorded steps."""

    recipe: str
    steps: tuple[int, ...]
    quality: Sequence[float]
    lost: Sequence[float]
    worst_layer: str
    """The parameter with the lowest descent quality at the middle one of the steps."""
    medians: Sequence[float]
    """For each seed, the quality at the middle one of its steps. (The last step's updates are as small as its learning
    rate.)"""


def descents(results: Results) -> list[Descent]:
    """The plot's data, one recipe after another; steps without an update (skipped ones) are left out."""
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


def _descent_title(data: list[Descent], results: Results) -> str:
    least = _least(data)
    arrives = share(max(0.0, fmean(least.medians)))
    return f"{arrives} of {plain(least.recipe)}'s update arrives (median of {len(least.steps)} steps)"


def _descent_finding(data: list[Descent], results: Results) -> str:
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


def draw_descent(data: Sequence[Descent], results: Results, title: str) -> Figure:
    """Draw quality above, and the share of lost updates below, over the steps."""
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


descent_picture = Plot(
    "descent",
    "Descent quality",
    "The part of each update that arrives in what is stored, masters included: 1 when nothing is lost, 0 when "
    "everything stalls. Without a master it falls with the learning rate, as updates sink below half the gap "
    "between neighbours; stochastic rounding scatters around 1.",
    "Not drawn: no run has written what became of its updates.",
    descents,
    _descent_title,
    _descent_finding,
    draw_descent,
)
