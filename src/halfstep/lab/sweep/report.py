"""The result of each cell of a sweep; summary.json, and a picture of the loss by learning rate. Imports no torch."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from numpy.typing import NDArray

from halfstep.lab.experiment import Row, write_json
from halfstep.lab.interval import LEVEL, compared, paired, share
from halfstep.lab.report.results import SETTINGS, looks, new_figure, plain, png
from halfstep.lab.spikes import spikes
from halfstep.lab.sweep.folder import DIVERGED, FAILED, FINISHED, Cell, CellState, Sweep, SweepFolder, counts
from halfstep.lab.verdict import final


LOST = 10
"""A run has diverged if the median training loss of this many consecutive steps exceeds the untrained model's."""

LEARNED = 0.95
"""Something was learned once the training loss is below this share of the untrained model's."""


def rule() -> str:
    """The definitions of diverged and spiked, in words."""
    return (
        "A run has diverged where a loss ends in infinities or NaN, or where it lost all that it had learned: the "
        f"median training loss of {LOST} consecutive steps lies above the untrained model's validation loss. It has "
        "spiked where a step's training loss lies more than 6 robust standard deviations above the median of the 50 "
        "steps before (lab.spikes)."
    )


@dataclass(frozen=True)
class Outcome:
    """One cell's result."""

    point: str
    recipe: str
    seed: int
    status: str
    step: int
    loss: float | None
    """The validation loss after the last step; None where the run did not finish, or ended without one."""
    spikes: tuple[int, ...]
    """The steps, from 1, at which spikes began."""
    ms_per_step: float | None
    bytes_per_parameter: float | None
    parameters: int | None
    tokens: int
    """The tokens that it was trained on."""
    reason: str | None = None
    onset: int | None = None
    """The first step that counts as diverged, or the step at which it ended as diverged."""

    @property
    def ended(self) -> bool:
        """Whether it finished or diverged."""
        return self.status in (FINISHED, DIVERGED)


def outcome(cell: Cell, state: CellState, rows: Sequence[Row]) -> Outcome:
    """A cell's result from its rows."""
    steps = [row for row in rows if row["kind"] == "step"]
    validations = [row["loss"] for row in rows if row["kind"] == "validation"]
    memory = next((row for row in rows if row["kind"] == "memory"), None)
    seconds = [row["seconds"] for row in steps[1:] if row["seconds"] is not None]
    losses = [row["loss"] for row in steps]
    found, lost = spikes(losses), _diverged_at(losses, validations)
    status = DIVERGED if state.status == FINISHED and lost is not None else state.status
    return Outcome(
        *cell,
        status=status,
        step=state.step,
        loss=final(rows),
        spikes=tuple(steps[spike.start]["step"] for spike in found),
        ms_per_step=1000 * statistics.median(seconds) if seconds else None,
        bytes_per_parameter=None if memory is None else sum(memory["bytes"].values()) - memory["bytes"]["transient"],
        parameters=None if memory is None else memory["parameters"],
        tokens=sum(row["tokens"] for row in steps),
        reason=state.reason,
        onset=None if status != DIVERGED else state.step if lost is None else steps[lost]["step"],
    )


def _diverged_at(losses: Sequence[float | None], validations: Sequence[float | None]) -> int | None:
    """The step at which a run lost what it had learned; its last step, if the last validation loss is above the first;
    or None."""
    if not validations or validations[0] is None:
        return len(losses) - 1 if validations and losses else None
    first = validations[0]
    learned = next((i for i, loss in enumerate(losses) if loss is not None and loss < LEARNED * first), len(losses))
    above = [loss is None or loss > first for loss in losses[learned:]]
    for place in range(len(above) - LOST + 1):
        if sum(above[place : place + LOST]) > LOST // 2:
            return learned + above.index(True, place)
    return len(losses) - 1 if validations[-1] is None or validations[-1] > first else None


BASELINES = ("fp32", "bf16-mixed")
"""The recipes that others are compared with, if they take part."""


