"""Train one model under several recipes, and compare each with fp32.

Runs, also those of a sweep, are trained in separate processes: a small model gains little from a second thread.

A run's results depend on (experiment, recipe, seed) and on the number of threads, not on what else is running.
"""

from __future__ import annotations

import json
import pickle
import shutil
import signal
import traceback
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError

from halfstep.errors import HalfstepError, ModelError, RecipeError, RunError
from halfstep.lab.environment import environment
from halfstep.lab.experiment import TIMINGS, Experiment, MetricsFile, RunFolder, read_json, read_metrics
from halfstep.lab.models import build_model
from halfstep.lab.optimizer import build_optimizer
from halfstep.lab.task import Task
from halfstep.lab.tasks import get_task
from halfstep.lab.train import Trainer, Watcher
from halfstep.nn.layers import match, projections
from halfstep.nn.schedule import Schedule
from halfstep.optim import check_optimizer
from halfstep.recipe import Recipe, from_data, get_recipe, is_chain, is_reference, list_recipes, to_data


# ---- runs in processes -----------------------------------------------------------------------------------------------

R = TypeVar("R", bound=tuple[Hashable, ...])
Lost = Callable[[R, str], None]
"""Called with a run whose process ended unexpectedly in each of `ATTEMPTS`, and with the reason."""
ATTEMPTS = 3


def train_side_by_side(
    train: Callable[..., None],
    runs: Sequence[R],
    jobs: int,
    watch: Callable[[Any], None],
    lost: Lost[R] | None = None,
) -> None:
    """Call `train(*run, watch)` for every run in order, `jobs` at a time, each with as many threads as torch has here;
    with one job in this process.

    An exception of a run is raised here and ends the others; they resume from their last checkpoints.

    Args:
        train: picklable, because it is sent to other processes; what it passes to `watch` must be picklable too.
        lost: if given, a run whose process ends unexpectedly is tried again, and finally passed to it.

    Raises:
        RunError: a process ended unexpectedly and there is no `lost`, or something cannot be pickled.
    """
    if jobs == 1:
        for run in runs:
            train(*run, watch)
        return
    context, left, tried = get_context("spawn"), deque(runs), Counter[R]()
    workers: dict[Connection, tuple[SpawnProcess, R]] = {}

    def begin() -> None:
        connection, process = _start_worker(context, train)
        workers[connection] = process, left[0]
        connection.send(left.popleft())

    try:
        for _ in range(min(jobs, len(runs))):
            begin()
        while workers:
            for connection in wait(list(workers)):
                assert isinstance(connection, Connection)
                process, run = workers[connection]
                said = _received(connection, process)
                if isinstance(said, _ProcessEnd):
                    if lost is None:
                        raise RunError(f"{said}: resume with --resume and fewer --jobs")
                    workers.pop(connection)
                    tried[run] += 1
                    if tried[run] < ATTEMPTS:
                        left.appendleft(run)
                    else:
                        lost(run, f"{said} {ATTEMPTS} times")
                    if left:
                        begin()
                elif isinstance(said, Exception):
                    raise said
                elif said is not None:
                    watch(said)
                elif left:
                    workers[connection] = process, left[0]
                    connection.send(left.popleft())
                else:
                    connection.close()
                    workers.pop(connection)[0].join()
    finally:
        for process, _ in workers.values():
            process.terminate()
            process.join()


class _ProcessEnd(str):
    """The reason, in words, why a process ended unexpectedly."""


def _start_worker(context: SpawnContext, train: Callable[..., None]) -> tuple[Connection, SpawnProcess]:
    """A process that waits for runs, and the parent's end of its pipe."""
    ours, theirs = context.Pipe()
    process = context.Process(target=_train_received, args=(theirs, train, torch.get_num_threads()), daemon=True)
    try:
        process.start()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RunError(f"this cannot be trained in a process of its own ({error}); leave --jobs out") from error
    theirs.close()
    return ours, process


def _received(connection: Connection, process: SpawnProcess) -> Any:
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        return _ProcessEnd(
            f"a process that trained ended by itself, with exit code {process.exitcode} (-9: killed, as where memory "
            "ran out). What was trained is kept"
        )


