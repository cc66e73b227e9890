"""Signs before a run diverges or spikes: series that rise, tensors that leave their usual range. Imports no torch.

An alarm's threshold is set on stable runs; a tensor is compared with its own earlier steps.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.errors import RunError
from halfstep.lab.experiment import Row
from halfstep.lab.interval import Interval, paired, share
from halfstep.lab.spikes import spikes
from halfstep.lab.sweep.folder import SweepFolder
from halfstep.lab.sweep.report import outcomes


Series = Sequence[float | None]
NAMES = ("loss", "grad_norm", "sharpness")
FALSE_ALARMS = 0.05
"""The share of stable runs that may raise an alarm."""
_THRESHOLDS = tuple(2 * 1.1**i for i in range(100))

BEFORE = 5
"""Steps before a spike in which a cause is searched for."""
WINDOW, LEAST = 50, 20
"""The number of earlier steps a tensor is compared with, and how many it needs before it is judged."""
TIMES = 4.0
"""A tensor has moved if it exceeds this many times the largest value of its earlier steps."""
SATURATED = 0.01
"""A saturated share below this counts as not moved."""


@dataclass(frozen=True)
class Lead:
    """The value of one series' alarms. An alarm is the series' first spike (`lab.spikes`) with this threshold."""

    threshold: float
    false_alarms: dict[str, Any]
    """The share of stable runs that raise an alarm, among those that did not set the threshold."""
    caught: dict[str, Any]
    """The share of diverging runs that raise an alarm before they diverge."""
    steps: tuple[int, ...]
    """For each diverging run, how many steps before it the alarm was raised; 0 if none was raised in time."""
    ahead_of: Mapping[str, tuple[float, Interval]]
    """By other series, how many steps earlier this one raises its alarm: the mean over runs, and its 95% interval."""


def runs_of(path: Path, names: Sequence[str]) -> tuple[list[dict[str, Series]], list[tuple[dict[str, Series], int]]]:
    """The series of a sweep's stable runs, and of its diverging runs with the index of their first diverged step.

    Raises:
        RunError: the folder is not a sweep, or its runs lack these series.
    """
    folder = SweepFolder(path)
    stable: list[dict[str, Series]] = []
    lost: list[tuple[dict[str, Series], int]] = []
    for found in (one for one in outcomes(folder, folder.sweep()) if one.ended):
        rows = folder.rows((found.point, found.recipe, found.seed))
        if found.onset is None:
            stable.append(series_of(rows, names))
        else:
            steps = [row["step"] for row in rows if row["kind"] == "step"]
            lost.append((series_of(rows, names), steps.index(found.onset)))
    return stable, lost


def series_of(rows: Sequence[Row], names: Sequence[str]) -> dict[str, Series]:
    """Series of a run's steps by name, such as `loss`, `grad_norm` and `sharpness`.

    Raises:
        RunError: the run lacks one.
    """
    steps = [row for row in rows if row["kind"] == "step"]
    for name in names:
        if not all(name in row for row in steps):
            raise RunError(f"a run has no {name} at each step; a sweep writes sharpness with --grid sharpness=5e-4")
    return {name: [row[name] for row in steps] for name in names}


def leads(
    stable: Sequence[Mapping[str, Series]], lost: Sequence[tuple[Mapping[str, Series], int]], names: Sequence[str]
) -> dict[str, Lead]:
    """How many steps ahead each series announces that a run diverges.

    Args:
        stable: runs that do not diverge. Every other one, from the first, sets the thresholds, at which 5% of these
            raise an alarm; the others measure the rate of false alarms.
        lost: runs that diverge, each with the index of its first step that counts as diverged.

    Raises:
        RunError: fewer than 20 stable runs, or fewer than 3 that diverge.
    """
    if len(stable) < 20 or len(lost) < 3:
        raise RunError(
            f"{len(stable)} stable runs and {len(lost)} that diverge; expected 20 and 3 at least: more --seeds, or "
            "more values of --grid lr"
        )
    thresholds = {name: _threshold([run[name] for run in stable[::2]]) for name in names}
    steps = {name: tuple(_ahead(run[name], onset, thresholds[name]) for run, onset in lost) for name in names}
    found = {}
    for name in names:
        false = [bool(spikes(run[name], threshold=thresholds[name])) for run in stable[1::2]]
        apart = {other: [a - b for a, b in zip(steps[name], steps[other], strict=True)] for other in names}
        found[name] = Lead(
            thresholds[name],
            share(sum(false), len(false)),
            share(sum(ahead > 0 for ahead in steps[name]), len(lost)),
            steps[name],
            {other: (sum(d) / len(d), paired(d)) for other, d in apart.items() if other != name},
        )
    return found


def _threshold(series: Sequence[Series]) -> float:
    """The lowest threshold at which at most 5% of the series raise an alarm."""
    for threshold in _THRESHOLDS:
        if sum(bool(spikes(one, threshold=threshold)) for one in series) <= FALSE_ALARMS * len(series):
            return threshold
    raise RunError(
        f"more than {FALSE_ALARMS:.0%} of the stable runs raise an alarm even {_THRESHOLDS[-1]:.0f} deviations above "
        "their median: they are not stable"
    )


def _ahead(series: Series, onset: int, threshold: float) -> int:
    """Steps from the first alarm to the onset; 0 if there is none before it."""
    return max((onset - spike.start for spike in spikes(series[:onset], threshold=threshold)), default=0)


@dataclass(frozen=True)
class Moved:
    """A tensor that left its usual range."""

    step: int
    tensor: str
    """A name such as `input of blocks.0.mlp.2`."""
    measure: str
    """`amaxes`, `saturated` or `updates`."""
    times: float
    """The value over the largest of its earlier steps."""


def moved(rows: Sequence[Row], start: int, before: int = BEFORE, times: float = TIMES) -> list[Moved]:
    """The tensors that moved in the steps from `start` - `before` to `start`, earliest first.

    A tensor has moved in the first step in which its amax, its update or its saturated share is more than 4 times the
    largest of the 50 steps before; a share of less than 1% does not count. Within a step the order is that of
    computation: the passes in their order, then the updates. The update of the spike's own step came after its loss and
    is left out.

    Args:
        rows: a run's, with `tensors` at every step (`--grid tensors=STEPS`).
        start: a step, from 1.
    """
    watched = [row for row in rows if row["kind"] == "tensors" and row["step"] <= start]
    order = {name: place for place, name in enumerate(watched[-1]["amaxes"])} if watched else {}
    found: list[tuple[tuple[int, bool, int], Moved]] = []
    for measure in ("saturated", "amaxes", "updates"):
        late, floor = measure == "updates", SATURATED if measure == "saturated" else 0.0
        for tensor in watched[-1][measure] if watched else ():
            sizes = [row[measure].get(tensor) for row in watched]
            series = [math.inf if size is None else size for size in sizes]  # non-finite values are null
            for place in range(LEAST, len(series)):
                step = watched[place]["step"]
                if not start - before <= step <= start - late:
                    continue
                past = max(series[max(0, place - WINDOW) : place])
                if series[place] > max(times * past, floor):
                    ratio = series[place] / past if past else math.inf
                    found.append(((step, late, order.get(tensor, 0)), Moved(step, tensor, measure, ratio)))
                    break
    return [one for _, one in sorted(found, key=lambda item: item[0])]


@dataclass(frozen=True)
class Caused:
    """A spike of a sweep's run, and the tensors that moved before it."""

    point: str
    recipe: str
    seed: int
    step: int
    moved: tuple[Moved, ...]
    """Earliest first; empty if no tensor moved."""


