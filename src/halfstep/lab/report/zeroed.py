"""Plot 7: the share of weights, gradients and updates that each format would turn into nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from matplotlib.figure import Figure

from halfstep import formats
from halfstep.lab.report.results import BASELINE, ROLES, Plot, Results, name_rows, new_figure, plain, share, whisker


WHAT = {
    "weights": "weights that become zero",
    "gradients": "weight gradients that become zero, unscaled",
    "updates": "updates lost, as the stored weight would not move",
}


@dataclass(frozen=True)
class Lost:
    """Shares by what is lost and format, one for each step with statistics.

    Updates are missing where 16-bit weights take them themselves: what they would have been is not seen.
    """

    recipe: str
    seed: int
    steps: tuple[int, ...]
    shares: Mapping[str, Mapping[str, Sequence[float]]]

    def median(self, what: str, format: str) -> float:
        """The share at the middle one of the steps: the last says little, its updates are as small as its rate."""
        return median(self.shares[what][format])

    def formats(self, what: str) -> list[str]:
        """The formats of one table, most bits first."""
        return sorted(
            self.shares[what], key=lambda n: (-formats.get(n).bits, -formats.get(n, formats.Float).mantissa_bits)
        )


def shares_lost(results: Results) -> Lost | None:
    """The data of the plot: fp32's first run, else the first run with statistics, if need be one without updates."""
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


def _title(data: Lost, results: Results) -> str:
    what = next(what for what in ("updates", "gradients", "weights") if what in data.shares)
    names = data.formats(what)
    worst = max([n for n in names if formats.get(n).bits >= 16] or names, key=lambda n: data.median(what, n))
    return {
        "updates": f"In {worst} without a master copy, {share(data.median(what, worst))} of updates would be lost",
        "gradients": f"In {worst}, {share(data.median(what, worst))} of weight gradients become zero unless scaled",
        "weights": f"In {worst}, {share(data.median(what, worst))} of weights become zero",
    }[what]


def _finding(data: Lost, results: Results) -> str:
    parts = [f"Medians over {_steps(data)} of {data.recipe}, seed {data.seed}"]
    for what in data.shares:
        shares = ", ".join(f"{share(data.median(what, n))} in {n}" for n in data.formats(what))
        parts.append(f"{WHAT[what].capitalize()}, {shares}")
    if "updates" not in data.shares:
        parts.append("Its 16-bit weights take the updates themselves, so what is lost of those is not seen")
    return ". ".join(parts) + "."


def _steps(data: Lost) -> str:
    return f"step {data.steps[0]}" if len(data.steps) == 1 else f"{len(data.steps)} steps"


def draw(data: Lost, results: Results, title: str) -> Figure:
    """Bars at the median over the steps, whiskers over all of them; a group for weights, gradients and updates."""
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
    over = f"share (%): median and range over {_steps(data)} of {plain(data.recipe)}"
    groups[-1].set(xlim=(0, 1), xlabel=over)
    groups[-1].xaxis.set_major_formatter(lambda v, _: f"{100 * v:.0f}")
    return figure


picture = Plot(
    "zeroed",
    "What becomes zero, by format",
    "Long bars are what breaks a recipe that stores this part of training in that format: gradients call for a "
    "loss scale, updates for a master copy or stochastic rounding. Bars are medians over the steps looked at, "
    "whiskers their range.",
    "Not drawn: no run has written statistics yet.",
    shares_lost,
    _title,
    _finding,
    draw,
)