def _train_received(connection: Connection, train: Callable[..., None], threads: int) -> None:
    """Train the runs received over the connection, until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent ends this process
    torch.set_num_threads(threads)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is done, or gone
        while True:
            run = connection.recv()
            try:
                train(*run, connection.send)
                connection.send(None)
            except (EOFError, BrokenPipeError, ConnectionResetError):
                raise
            except Exception as error:
                if not isinstance(error, HalfstepError):
                    error.add_note(traceback.format_exc())
                connection.send(error)


# ---- checks before training ------------------------------------------------------------------------------------------

_BASELINE = "fp32"


def open_experiment(
    experiment: Experiment,
    path: Path,
    resume: bool,
    recipes: dict[str, Recipe] | None = None,
    task: Task | None = None,
) -> Comparison:
    """Open an experiment, after checking everything that can be checked before training: recipes, data, model, folder.

    Args:
        recipes: your own recipes by name; other names are looked up by `halfstep.get_recipe`.
        task: the experiment's task, if it is open already.

    Raises:
        RecipeError, DataError, ModelError, OptimizerError, RunError: see their docstrings. Nothing has been written.
    """
    known = _resolve(experiment, recipes or {}, RunFolder(path) if resume else None)
    experiment = experiment.named(dict(zip(experiment.recipes, known, strict=True)))
    recorded = RunFolder.resume(path, experiment) if resume else None
    spec = get_task(experiment.task)
    task = task or spec.open(experiment)
    if experiment.sharpness and type(task).logits is Task.logits:
        raise RunError(
            f"sharpness = {experiment.sharpness:g} with task {experiment.task!r}, whose loss is not a cross-entropy of "
            "the model's logits; leave it out, or take lm"
        )
    model = build_model(experiment.model, task.models(), seed=0)
    optimizer = build_optimizer(experiment, model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for recipe in known.values():  # a recipe that does not fit raises before anything is written
        for stage in recipe.by_stage:
            match(model, stage, None)
        if recipe.stages:
            Schedule(recipe).check(experiment.steps)
        check_optimizer(optimizer, names, projections(model, recipe))
    if ":" in experiment.model:
        _try_model(model, task, experiment.model)
    digest = task.digest()
    if recorded is not None:
        recorded.extend(experiment, digest)
    written = {name: _as_data(recipe) for name, recipe in known.items()}
    folder = recorded or RunFolder.create(path, experiment, digest, environment(), spec.facts, written)
    return Comparison(experiment, known, task, folder, digest)


def _try_model(model: torch.nn.Module, task: Task, name: str) -> None:
    """Run a user's model on the first batch, forward and backward, and on the held-out batches.

    Raises:
        ModelError: it fails.
    """
    where = "on the first batch"
    try:
        task.loss(model, task.batch(0, 1)).backward()  # type: ignore[no-untyped-call]
        where = "in eval mode, on the held-out batches,"
        model.eval()
        with torch.no_grad():
            task.metric(model, [float(task.loss(model, batch)) for batch in task.held_out()])
    except HalfstepError:
        raise
    except Exception as error:
        raise ModelError(
            f"{name}: {where} it raised {type(error).__name__}: {error}. Expected a model that takes and "
            f"returns what the task's own do: {', '.join(task.models())}"
        ) from error


def _user_line(error: BaseException) -> str:
    """The last line of the user's code in an exception's traceback, as file:line."""
    libraries = (Path(torch.__file__).parent, Path(__file__).parents[1])
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not any(Path(f.filename).is_relative_to(folder) for folder in libraries)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else f"{frames[-1].filename}:{frames[-1].lineno}"


def _resolve(experiment: Experiment, own: dict[str, Recipe], folder: RunFolder | None) -> dict[str, Recipe]:
    """The experiment's recipes by name; in a resumed run, those saved in its folder."""
    known: dict[str, Recipe] = {}
    recorded = folder.recipes() if folder else {}
    for asked in experiment.recipes:
        name, recipe = asked, own.get(asked)
        if recipe is None and recorded.get(asked):
            try:
                recipe = from_data(recorded[asked], get_recipe)
            except RecipeError as error:
                raise RunError(f"{folder and folder.experiment_file}: recipe {asked!r} was edited: {error}") from error
        elif recipe is None and asked in recorded and asked not in list_recipes():
            raise RunError(f"recipe {asked!r} is code, which a run folder does not hold; give it again with --recipes")
        elif recipe is None:
            recipe = get_recipe(asked)
            name = recipe.name if is_reference(asked) or is_chain(asked) else asked
            if recorded.get(name) and _as_data(recipe) != recorded[name]:
                raise RunError(f"{asked} has changed since this run began; put it back, or give another --out")
        if name in known:
            raise RunError(f"two recipes are called {name!r}, one of them from {asked}; rename one")
        known[name] = recipe
    return known