def causes(path: Path) -> tuple[list[Caused], dict[str, dict[str, Any]]]:
    """The tensors that moved before every spike of a sweep's runs; and by recipe, how often one moves without a spike.

    The latter is the share of windows of the same length, one after another, that keep that distance from a spike and
    end before a run diverges: the rate that the causes must exceed.

    Raises:
        RunError: the folder is not a sweep, or its runs recorded no tensors.
    """
    folder = SweepFolder(path)
    found: list[Caused] = []
    quiet: dict[str, list[bool]] = {}
    for run in outcomes(folder, folder.sweep()):
        rows = folder.rows((run.point, run.recipe, run.seed))
        steps = {row["step"] for row in rows if row["kind"] == "step"}
        if not run.ended or not steps:
            continue
        if steps - {row["step"] for row in rows if row["kind"] == "tensors"}:
            raise RunError(
                f"{run.point}, {run.recipe}, seed {run.seed} has no tensors at each step: --grid tensors=STEPS"
            )
        found += [Caused(run.point, run.recipe, run.seed, step, tuple(moved(rows, step))) for step in run.spikes]
        for end in range(LEAST + BEFORE + 1, run.onset or max(steps), BEFORE + 1):
            if not any(end - BEFORE <= step <= end + BEFORE for step in run.spikes):
                quiet.setdefault(run.recipe, []).append(bool(moved(rows, end)))
    return found, {recipe: share(sum(hits), len(hits)) for recipe, hits in quiet.items()}
