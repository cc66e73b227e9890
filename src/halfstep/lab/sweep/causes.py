"""What moved before a spike: tensors whose amax, saturated share or update left their own past. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.errors import RunError
from halfstep.lab.metrics import Row
from halfstep.lab.sweep.counts import share
from halfstep.lab.sweep.folder import SweepFolder
from halfstep.lab.sweep.report import outcomes


BEFORE = 5
"""Steps before a spike in which a cause is looked for."""
WINDOW, LEAST = 50, 20
"""The steps that are a tensor's past, and how many it must have before anything counts."""
TIMES = 4.0
"""How far beyond the largest value of its past a tensor has moved."""
SATURATED = 0.01
"""The saturated share below which none has moved."""


@dataclass(frozen=True)
class Moved:
    """A tensor that left its past."""

    step: int
    tensor: str
    """Such as `input of blocks.0.mlp.2`."""
    measure: str
    """`amaxes`, `saturated` or `updates`."""
    times: float
    """The value over the largest of its past."""


def moved(rows: Sequence[Row], start: int, before: int = BEFORE, times: float = TIMES) -> list[Moved]:
    """The tensors that moved in the steps from `start` - `before` to `start`, the first first.

    A tensor has moved in the first step in which its amax, its update or its saturated share is more than 4 times the
    largest of the 50 steps before; a share of less than 1% has not. Within a step what is computed first comes first:
    the passes in their order, then the updates. The update in the step of a spike came after its loss: it is left out.

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
            series = [_size(row[measure].get(tensor)) for row in watched]
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
    """A spike of a sweep's run, and what moved before it."""

    point: str
    recipe: str
    seed: int
    step: int
    moved: tuple[Moved, ...]
    """The first first; empty where no tensor did."""


def causes(path: Path) -> tuple[list[Caused], dict[str, dict[str, Any]]]:
    """What moved before every spike of a sweep's runs; and by recipe, how often something moves where nothing spikes.

    The latter is the share of windows of as many steps, one after another, that come no nearer to a spike and end
    before a run diverges: what the causes found must exceed.

    Raises:
        RunError: the folder is no sweep, or its runs have no tensors.
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
        last = run.onset or max(steps)
        for end in range(LEAST + BEFORE + 1, last, BEFORE + 1):
            if not any(end - BEFORE <= step <= end + BEFORE for step in run.spikes):
                quiet.setdefault(run.recipe, []).append(bool(moved(rows, end)))
    return found, {recipe: share(sum(hits), len(hits)) for recipe, hits in quiet.items()}


def _size(value: float | None) -> float:
    """What is not finite is written down as null."""
    return math.inf if value is None else value
