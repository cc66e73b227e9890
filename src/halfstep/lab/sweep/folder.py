"""A sweep's folder: a run folder for each point of the grid, and what became of each cell. This file imports no torch.

sweep.json             the Sweep, with the recipes as they were asked for
POINT/                 what `halfstep compare` writes: experiment.json, RECIPE/seed-N/ ...
POINT/RECIPE/seed-N/cell.json   how the cell ended: status, reason, seconds
summary.json, rates.png         the report
"""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.errors import RunError
from halfstep.lab.folder import Row, RunFolder, read_json, read_metrics, write_json
from halfstep.lab.sweep.grid import Cell, Sweep


WAITING, BEGUN, FINISHED, DIVERGED, FAILED = "waiting", "begun", "finished", "diverged", "failed"


@dataclass(frozen=True)
class CellState:
    """Where a cell stands: one of the words above, the last step written down, and why it failed."""

    status: str
    step: int = 0
    reason: str | None = None
    seconds: float | None = None
    """Of the time a process spent on it, in its last attempt."""

    @property
    def ended(self) -> bool:
        """Whether nothing is left to train."""
        return self.status in (FINISHED, DIVERGED, FAILED)


@dataclass(frozen=True)
class SweepFolder:
    """The folder of one sweep."""

    path: Path

    @property
    def file(self) -> Path:
        """sweep.json"""
        return self.path / "sweep.json"

    def sweep(self) -> Sweep:
        """The sweep written down.

        Raises:
            RunError: there is none, or the file was edited.
        """
        if not self.file.is_file():
            what = "a single experiment (see halfstep compare)" if (self.path / "experiment.json").is_file() else "none"
            raise RunError(f"{self.path}: expected the folder of a sweep, with sweep.json; found {what}")
        try:
            return Sweep.from_data(read_json(self.file))
        except RunError as error:
            raise RunError(f"{self.file}: {error}") from error

    def write(self, sweep: Sweep) -> None:
        """Write the sweep down, whole or not at all.

        Raises:
            RunError: the folder cannot be written, or holds something else.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not self.file.exists() and {entry.name for entry in self.path.iterdir()} - {"lock"}:
                raise RunError(f"{self.path} is not empty and holds no sweep; give another --out")
            write_json(self.file, sweep.to_dict())
        except OSError as error:
            raise RunError(f"{self.path} cannot be written ({error.strerror}); give another --out") from error

    def point(self, name: str) -> RunFolder:
        """The run folder of a point."""
        return RunFolder(self.path / name)

    def run(self, cell: Cell) -> Path:
        """The folder of a cell's run."""
        point, recipe, seed = cell
        return self.point(point).run(recipe, seed)

    def rows(self, cell: Cell) -> list[Row]:
        """The rows of a cell's run."""
        return read_metrics(self.run(cell) / "metrics.jsonl")

    def state(self, cell: Cell) -> CellState:
        """Where a cell stands."""
        run = self.run(cell)
        said: dict[str, Any] = read_json(run / "cell.json") if (run / "cell.json").is_file() else {}
        if said.get("status") == FAILED:
            return CellState(FAILED, said.get("step", 0), said.get("reason"), said.get("seconds"))
        rows = self.rows(cell)
        if not rows:
            return CellState(WAITING)
        last = rows[-1]
        status = last["status"] if last["kind"] == "end" else BEGUN
        return CellState(status, last["step"], None, said.get("seconds"))

    def ended(self, cell: Cell, status: str, seconds: float | None, reason: str | None = None) -> None:
        """Write down how a cell ended."""
        rows = self.rows(cell)
        self.run(cell).mkdir(parents=True, exist_ok=True)
        content = {"status": status, "step": rows[-1]["step"] if rows else 0, "seconds": seconds, "reason": reason}
        write_json(self.run(cell) / "cell.json", content)

    def forget_failures(self, sweep: Sweep) -> None:
        """Let cells that failed be tried again."""
        for cell in sweep.cells():
            if self.state(cell).status == FAILED:
                (self.run(cell) / "cell.json").unlink()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The folder to ourselves: a second sweep refuses. The kernel ends it with the process, however that ends.

        Raises:
            RunError: another process has it, or the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with (self.path / "lock").open("a+") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    file.seek(0)
                    other = file.read().strip() or "unknown"
                    raise RunError(
                        f"{self.path} is being worked on by another sweep (process {other}); "
                        "wait for it, or end it, then go on with --resume"
                    ) from None
                file.truncate(0)
                file.write(str(os.getpid()))
                file.flush()
                yield
        except OSError as error:
            raise RunError(f"{self.path} cannot be written ({error.strerror}); give another --out") from error

    def is_worked_on(self) -> bool:
        """Whether a sweep is running on it, on this machine."""
        try:
            with (self.path / "lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False


def counts(states: Iterable[Any]) -> dict[str, int]:
    """How many cells stand where."""
    found = Counter(state.status for state in states)
    return {status: found[status] for status in (FINISHED, DIVERGED, FAILED, BEGUN, WAITING)}


def seconds_left(states: list[CellState], at_once: int) -> float | None:
    """The time that the cells left take as those that ended did; None before the first has."""
    took = [state.seconds for state in states if state.ended and state.seconds is not None]
    left = sum(not state.ended for state in states)
    return sum(took) / len(took) * left / at_once if took else None
