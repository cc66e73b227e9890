"""The loss against the learning rate, a line a recipe, its seeds as a band. Imports no torch."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from halfstep.lab.report.style import looks, new_figure, plain


def picture(summary: dict[str, Any]) -> Figure:
    """A figure with one panel for each setting of the other axes; a band is the 95% interval of the mean over seeds."""
    settings = summary["settings"]
    figure = new_figure(2.9 * len(settings) + 0.6, "Final validation loss by peak learning rate")
    table = looks(summary["sweep"]["experiment"]["recipes"])
    for panel, (name, setting) in zip(
        figure.subplots(len(settings), 1, squeeze=False)[:, 0], settings.items(), strict=True
    ):
        rates = sorted({at["lr"] for curve in setting["recipes"].values() for at in curve})
        for recipe, curve in setting["recipes"].items():
            look, known = table[recipe], [at for at in curve if at["mean"] is not None]
            x = [at["lr"] for at in known]
            panel.plot(x, [at["mean"] for at in known], look.line, color=look.colour, marker=look.marker, markersize=4,
                       linewidth=1.4, label=plain(recipe))  # fmt: skip
            banded = [at for at in known if at["interval"]]
            low, high = ([at["interval"][end] for at in banded] for end in ("low", "high"))
            panel.fill_between([at["lr"] for at in banded], low, high, color=look.colour, alpha=0.12, linewidth=0)
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(FixedLocator(rates))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.set_xlabel("peak learning rate")
        panel.set_ylabel("validation loss")
        panel.grid(axis="y")
        panel.legend(fontsize=8, ncols=2)
        if len(settings) > 1:
            panel.set_title(plain(name, 60), loc="left", fontsize=10)
    return figure
