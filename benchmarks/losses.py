"""Final losses of recipes with the same initial weights and batches for each seed, and their paired gaps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

from torch import nn

from halfstep.lab.experiment import Experiment, read_metrics
from halfstep.lab.interval import paired
from halfstep.lab.models import build_model
from halfstep.lab.tasks import get_task
from halfstep.lab.train import Trainer
from halfstep.lab.verdict import final
from halfstep.recipe import Recipe


Losses = dict[str, list[float | None]]
"""By recipe, one final loss per seed; None for a run that diverged."""


def train(
    experiment: Experiment, recipes: Mapping[str, Recipe], out: Path, make: Callable[[], nn.Module] | None = None
) -> Losses:
    """Train every recipe with every seed, on the experiment's model or the one that `make` builds: the final validation
    losses.

    Runs that have ended in `out` are read, not repeated.
    """
    task = get_task(experiment.task).open(experiment)
    own = {} if make is None else {experiment.model: make}
    build = partial(build_model, experiment.model, {**task.models(), **own})
    losses: Losses = {name: [] for name in recipes}
    for seed in range(experiment.seeds):
        for name, recipe in recipes.items():
            folder = out / name / f"seed-{seed}"
            Trainer(experiment, recipe, seed, task, build, folder).run()
            losses[name].append(final(read_metrics(folder / "metrics.jsonl")))
            print(f"{out.name} {name} seed {seed}: {losses[name][-1]}", flush=True)
    return losses


def gaps(losses: Losses, recipe: str, baseline: str) -> list[float] | None:
    """(loss - baseline's loss) / baseline's loss, one per seed; None if a run of the recipe diverged.

    Raises:
        ValueError: a run of the baseline diverged.
    """
    found = []
    for seed, (loss, base) in enumerate(zip(losses[recipe], losses[baseline], strict=True)):
        if base is None:
            raise ValueError(f"{baseline} diverged with seed {seed}; nothing can be compared with it")
        found.append(None if loss is None else (loss - base) / base)
    finished = [gap for gap in found if gap is not None]
    return finished if len(finished) == len(found) else None


def summary(losses: Losses, baseline: str = "fp32") -> dict[str, dict[str, float | int | None]]:
    """By recipe: the mean loss, the mean, ends and 95% interval of the paired gaps over seeds, and how many runs
    diverged."""
    found: dict[str, dict[str, float | int | None]] = {}
    for recipe, values in losses.items():
        pairs = gaps(losses, recipe, baseline)
        finished = [value for value in values if value is not None]
        found[recipe] = {
            "loss": statistics.fmean(finished) if finished else None,
            "gap": statistics.fmean(pairs) if pairs else None,
            "least": min(pairs) if pairs else None,
            "most": max(pairs) if pairs else None,
            "diverged": len(values) - len(finished),
        }
        if pairs and len(pairs) > 1:
            found[recipe] |= asdict(paired(pairs))
    return found
