"""Train one model under several recipes, side by side, and judge each against fp32."""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import nn

from halfstep.lab.environment import environment
from halfstep.lab.experiment import Experiment
from halfstep.lab.folder import RunFolder, read_json
from halfstep.lab.metrics import TIMINGS, MetricsFile, read_metrics
from halfstep.lab.models import build_model
from halfstep.lab.task import Task
from halfstep.lab.tasks import get_task
from halfstep.lab.train import Trainer, Watcher
from halfstep.lab.verdict import MIN_BASELINES
from halfstep.recipe import Recipe, get_recipe


_BASELINE = "fp32"


def open_experiment(
    experiment: Experiment, path: Path, resume: bool, recipes: dict[str, Recipe] | None = None
) -> Comparison:
    """Check everything that can be checked before training: recipes, data, model, folder.

    Args:
        recipes: recipes of the caller's own, by name; other names are those of `halfstep.list_recipes()`.

    Raises:
        RecipeError, DataError, ModelError, RunError: as their docstrings say. Nothing was written.
    """
    known = {name: (recipes or {}).get(name) or get_recipe(name) for name in experiment.recipes}
    recorded = RunFolder.resume(path, experiment) if resume else None
    spec = get_task(experiment.task)
    task = spec.open(experiment)
    build_model(experiment.model, task.models(), seed=0)
    digest = task.digest()
    if recorded is not None:
        recorded.check_data(digest)
    folder = recorded or RunFolder.create(path, experiment, digest, environment(), spec.facts)
    return Comparison(experiment, known, task, folder, digest)


class Comparison:
    """An experiment in its folder. `run` trains what is not trained yet."""

    def __init__(
        self,
        experiment: Experiment,
        recipes: dict[str, Recipe],
        task: Task,
        folder: RunFolder,
        digest: str,
    ) -> None:
        self.experiment = experiment
        self.recipes = recipes
        self.task = task
        self.folder = folder
        self._digest = digest

    def run(self, watch: Watcher = lambda progress: None) -> None:
        """Train every (recipe, seed) that has not ended, in order; a killed one goes on from its last checkpoint."""
        seeds = range(max(MIN_BASELINES, self.experiment.baseline_seeds))
        if _BASELINE not in self.recipes:
            for seed in seeds:
                self._take_baseline(self.folder.run(_BASELINE, seed), seed)
        for recipe, seed in self.experiment.runs():
            path = self.folder.run(recipe, seed)
            if recipe == _BASELINE and seed > 0:  # the first is trained here and now, for its timings
                self._take_baseline(path, seed)
            Trainer(self.experiment, self.recipes[recipe], seed, self.task, self._build, path, watch).run()
            if recipe == _BASELINE:
                self._keep_baseline(path, seed)

    def _build(self, seed: int) -> nn.Module:
        return build_model(self.experiment.model, self.task.models(), seed)

    def _cached(self, seed: int) -> Path:
        """Where the fp32 baseline of this experiment, data and machine is kept, beside the run folders."""
        where = read_json(self.folder.environment_file)
        key = self.experiment.key(self._digest, [where[name] for name in ("torch", "cpu", "gpu", "threads")])
        return self.folder.path.parent / ".baselines" / key / f"seed-{seed}.jsonl"

    def _take_baseline(self, path: Path, seed: int) -> None:
        """Use an fp32 run that an earlier experiment made with the same everything, instead of making it again."""
        if self._cached(seed).is_file() and not path.exists():
            copy = MetricsFile(path / "metrics.jsonl", keep_to=-1)
            for row in read_metrics(self._cached(seed)):
                copy.write({**row, **dict.fromkeys(TIMINGS & row.keys())})
            copy.close()

    def _keep_baseline(self, path: Path, seed: int) -> None:
        rows = path / "metrics.jsonl"
        if not self._cached(seed).is_file():
            self._cached(seed).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(rows, self._cached(seed))
