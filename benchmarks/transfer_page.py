"""The plots and the table of docs/parametrizations.md, generated from results/transfer.json."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.ticker import FuncFormatter, MultipleLocator, NullFormatter

from halfstep.lab.report.results import SETTINGS, new_figure, png
from harness import RESULTS


DOCS = RESULTS.parent.parent / "docs"
NAMES = {"standard": "standard", "umup": "u-muP", "munit": "munit"}
MODELS = {"mlp": "MLP of 4 matrices, digits", "gpt": "GPT of 2 layers, text"}
BEGIN, END = "<!-- transfer -->\n", "<!-- end of transfer -->\n"

Curves = dict[int, dict[int, list[float]]]
"""By width and power of two: the losses, one per seed."""


def page(data: dict[str, Any]) -> None:
    """Draw both plots, and insert the table into the page."""
    learning_rates(data, DOCS / "images" / "transfer.png")
    coordinates(data, DOCS / "images" / "transfer_sizes.png")
    file = DOCS / "parametrizations.md"
    before, rest = file.read_text().split(BEGIN)
    file.write_text(before + BEGIN + table(data) + END + rest.split(END)[1])


def curves(data: dict[str, Any], model: str, parametrization: str) -> Curves:
    """The losses of one model under one parametrization."""
    found: Curves = {}
    for key, loss in data["runs"].items():
        name, rule, width, power, _, _ = key.split()
        if (name, rule) == (model, parametrization):
            losses = found.setdefault(int(width), {}).setdefault(int(power.removeprefix("2^")), [])
            losses.append(math.inf if loss is None else loss)
    return {width: dict(sorted(found[width].items())) for width in sorted(found)}


def best(points: dict[int, list[float]]) -> tuple[int, list[int]] | None:
    """The power of two with the least mean loss, among those with the most seeds, and the powers that are best for some
    seed. None if it is at the edge."""
    most = max(len(losses) for losses in points.values())
    full = {power: losses for power, losses in points.items() if len(losses) == most}
    power = min(full, key=lambda p: sum(full[p]))
    if power in (min(points), max(points)):
        return None
    return power, sorted({min(full, key=lambda p: full[p][seed]) for seed in range(most)})


def table(data: dict[str, Any]) -> str:
    """The table of best learning rates by width."""
    lines = []
    for model, title in MODELS.items():
        widths = sorted({width for rule in NAMES for width in curves(data, model, rule)})
        lines += [f"{title}; the best learning rate, as a power of two", ""]
        lines += [f"| width | {' | '.join(map(str, widths))} |", "| --- |" + " --- |" * len(widths)]
        for rule, name in NAMES.items():
            found = curves(data, model, rule)
            cells = [_cell(found[width]) if width in found else "not run" for width in widths]
            lines += [f"| {name} | {' | '.join(cells)} |"] * bool(found)
        lines.append("")
    return "\n".join(lines)


def _cell(points: dict[int, list[float]]) -> str:
    found = best(points)
    if found is None:
        return "not finished"
    power, others = found
    seeds = max(len(losses) for losses in points.values())
    spread = "" if others == [power] else f" ({others[0]} to {others[-1]})"
    return f"{power}{spread}" + (", 1 seed" if seeds == 1 else "")


def learning_rates(data: dict[str, Any], file: Path) -> None:
    """Plot loss against learning rate, one curve per width, with a ring at the minimum."""
    with matplotlib.rc_context(SETTINGS):
        figure = new_figure(7.0, "Loss against learning rate, by width")
        figure.set_size_inches(10.5, 7.0)
        grid = figure.subplots(2, 3, sharey="row")
        for row, (model, title) in zip(grid, MODELS.items(), strict=True):
            for axes, (rule, name) in zip(row, NAMES.items(), strict=True):
                found = curves(data, model, rule)
                for order, (width, points) in enumerate(found.items()):
                    colour = matplotlib.colormaps["viridis_r"](0.1 + 0.9 * order / 5)
                    means = [sum(losses) / len(losses) for losses in points.values()]
                    axes.plot(list(points), means, "-o", color=colour, markersize=3, label=str(width))
                    if (least := best(points)) is not None:
                        place = least[0], means[list(points).index(least[0])]
                        axes.plot(*place, "o", markersize=10, markerfacecolor="none", markeredgecolor=colour)
                axes.set_title(name, fontsize=10, loc="left")
                axes.set_xlabel("log2 of the learning rate")
                axes.xaxis.set_major_locator(MultipleLocator(1))
                axes.grid(visible=True)
                axes.set_visible(bool(found))
                if found:
                    axes.legend(fontsize=7, title="width", title_fontsize=7, ncols=2)
            row[0].set_ylabel(f"{title}\nloss at the end")
            if model == "mlp":
                row[0].set_yscale("log")
                row[0].yaxis.set_major_formatter(_plain())
                row[0].yaxis.set_minor_formatter(NullFormatter())
                row[0].set_yticks([0.05, 0.1, 0.2, 0.4])
        file.write_bytes(png(figure))


def coordinates(data: dict[str, Any], file: Path) -> None:
    """Plot the root mean squares of the last hidden matrix's output and of the logits against width, after 10 steps."""
    with matplotlib.rc_context(SETTINGS):
        figure = new_figure(4.6, "Root mean square after 10 steps at one learning rate, by width")
        figure.set_size_inches(10.5, 4.6)
        for axes, (model, title) in zip(figure.subplots(1, 2), MODELS.items(), strict=True):
            for rule, colour in zip(NAMES, ("#0072b2", "#d55e00", "#009e73"), strict=True):
                for what, line in (("readout", "-"), ("hidden", "--")):
                    points = sorted(
                        (int(key.split()[2]), sizes[what])
                        for key, sizes in data["sizes"].items()
                        if key.startswith(f"{model} {rule} ") and key.endswith("after 10")
                    )
                    words = "logits" if what == "readout" else "last hidden matrix"
                    if points:
                        label = f"{NAMES[rule]}, {words}"
                        axes.plot(*zip(*points, strict=True), f"{line}o", color=colour, markersize=4, label=label)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(_plain())
                axis.set_minor_formatter(NullFormatter())
            axes.set_title(title, fontsize=10, loc="left")
            axes.set_xlabel("width")
            axes.grid(visible=True)
            axes.legend(fontsize=7)
        file.write_bytes(png(figure))


def _plain() -> FuncFormatter:
    return FuncFormatter(lambda value, _: f"{value:g}")
