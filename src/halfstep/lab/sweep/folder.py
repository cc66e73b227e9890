"""A sweep: an experiment and the values of some of its fields; and its folder. Imports no torch.

sweep.json                      the Sweep, with the recipes as they were asked for
POINT/                          what `halfstep compare` writes: experiment.json, RECIPE/seed-N/ ...
POINT/RECIPE/seed-N/cell.json   how the cell ended: status, reason, seconds
summary.json, rates.png         the report
"""

from __future__ import annotations

import fcntl
import math
import os
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from halfstep.errors import RunError, unknown
from halfstep.lab.experiment import Experiment, Row, RunFolder, read_json, read_metrics, write_json, writing


Cell = tuple[str, str, int]
"""A run of a sweep: (point's name, recipe, seed)."""

_FIXED = ("recipes", "task", "seeds", "baseline_seeds", "margin", "recipe_lr", "betas", "checkpoints")
"""Fields of an experiment that cannot be axes."""
AXES = tuple(field.name for field in fields(Experiment) if field.name not in _FIXED)
_KINDS = {"str": str, "str | None": str, "int": int, "float": float}


@dataclass(frozen=True)
class Sweep:
    """An experiment at every point of a grid, or at a sample of them; each is what `halfstep compare` trains.

    Raises:
        RunError: a field that cannot be an axis, has no values, or a value twice; a sample larger than the grid.
    """

    experiment: Experiment
    """The fields that all points share; the values of fields that are axes are ignored."""
    grid: Mapping[str, tuple[Any, ...]]
    """The values of each axis, by field of the experiment: `{"lr": (1e-3, 3e-3), "model": ("gpt-tiny",)}`."""
    sample: int | None = None
    """The number of points, chosen by a fixed random seed; None is all."""
    threads: int = 1
    """Threads of a run. A run's results depend on them, but not on how many runs are executed at once."""

    def __post_init__(self) -> None:
        for name, values in self.grid.items():
            if name not in AXES:
                raise RunError(f"--grid: {unknown('axis', name, AXES)}")
            if not values or len(set(values)) != len(values):
                raise RunError(f"--grid {name}: {list(values)} found; expected values, each once: --grid lr=1e-3,3e-3")
        size = math.prod(len(values) for values in self.grid.values())
        if self.sample is not None and not 1 <= self.sample <= size:
            raise RunError(f"--sample {self.sample} of a grid of {size} points; expected 1 to {size}")
        if self.threads < 1:
            raise RunError(f"--threads {self.threads}; expected at least 1")
        if len(self.points()) != (self.sample or size):
            few = ", ".join(list(self.points())[:20])
            raise RunError(f"two points of the grid would have the same folder, among {few}")

    def points(self) -> dict[str, Experiment]:
        """The experiments by folder name, in the order of the grid; `all` if there are no axes."""
        combinations = [dict(zip(self.grid, values, strict=True)) for values in product(*self.grid.values())]
        if self.sample is not None:
            places = sorted(random.Random(0).sample(range(len(combinations)), self.sample))
            combinations = [combinations[place] for place in places]
        return {_folder(values): replace(self.experiment, **values) for values in combinations}

    def cells(self) -> list[Cell]:
        """Every run, all of the first seed first, so that a first report is available early."""
        return [(point, recipe, seed) for recipe, seed in self.experiment.runs() for point in self.points()]

    def to_dict(self) -> dict[str, Any]:
        """The sweep as JSON data."""
        return {
            "experiment": self.experiment.to_dict(),
            "grid": {name: list(values) for name, values in self.grid.items()},
            "sample": self.sample,
            "threads": self.threads,
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Sweep:
        """The sweep written by `to_dict`.

        Raises:
            RunError: the data is not a sweep's.
        """
        try:
            grid = {name: tuple(values) for name, values in data["grid"].items()}
            return cls(Experiment.from_data(data["experiment"]), grid, data["sample"], data["threads"])
        except (KeyError, AttributeError, TypeError) as error:
            raise RunError(f"this is no sweep that halfstep wrote ({type(error).__name__}: {error})") from error

    def check_extends(self, recorded: Sweep) -> None:
        """Refuse a sweep that differs from the recorded one, except by more seeds or more values of an axis.

        Raises:
            RunError: naming the first difference.
        """
        mine, theirs = asdict(self), asdict(recorded)
        found = {**mine.pop("experiment"), **mine}
        had = {**theirs.pop("experiment"), **theirs}
        grown = self.grid.keys() == recorded.grid.keys() and all(
            set(recorded.grid[axis]) <= set(values) for axis, values in self.grid.items()
        )
        for name, value in found.items():
            more = name in ("seeds", "baseline_seeds") and value > had[name]
            if value != had[name] and not more and not (name == "grid" and grown and self.sample is None):
                raise RunError(
                    f"the folder holds another sweep: its {name} is {had[name]!r}, {value!r} was asked for. Ask for "
                    "the same (with more seeds, or more values of an axis), or give another --out"
                )


def read_grid(texts: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """Values by field, of the field's type, from texts such as `lr=1e-3,3e-3`.

    >>> read_grid(["lr=1e-3,3e-3", "model=gpt-tiny"])
    {'lr': (0.001, 0.003), 'model': ('gpt-tiny',)}

    Raises:
        RunError: a field occurs twice, is unknown, or cannot take a value.
    """
    kinds = {field.name: _KINDS.get(str(field.type), str) for field in fields(Experiment)}
    grid: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if name not in AXES:
            raise RunError(f"--grid {text}: {unknown('axis', name, AXES)}")
        if name in grid:
            raise RunError(f"--grid {text}: the axis {name} is given twice; give all of its values at once")
        try:
            grid[name] = tuple(kinds[name](part.strip()) for part in values.split(",") if part.strip())
        except ValueError as error:
            raise RunError(f"--grid {text}: {error}; expected values by commas, as in lr=1e-3,3e-3") from None
        if not grid[name]:
            raise RunError(f"--grid {text}: no values; expected them by commas, as in lr=1e-3,3e-3")
    return grid


def _folder(values: Mapping[str, Any]) -> str:
    named = (f"{name}-{value:g}" if isinstance(value, float) else f"{name}-{value}" for name, value in values.items())
    return "__".join(re.sub(r"[^\w.+-]", "_", name) for name in named) or "all"


WAITING, BEGUN, FINISHED, DIVERGED, FAILED = "waiting", "begun", "finished", "diverged", "failed"


@dataclass(frozen=True)
class CellState:
    """The state of a cell: one of the words above, the last recorded step, and why it failed."""

    status: str
    step: int = 0
    reason: str | None = None
    seconds: float | None = None
    """The time that a process spent on it in its last attempt."""

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
        """The sweep saved in the folder.

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
        """Save the sweep atomically.

        Raises:
            RunError: the folder cannot be written, or contains something else.
        """
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            if not self.file.exists() and {entry.name for entry in self.path.iterdir()} - {"lock"}:
                raise RunError(f"{self.path} is not empty and holds no sweep; give another --out")
            write_json(self.file, sweep.to_dict())

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
        """The state of a cell."""
        file = self.run(cell) / "cell.json"
        said: dict[str, Any] = read_json(file) if file.is_file() else {}
        if said.get("status") == FAILED:
            return CellState(FAILED, said.get("step", 0), said.get("reason"), said.get("seconds"))
        rows = self.rows(cell)
        if not rows:
            return CellState(WAITING)
        status = rows[-1]["status"] if rows[-1]["kind"] == "end" else BEGUN
        return CellState(status, rows[-1]["step"], None, said.get("seconds"))

    def ended(self, cell: Cell, status: str, seconds: float | None, reason: str | None = None) -> None:
        """Save how a cell ended."""
        rows = self.rows(cell)
        self.run(cell).mkdir(parents=True, exist_ok=True)
        content = {"status": status, "step": rows[-1]["step"] if rows else 0, "seconds": seconds, "reason": reason}
        write_json(self.run(cell) / "cell.json", content)

    def forget_failures(self, sweep: Sweep) -> None:
        """Delete the results of failed cells, so that they are trained again."""
        for cell in sweep.cells():
            if self.state(cell).status == FAILED:
                (self.run(cell) / "cell.json").unlink()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """A context with an exclusive lock on the folder: a second sweep refuses. The kernel releases it with the
        process.

        Raises:
            RunError: another process has it, or the folder cannot be written.
        """
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            with (self.path / "lock").open("a+") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    file.seek(0)
                    other = file.read().strip() or "unknown"
                    raise RunError(
                        f"{self.path} is in use by another sweep (process {other}); "
                        "wait for it, or end it, then resume with --resume"
                    ) from None
                file.truncate(0)
                file.write(str(os.getpid()))
                file.flush()
                yield

    def is_worked_on(self) -> bool:
        """Whether a sweep on this machine holds the lock."""
        try:
            with (self.path / "lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False


def counts(states: Iterable[Any]) -> dict[str, int]:
    """The number of cells in each state."""
    found = Counter(state.status for state in states)
    return {status: found[status] for status in (FINISHED, DIVERGED, FAILED, BEGUN, WAITING)}


def seconds_left(states: list[CellState], at_once: int) -> float | None:
    """The estimated time for the remaining cells, from the finished ones; None before the first has finished."""
    took = [state.seconds for state in states if state.ended and state.seconds is not None]
    return sum(took) / len(took) * sum(not state.ended for state in states) / at_once if took else None
