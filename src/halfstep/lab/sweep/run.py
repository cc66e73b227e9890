"""Train the remaining cells of a sweep, and collect the data of scaling laws from trained ones.

Everything is checked first; then the cells are passed to an executor.
"""

from __future__ import annotations

import fcntl
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from halfstep.errors import HalfstepError, RunError
from halfstep.lab.compare import Comparison, open_experiment
from halfstep.lab.experiment import read_json, write_json
from halfstep.lab.sweep.folder import FAILED, FINISHED, Cell, Sweep, SweepFolder
from halfstep.lab.sweep.report import Outcome, outcomes
from halfstep.lab.task import Task
from halfstep.lab.train import Progress
from halfstep.law import Cell as LawCell, Damage
from halfstep.nn import quantize_model
from halfstep.recipe import Recipe, from_data, get_recipe, integer_weights


# ---- executors -------------------------------------------------------------------------------------------------------

Beat = Progress | Cell
"""What a training cell reports: a step, and at its end the cell itself."""


class Executor(Protocol):
    """Runs cells on processes or machines that see the sweep's folder."""

    @property
    def at_once(self) -> int:
        """How many cells are trained at once."""

    def run(
        self, train: Cells, cells: Sequence[Cell], watch: Callable[[Beat], None], lost: Callable[[Cell, str], None]
    ) -> None:
        """Call `train(*cell, watch)` once for each cell, anywhere; calling `watch` for steps is optional.

        A cell whose process ends unexpectedly is tried again, and finally passed to `lost` with the reason.
        """


