"""Plot 5: how the loss scale moved, and where a step was skipped."""

import math
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MultipleLocator

from halfstep.lab.report.results import INK, Plot, Results, looks, new_axes, plain, power, spread


@dataclass(frozen=True)
class History:
    """The loss scale of one run: log2 of it at each step, and the steps that were skipped."""

    recipe: str
    seed: int
    steps: tuple[int, ...]
    exponents: tuple[float, ...]
    skipped: tuple[int, ...]


def histories(results: Results) -> list[History]:
    """The data of the plot: the first seed of each recipe whose scale was ever other than 1, or that skipped."""
    found = []
    for recipe in results.runs:
        if (first := results.first_seed(recipe)) is None:
            continue
        rows = [r for r in first[1] if r["kind"] == "step" and r["loss_scale"]]
        if any(r["loss_scale"] != 1 or r["skipped"] for r in rows):
            skipped = tuple(r["step"] for r in rows if r["skipped"])
            exponents = tuple(math.log2(r["loss_scale"]) for r in rows)
            found.append(History(recipe, first[0], tuple(r["step"] for r in rows), exponents, skipped))
    return found


def _title(data: list[History], results: Results) -> str:
    skips = sum(len(h.skipped) for h in data)
    ends = {h.exponents[-1] for h in data}
    title = f"The loss scale ends at {power(round(ends.pop()))}" if len(ends) == 1 else "Loss scales by step"
    if skips:
        title += f"; {skips} step{'s were' if skips > 1 else ' was'} skipped"
    return title + (f"; seed {data[0].seed}" if results.experiment.seeds > 1 else "")


def _finding(data: list[History], results: Results) -> str:
    parts = []
    for h in data:
        low, high = power(round(min(h.exponents))), power(round(max(h.exponents)))
        moved = f"stayed at {low}" if low == high else f"moved between {low} and {high}"
        parts.append(f"{h.recipe}'s scale {moved} and {len(h.skipped)} of {len(h.steps)} steps were skipped")
    return "; ".join(parts) + "."


def draw(data: list[History], results: Results, title: str) -> Figure:
    """A staircase a recipe, a cross at each skipped step."""
    figure, axes = new_axes(3.1, title, "y")
    look = looks(results.runs)
    for h in data:
        colour = look[h.recipe].colour
        axes.step(h.steps, h.exponents, look[h.recipe].line, where="post", color=colour, linewidth=1.8)
        at = dict(zip(h.steps, h.exponents, strict=True))
        axes.plot(
            h.skipped, [at[s] for s in h.skipped], "X", color=colour, markeredgecolor="white", markersize=9, zorder=4
        )
    values = [e for h in data for e in h.exponents]
    axes.set(ylim=(min(values) - 1.2, max(values) + 1.2), ylabel="loss scale", xlabel="step")
    axes.margins(x=0.02)
    axes.yaxis.set_major_locator(MultipleLocator(max(1, round((max(values) - min(values)) / 6))))
    axes.yaxis.set_major_formatter(lambda v, _: power(round(v)))
    (low, high), (left, right) = axes.get_ylim(), axes.get_xlim()
    ends = [(h.exponents[-1] - low) / (high - low) for h in data]
    for h, y, place in zip(data, ends, spread(ends, 0.1), strict=True):
        x = (h.steps[-1] - left) / (right - left)
        axes.plot(
            [x, 1.0, 1.04], [y, y, place], ":", color=look[h.recipe].colour, linewidth=1, clip_on=False,
            transform=axes.transAxes,
        )  # fmt: skip
        axes.text(1.05, place, plain(h.recipe), transform=axes.transAxes, va="center", fontsize=9, color=INK)
    if any(h.skipped for h in data):
        cross = Line2D([], [], linestyle="", marker="X", color=INK, markersize=8, label="skipped: gradients overflowed")
        figure.legend(handles=[cross], loc="outside lower center", fontsize=9)
    return figure


picture = Plot(
    "loss-scale",
    "Loss scale",
    "A dynamic scale doubles after a run of good steps and halves where gradients overflow; that step is skipped. "
    "A few skips are its way of finding the largest scale that fits; a scale that only falls is a run going under.",
    "Not drawn: no recipe in this experiment scales its loss.",
    histories,
    _title,
    _finding,
    draw,
)
