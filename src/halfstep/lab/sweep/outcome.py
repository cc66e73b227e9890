"""What one cell showed: its last loss, whether it diverged, its spikes. This file imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from halfstep.lab.folder import Row
from halfstep.lab.spikes import spikes
from halfstep.lab.sweep.folder import DIVERGED, FINISHED, CellState
from halfstep.lab.sweep.grid import Cell
from halfstep.lab.verdict import final_loss


LOST = 10
"""Consecutive steps whose median training loss above the untrained model's makes a run a diverged one."""

LEARNED = 0.95
"""What a training loss lies below, of the untrained model's, once something was learned."""


def rule() -> str:
    """What diverged and spiked mean, in words."""
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
    """The steps at which they began, from 1."""
    ms_per_step: float | None
    bytes_per_parameter: float | None
    parameters: int | None
    tokens: int
    """That it was trained on."""
    reason: str | None = None
    onset: int | None = None
    """The first step that counts as diverged, or the one in which it ended so."""

    @property
    def ended(self) -> bool:
        """Whether it counts among runs that finished or diverged."""
        return self.status in (FINISHED, DIVERGED)


def outcome(cell: Cell, state: CellState, rows: Sequence[Row]) -> Outcome:
    """What a cell's rows show."""
    steps = [row for row in rows if row["kind"] == "step"]
    validations = [row["loss"] for row in rows if row["kind"] == "validation"]
    memory = next((row for row in rows if row["kind"] == "memory"), None)
    seconds = [row["seconds"] for row in steps[1:] if row["seconds"] is not None]
    losses = [row["loss"] for row in steps]
    found, lost = spikes(losses), _lost(losses, validations)
    status = DIVERGED if state.status == FINISHED and lost is not None else state.status
    onset = state.step if lost is None else steps[lost]["step"]
    return Outcome(
        *cell,
        status=status,
        step=state.step,
        loss=final_loss(rows),
        spikes=tuple(steps[spike.start]["step"] for spike in found),
        ms_per_step=1000 * statistics.median(seconds) if seconds else None,
        bytes_per_parameter=None if memory is None else sum(memory["bytes"].values()) - memory["bytes"]["transient"],
        parameters=None if memory is None else memory["parameters"],
        tokens=sum(row["tokens"] for row in steps),
        reason=state.reason,
        onset=onset if status == DIVERGED else None,
    )


def _lost(losses: Sequence[float | None], validations: Sequence[float | None]) -> int | None:
    """Where a run lost what it had learned; its end, if the last validation loss is above the first, or none."""
    if not validations or validations[0] is None:
        return len(losses) - 1 if validations and losses else None
    first = validations[0]
    learned = next((i for i, loss in enumerate(losses) if loss is not None and loss < LEARNED * first), len(losses))
    above = [loss is None or loss > first for loss in losses[learned:]]
    for place in range(len(above) - LOST + 1):
        if sum(above[place : place + LOST]) > LOST // 2:
            return learned + above.index(True, place)
    return len(losses) - 1 if validations[-1] is None or validations[-1] > first else None