def _as_data(recipe: Recipe) -> dict[str, Any] | None:
    try:
        return json.loads(json.dumps(to_data(recipe)))  # type: ignore[no-any-return]
    except RecipeError:
        return None


# ---- the comparison --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """An experiment in its folder. `run` trains what has not been trained yet."""

    experiment: Experiment
    recipes: dict[str, Recipe]
    task: Task
    folder: RunFolder
    _digest: str

    def run(self, watch: Watcher = lambda progress: None, jobs: int = 1) -> None:
        """Train every unfinished (recipe, seed), in order; a killed one resumes from its last checkpoint.

        Args:
            jobs: how many at a time; more than one are trained in separate processes.

        Raises:
            ModelError: a user's model raised; finished runs are kept.
            RunError: as `train_side_by_side`.
        """
        if _BASELINE not in self.recipes:
            for seed in self.experiment.baselines():
                self._take_baseline(self.folder.run(_BASELINE, seed), seed)
        train_side_by_side(self.train, self.experiment.runs(), jobs, watch)

    def train(self, recipe: str, seed: int, watch: Watcher = lambda progress: None) -> None:
        """Train one recipe with one seed, like `run`."""
        path = self.folder.run(recipe, seed)
        if recipe == _BASELINE and seed > 0:  # seed 0 is always trained in this run, for its timings
            self._take_baseline(path, seed)
        try:
            self.trainer(recipe, seed, watch).run()
        except (HalfstepError, OSError, SafetensorError):
            raise
        except Exception as error:
            if ":" not in self.experiment.model:
                raise
            raise ModelError(
                f"{self.experiment.model}: under {recipe}, seed {seed}, it raised {type(error).__name__}: {error} "
                f"({_user_line(error)}). Fix it, then resume with --out {self.folder.path} --resume"
            ) from error
        if recipe == _BASELINE and not self._cached(seed).is_file():
            self._cached(seed).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path / "metrics.jsonl", self._cached(seed))

    def trainer(self, recipe: str, seed: int, watch: Watcher = lambda progress: None) -> Trainer:
        """The Trainer of one recipe with one seed."""
        alone, path = self.experiment.alone(recipe), self.folder.run(recipe, seed)
        build = partial(build_model, alone.model, self.task.models())
        return Trainer(alone, self.recipes[recipe], seed, self.task, build, path, watch)

    def _cached(self, seed: int) -> Path:
        """The path of the cached fp32 baseline of this experiment, data and machine, next to the run folders."""
        where = read_json(self.folder.environment_file)
        machine = [where[name] for name in ("torch", "cpu", "gpu", "threads")]
        key = self.experiment.alone(_BASELINE).key(self._digest, machine)
        return self.folder.path.parent / ".baselines" / key / f"seed-{seed}.jsonl"

    def _take_baseline(self, path: Path, seed: int) -> None:
        """Copy an fp32 run of an earlier identical experiment, instead of training it again."""
        if self._cached(seed).is_file() and not path.exists():
            copy = MetricsFile(path / "metrics.jsonl", keep_to=-1)
            for row in read_metrics(self._cached(seed)):
                copy.write({**row, **dict.fromkeys(TIMINGS & row.keys())})
            copy.close()