class Cells:
    """Trains one cell after another in its process. It is pickled to other processes, and opens what it needs there."""

    def __init__(self, path: Path, sweep: Sweep) -> None:
        """A sweep in the folder `path`, with its recipes as they were asked for, which may be files or modules."""
        self.folder = SweepFolder(path.resolve())
        self.sweep = sweep
        self.asked = sweep.experiment.recipes
        self._open: dict[str, Comparison] = {}
        self._tasks: dict[tuple[Any, ...], Task] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}, "_tasks": {}}

    def __call__(self, point: str, recipe: str, seed: int, watch: Callable[[Any], None]) -> None:
        """Train a cell to its end. An exception of its model or recipe is saved as the cell's result."""
        cell = point, recipe, seed
        torch.set_num_threads(self.sweep.threads)
        run, started = self.folder.run(cell), time.monotonic()
        run.mkdir(parents=True, exist_ok=True)
        with (run / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # a process left over from a killed sweep ends at its next step
            if not self.folder.state(cell).ended:
                status, reason = self._trained(cell, watch)
                self.folder.ended(cell, status, time.monotonic() - started, reason)
        watch(cell)

    def _trained(self, cell: Cell, watch: Callable[[Any], None]) -> tuple[str, str | None]:
        try:
            self.comparison(cell[0]).train(cell[1], cell[2], watch)
        except OSError:  # from the disk, or the pipe to a sweep that has ended: not a result of the cell
            raise
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            return FAILED, f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
        return self.folder.state(cell).status, None

    def comparison(self, point: str) -> Comparison:
        """The experiment of a point, opened, or created if it does not exist.

        Raises:
            HalfstepError: as `open_experiment`.
        """
        if point not in self._open:
            asked, path = replace(self.sweep.points()[point], recipes=self.asked), self.folder.path / point
            data = asked.task, asked.data, asked.context, asked.batch, asked.steps, asked.model
            made = (path / "experiment.json").is_file()
            self._open[point] = open_experiment(asked, path, resume=made, task=self._tasks.get(data))
            self._tasks[data] = self._open[point].task  # experiments with the same task fields share one open task
        return self._open[point]


def quietly(cells: Cells, cell: Cell) -> None:
    """Train a cell without reporting its steps."""
    cells(*cell, lambda said: None)


# ---- the sweep -------------------------------------------------------------------------------------------------------


def open_sweep(sweep: Sweep, path: Path, resume: bool) -> Cells:
    """Check the sweep at every point, and create its folders; or, with `resume`, open the existing one.

    Raises:
        RunError: the folder contains another sweep, or something else.
        HalfstepError: a recipe, model, data or value of an axis cannot be trained; the message names the point. A
            folder that was created for it is removed.
    """
    folder, made = SweepFolder(path), not resume
    if folder.file.exists() and made:
        raise RunError(f"{path} holds a sweep already; go on with --resume, or give another --out")
    recorded = folder.sweep() if resume else None
    if recorded is None:
        folder.write(sweep)
    cells = Cells(path, sweep)
    try:
        names = cells.comparison(next(iter(sweep.points()))).experiment.recipes
        named = replace(sweep, experiment=replace(sweep.experiment, recipes=names))
        if recorded is not None:
            named.check_extends(recorded)
        for point in sweep.points():
            try:
                cells.comparison(point)
            except HalfstepError as error:
                raise type(error)(f"at {point}: {error}") from error
    except HalfstepError:
        for point in sweep.points() if made else ():
            shutil.rmtree(path / point, ignore_errors=True)
        folder.file.unlink() if made else None
        raise
    cells.sweep = named
    folder.write(named)
    return cells


def run_sweep(cells: Cells, executor: Executor, watch: Callable[[Beat], None], retry: bool = False) -> None:
    """Train every unfinished cell. A cell that fails, or repeatedly loses its process, is a result.

    Args:
        retry: whether cells that failed before are tried again.

    Raises:
        RunError: another sweep has the folder's lock; the executor is lost.
        OSError: the folder cannot be written.
    """
    folder = cells.folder
    with folder.locked():
        if retry:
            folder.forget_failures(cells.sweep)
        left = [cell for cell in cells.sweep.cells() if not folder.state(cell).ended]

        def lost(cell: Cell, reason: str) -> None:
            folder.ended(cell, FAILED, None, reason)
            watch(cell)

        executor.run(cells, left, watch, lost)


# ---- data of scaling laws --------------------------------------------------------------------------------------------


def finished(folder: SweepFolder) -> list[Outcome]:
    """The finished cells, each at the best learning rate of its group (the same model, steps, recipe and seed)."""
    sweep = folder.sweep()
    points = sweep.points()
    best: dict[tuple[Any, ...], Outcome] = {}
    for found in outcomes(folder, sweep):
        rest = tuple(getattr(points[found.point], axis) for axis in sweep.grid if axis != "lr")
        key = (*rest, found.recipe, found.seed)
        ended = found.status == FINISHED and found.loss is not None
        if ended and (key not in best or (found.loss or 0.0) < (best[key].loss or 0.0)):
            best[key] = found
    return list(best.values())


def law_cells(paths: Sequence[Path]) -> list[LawCell]:
    """The data for fitting a law: cells of sweeps that differ in sizes, tokens and widths.

    Raises:
        RunError: a folder is not a sweep, or a recipe rounds more than its weights, so that no width describes it.
    """
    return [
        LawCell(
            float(cell.parameters or 0),
            float(cell.tokens),
            weight_bits(recipe_of(folder, cell)),
            float(cell.loss or 0.0),
        )
        for folder in map(SweepFolder, paths)
        for cell in finished(folder)
    ]


def damages(paths: Sequence[Path]) -> list[Damage]:
    """The damages that `measure_damage` saved next to the cells."""
    return [
        Damage(float(cell.parameters or 0), float(cell.tokens), float(bits), damage)
        for folder in map(SweepFolder, paths)
        for cell in finished(folder)
        for bits, damage in _damage(folder, cell).items()
    ]


def _damage(folder: SweepFolder, cell: Outcome) -> dict[str, float]:
    """The measured damage of a cell, by width."""
    file = folder.run((cell.point, cell.recipe, cell.seed)) / "rounded.json"
    return read_json(file)["damage"] if file.is_file() else {}


def weight_bits(recipe: Recipe) -> float | None:
    """The bits of the weights in the forward; None if they are not rounded, or have 16 bits.

    Raises:
        RunError: the recipe rounds activations or gradients as well.
    """
    rounds = [rule.linear for rule in recipe.rules if rule.linear.rounds]
    if not rounds:
        return None
    if len(rounds) > 1 or rounds[0].output.lhs is not None or rounds[0].output.rhs is None:
        raise RunError(
            f"recipe {recipe.name!r} rounds more than its weights; a fit takes recipes that round nothing, or weights "
            "alone: weights-int4"
        )
    return float(rounds[0].output.rhs.format.bits)


def recipe_of(folder: SweepFolder, cell: Outcome) -> Recipe:
    """The recipe that a cell was trained under."""
    recorded = folder.point(cell.point).recipes().get(cell.recipe)
    return from_data(recorded, get_recipe) if recorded else get_recipe(cell.recipe)


# ---- the loss after weights are rounded ------------------------------------------------------------------------------


def measure_damage(path: Path, bits: Sequence[int], watch: Callable[[Cell], None] = lambda cell: None) -> int:
    """Round the weights of every finished model to each width, save rounded.json next to its run, and return the count.

    All weights but the head's are rounded to the integers of `weights-intN`, to nearest, without calibration data. The
    damage is the validation loss afterwards minus that of the same model in float32. Widths measured before are
    skipped.

    Raises:
        RunError: the folder is not a sweep.
        CheckpointError: a checkpoint is missing or damaged.
    """
    folder = SweepFolder(path)
    cells, every = Cells(path, folder.sweep()), finished(folder)
    for found in every:
        cell = found.point, found.recipe, found.seed
        known = _damage(folder, found)
        if missing := [width for width in bits if str(width) not in known]:
            losses = dict(_rounded(cells.comparison(found.point), found, missing))
            write_json(folder.run(cell) / "rounded.json", {"damage": {**known, **losses}})
        watch(cell)
    return len(every)


def _rounded(comparison: Comparison, found: Outcome, bits: Sequence[int]) -> Iterator[tuple[str, float]]:
    trainer = comparison.trainer(found.recipe, found.seed)
    whole = _loss(comparison, trainer.trained())
    for width in bits:
        model = trainer.trained()
        quantize_model(model, integer_weights(width))
        yield str(width), _loss(comparison, model) - whole


@torch.no_grad()
def _loss(comparison: Comparison, model: torch.nn.Module) -> float:
    model.eval()
    losses = [float(comparison.task.loss(model, batch)) for batch in comparison.task.held_out()]
    return sum(losses) / len(losses)