def write_report(path: Path) -> dict[str, Any]:
    """Judge the finished cells of the sweep in `path`; write summary.json and rates.png into it, return the summary.

    Raises:
        RunError: there is no sweep, or a file was edited.
    """
    folder = SweepFolder(path)
    found = folder.sweep()
    summary = summarize(found, outcomes(folder, found))
    write_json(path / "summary.json", summary)
    with rc_context(SETTINGS):
        (path / "rates.png").write_bytes(png(picture(summary)))
    return summary


def outcomes(folder: SweepFolder, sweep: Sweep) -> list[Outcome]:
    """Every cell's result, in the sweep's order."""
    return [outcome(cell, folder.state(cell), folder.rows(cell)) for cell in sweep.cells()]


def summarize(sweep: Sweep, found: Sequence[Outcome]) -> dict[str, Any]:
    """The summary as JSON data: cells, curves by setting and recipe, best rates, tests of the shares."""
    settings: dict[str, dict[str, float]] = {}  # by the other axes: the points by learning rate
    for name, experiment in sweep.points().items():
        rest = {axis: getattr(experiment, axis) for axis in sweep.grid if axis != "lr"}
        key = ", ".join(f"{axis} {value}" for axis, value in rest.items()) or "all"
        settings.setdefault(key, {})[name] = experiment.lr
    recipes = sweep.experiment.recipes
    return {
        "sweep": sweep.to_dict(),
        "rule": rule(),
        "cells": {"all": len(found), **counts(found)},
        "failures": {f"{o.point} {o.recipe} {o.seed}": o.reason for o in found if o.status == FAILED},
        "settings": {name: _setting(points, recipes, found) for name, points in settings.items()},
        "tests": {what: _tests(what, recipes, found) for what in ("diverged", "spiked")},
    }


def _setting(points: dict[str, float], recipes: Sequence[str], found: Sequence[Outcome]) -> dict[str, Any]:
    rates = sorted(set(points.values()))
    at = {rate: [name for name, lr in points.items() if lr == rate] for rate in rates}
    cells = {(r, rate): [o for o in found if o.recipe == r and o.point in at[rate]] for r in recipes for rate in rates}
    curves = {recipe: [_at_rate(rate, cells[recipe, rate]) for rate in rates] for recipe in recipes}
    return {"recipes": curves, "best": _best(cells, recipes, rates)}


def _best(
    cells: dict[tuple[str, float], list[Outcome]], recipes: Sequence[str], rates: Sequence[float]
) -> dict[str, Any]:
    """Each recipe's best rate, over the seeds that ended for all recipes and rates."""
    seeds = sorted(set.intersection(*({o.seed for o in outcomes if o.ended} for outcomes in cells.values())))
    if not seeds:
        return {}
    table = {
        recipe: [
            [
                next(np.inf if o.loss is None else o.loss for o in cells[recipe, rate] if o.seed == seed)
                for seed in seeds
            ]
            for rate in rates
        ]
        for recipe in recipes
    }
    return best_rates(table, rates, next((name for name in BASELINES if name in recipes), None))


def _at_rate(rate: float, cells: Sequence[Outcome]) -> dict[str, Any]:
    """One recipe at one rate: the losses over its seeds, and how many diverged and spiked."""
    ended = [cell for cell in cells if cell.ended]
    losses = {cell.seed: cell.loss for cell in ended if cell.loss is not None}
    values = list(losses.values())
    times = [cell.ms_per_step for cell in ended if cell.ms_per_step is not None]
    sizes = [cell.bytes_per_parameter for cell in ended if cell.bytes_per_parameter is not None]
    return {
        "lr": rate,
        "losses": losses,
        "mean": statistics.fmean(values) if values else None,
        "interval": asdict(paired(values)) if len(values) > 1 else None,
        "runs": len(ended),
        "failed": sum(cell.status == FAILED for cell in cells),
        "diverged": share(sum(cell.status == DIVERGED for cell in ended), len(ended)),
        "spiked": share(sum(bool(cell.spikes) for cell in ended), len(ended)),
        "spikes": sum(len(cell.spikes) for cell in ended),
        "ms_per_step": statistics.median(times) if times else None,
        "bytes_per_parameter": sizes[0] if sizes else None,
    }


