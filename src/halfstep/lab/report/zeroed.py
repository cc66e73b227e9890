"""Plot 7: the share of weights, gradients and updates that each format would turn into nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from halfstep import formats
from halfstep.lab.report.results import BASELINE, Results
from halfstep.lab.report.style import INK, ROLES, Picture, new_figure, plain, share


WHAT = {
    "weights": "weights that become zero",
    "gradients": "weight gradients that become zero, unscaled",
    "updates": "updates lost: the stored weight does not move",
}


@dataclass(frozen=True)
class Lost:
    """Shares by what is lost and format, one for each step with statistics."""

    recipe: str
    seed: int
    steps: tuple[int, ...]
    shares: Mapping[str, Mapping[str, Sequence[float]]]

    def last(self, what: str, format: str) -> float:
        """The share at the last of the steps."""
        return self.shares[what][format][-1]

    @property
    def formats(self) -> list[str]:
        """The formats, most bits first."""
        names = {name for table in self.shares.values() for name in table}
        return sorted(names, key=lambda n: (-formats.get(n).bits, -formats.get(n).mantissa_bits))


def shares_lost(results: Results) -> Lost | None:
    """The data of the plot: fp32's first run, else the first recipe's with statistics."""
    for recipe in sorted(results.runs, key=lambda r: r != BASELINE):
        for seed, rows in sorted(results.runs[recipe].items()):
            found = [row for row in rows if row["kind"] == "statistics"]
            if not found:
                continue
            known = [n for n in found[-1]["lost"] if n in {*formats.names()}]
            tables = [{**row["zeroed"], "updates": row["lost"]} for row in found]
            shares = {what: {n: [table[what].get(n, 0.0) for table in tables] for n in known} for what in WHAT}
            return Lost(recipe, seed, tuple(row["step"] for row in found), shares)
    return None


def picture(results: Results) -> Picture:
    """The plot with its words."""
    heading = "What becomes zero, by format"
    look_for = (
        "Long bars are what breaks a recipe that stores this part of training in that format: gradients call for a "
        "loss scale, updates for a master copy or stochastic rounding. Whiskers: the range over the steps looked at."
    )
    data = shares_lost(results)
    if data is None or not data.formats:
        return Picture("zeroed", heading, look_for, "Not drawn: no run has written statistics yet.")
    names = data.formats
    worst = max(
        (n for n in names if formats.get(n).bits >= 16), key=lambda n: data.last("updates", n), default=names[0]
    )
    title = f"In {worst} without a master copy, {share(data.last('updates', worst))} of updates would be lost"
    return Picture("zeroed", heading, look_for, _finding(data), draw(data, title), title)


def _finding(data: Lost) -> str:
    gradients = ", ".join(f"{share(data.last('gradients', n))} in {n}" for n in data.formats)
    updates = ", ".join(f"{share(data.last('updates', n))} in {n}" for n in data.formats)
    return (
        f"At step {data.steps[-1]} of {data.recipe}, seed {data.seed}: weight gradients that become zero, {gradients}; "
        f"updates lost, {updates}."
    )


def draw(data: Lost, title: str) -> Figure:
    """Bars at the last step, whiskers over all of them; a group for weights, gradients and updates."""
    names = data.formats
    figure = new_figure(1.5 + 0.27 * 3 * (len(names) + 1), title)
    groups = figure.subplots(len(WHAT), 1, sharex=True)
    for axes, (what, words) in zip(groups, WHAT.items(), strict=True):
        rows = range(len(names))
        axes.barh(rows, [data.last(what, n) for n in names], height=0.66, color=ROLES[what], zorder=2)
        for row, name in zip(rows, names, strict=True):
            low, high = min(data.shares[what][name]), max(data.shares[what][name])
            if high - low > 0.002:
                axes.plot([low, high], [row, row], color="white", linewidth=3.2, zorder=3)
                axes.plot([low, high], [row, row], color=INK, linewidth=1.6, zorder=4)
            axes.text(
                1.02,
                row,
                share(data.last(what, name)),
                transform=axes.get_yaxis_transform(),
                va="center_baseline",
                fontsize=9,
            )
        axes.set_title(words, loc="left", fontsize=10)
        axes.set_yticks(rows, [plain(n) for n in names], fontsize=9)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
    groups[-1].set_xlim(0, 1)
    groups[-1].xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.0f}"))
    groups[-1].set_xlabel(f"share (%), {plain(data.recipe)} at step {data.steps[-1]}")
    return figure
