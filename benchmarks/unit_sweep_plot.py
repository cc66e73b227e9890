"""A plot of final loss against learning rate, with a line for each recipe."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from halfstep.lab.report.results import FAINT, INK, SETTINGS, looks


def picture(case: str, found: Mapping[str, Mapping[str, Sequence[Any]]]) -> Figure:
    """A panel for each optimizer: means over seeds, with bars from the smallest to the largest loss; crosses at the top
    mark rates at which a seed diverged.

    Args:
        found: by optimizer and recipe, the runs, which have `lr` and `loss`.
    """
    with rc_context(SETTINGS):
        drawn = Figure(figsize=(1.4 + 4.2 * len(found), 3.6), dpi=160, layout="constrained")
        panels = drawn.subplots(1, len(found), sharey=True, squeeze=False)[0]
        for axes, (optimizer, recipes) in zip(panels, found.items(), strict=True):
            table = looks(list(recipes))
            for recipe, runs in recipes.items():
                rates = sorted({run.lr for run in runs})
                losses = {rate: [run.loss for run in runs if run.lr == rate] for rate in rates}
                whole = [rate for rate in rates if None not in losses[rate]]
                means = [statistics.fmean(losses[rate]) for rate in whole]
                bars = [
                    [mean - min(losses[rate]) for rate, mean in zip(whole, means, strict=True)],
                    [max(losses[rate]) - mean for rate, mean in zip(whole, means, strict=True)],
                ]
                look = table[recipe]
                style = {"color": look.colour, "marker": look.marker, "linestyle": look.line, "markersize": 5}
                axes.errorbar(whole, means, bars, label=recipe, capsize=2, linewidth=1.4, **style)
                lost = [rate for rate in rates if None in losses[rate]]
                axes.plot(lost, [0.97] * len(lost), "x", color=look.colour, transform=axes.get_xaxis_transform())
            axes.set_xscale("log", base=2)
            axes.set_title(optimizer, loc="left", fontsize=10, color=INK)
            axes.set_xlabel("peak learning rate")
            axes.grid(axis="y", linewidth=0.6)
        panels[0].set_ylabel("final validation loss, nats")
        panels[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
        drawn.suptitle(f"{case}: loss against the learning rate", x=0.01, ha="left", fontsize=11, color=FAINT)
    return drawn