def _tests(what: str, recipes: Sequence[str], found: Sequence[Outcome]) -> dict[str, Any]:
    """Tests of each recipe's share against each baseline's, over all points."""
    ended = {recipe: [o for o in found if o.recipe == recipe and o.ended] for recipe in recipes}
    hits = {
        recipe: (sum(o.status == DIVERGED if what == "diverged" else bool(o.spikes) for o in cells), len(cells))
        for recipe, cells in ended.items()
    }
    pairs = [
        (recipe, base)
        for base in BASELINES
        if base in recipes
        for recipe in recipes
        if recipe not in BASELINES[: BASELINES.index(base) + 1]
    ]
    return {
        "shares": {recipe: share(*counted) for recipe, counted in hits.items()},
        "level": LEVEL,
        "pairs": [
            {"recipe": recipe, "baseline": base, **compared(*hits[recipe], *hits[base])}
            for recipe, base in pairs
            if hits[recipe][1] and hits[base][1]
        ],
    }


RESAMPLES = 2000


def best_rates(
    losses: Mapping[str, Sequence[Sequence[float]]], rates: Sequence[float], baseline: str | None
) -> dict[str, dict[str, Any]]:
    """The best rate of each recipe that has one, by the mean loss over the seeds, for JSON:

        lr, loss      the rate, and the mean loss at it
        interval      of that loss, the rate chosen again in every resample: the chance of choosing counts too
        rates         by learning rate, the share of the resamples in which it is the best
        gap           the loss at its best rate less the baseline's at the baseline's, relative to the latter; positive
                      is worse; gap_interval is that of the resamples; both are None of the baseline and without one
        other_rate    the share of the resamples in which its best rate is not the baseline's

    Args:
        losses: by recipe, the final losses, (rates, seeds), inf for a run without one. Seeds are the same for all
            recipes and rates, and are drawn together.
    """
    drawn = {}
    generator = np.random.default_rng(0)
    seeds = len(next(iter(losses.values()))[0])
    picks = generator.integers(0, seeds, size=(RESAMPLES, seeds))
    for recipe, table in losses.items():
        values = np.asarray(table, dtype=np.float64)
        if np.isfinite(values.mean(1)).any():
            means = values[:, picks].mean(2)  # (rates, resamples)
            drawn[recipe] = int(values.mean(1).argmin()), float(values.mean(1).min()), means.argmin(0), means.min(0)
    found: dict[str, dict[str, Any]] = {}
    for recipe, (place, loss, places, lowest) in drawn.items():
        shares = {rate: float((places == i).mean()) for i, rate in enumerate(rates)}
        found[recipe] = {"lr": rates[place], "loss": loss, "interval": _interval(lowest), "rates": shares}
        found[recipe] |= dict.fromkeys(("gap", "gap_interval", "other_rate"))
        if baseline in drawn and recipe != baseline:
            _, other, their_places, their_lowest = drawn[baseline]
            gaps = {"gap": loss / other - 1, "gap_interval": _interval(lowest / their_lowest - 1)}
            found[recipe] |= gaps | {"other_rate": float((places != their_places).mean())}
    return found


def _interval(values: NDArray[np.float64]) -> dict[str, float]:
    low, high = np.quantile(values[np.isfinite(values)], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {"low": float(low), "high": float(high)}


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
        panel.set(xscale="log", xlabel="peak learning rate", ylabel="validation loss")
        panel.set_xticks(rates, [f"{rate:g}" for rate in rates])
        panel.minorticks_off()
        panel.grid(axis="y")
        panel.legend(fontsize=8, ncols=2)
        if len(settings) > 1:
            panel.set_title(plain(name, 60), loc="left", fontsize=10)
    return figure
