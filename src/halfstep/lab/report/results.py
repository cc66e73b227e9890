"""What a run folder holds, read once and judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from halfstep.lab.experiment import Experiment
from halfstep.lab.facts import Facts
from halfstep.lab.folder import Row, RunFolder, read_json
from halfstep.lab.verdict import (
    DEGRADES,
    DIVERGED,
    MATCHES,
    UNDECIDED,
    Band,
    RecipeVerdict,
    band,
    final_values,
    judge,
    rule,
)


BASELINE = "fp32"


@dataclass(frozen=True)
class Results:
    """The rows of every run that has begun, and the verdict on every recipe, in the experiment's order."""

    folder: RunFolder
    experiment: Experiment
    facts: Facts
    environment: Mapping[str, Any]
    runs: Mapping[str, Mapping[int, Sequence[Row]]]
    band: Band | None
    verdicts: tuple[RecipeVerdict, ...]

    @property
    def name(self) -> str:
        """The experiment's name: its folder's."""
        return self.folder.path.resolve().name

    @property
    def baseline(self) -> RecipeVerdict | None:
        """The verdict on fp32, None where it takes no part."""
        return next((v for v in self.verdicts if v.recipe == BASELINE), None)

    @property
    def learning_rates(self) -> dict[str, float]:
        """The peak learning rate by recipe; empty where all have the same."""
        own, usual = self.experiment.recipe_lr, self.experiment.lr
        return {v.recipe: own.get(v.recipe, usual) for v in self.verdicts} if own else {}

    def with_status(self, status: str) -> list[str]:
        """The recipes with that verdict, fp32 left out."""
        return [v.recipe for v in self.verdicts if v.status == status and v.recipe != BASELINE]

    def first_seed(self, recipe: str) -> tuple[int, Sequence[Row]] | None:
        """The lowest seed of a recipe that has begun, and its rows."""
        seeds = self.runs.get(recipe, {})
        return min(seeds.items(), key=lambda item: item[0]) if seeds else None

    def slowdown(self, verdict: RecipeVerdict) -> float | None:
        """A recipe's time per step over fp32's."""
        base = self.baseline
        if verdict.ms_per_step is None or base is None or not base.ms_per_step:
            return None
        return verdict.ms_per_step / base.ms_per_step

    def headline(self) -> str:
        """What came out, in one or two sentences."""
        others = [v for v in self.verdicts if v.recipe != BASELINE]
        if self.baseline is None:
            return "fp32 took no part, so the recipes are shown as they are, without a verdict against it."
        parts = [f"{len(self.with_status(MATCHES))} of {len(others)} recipes match fp32"] if others else []
        parts += [
            f"{v.recipe} degrades by {v.paired_gap:.1%}"
            for v in others
            if v.status == DEGRADES and v.paired_gap is not None
        ]
        open_ones = self.with_status(UNDECIDED)
        parts += [f"these seeds cannot tell of {', '.join(open_ones)}"] if open_ones else []
        parts += [f"{v.recipe} diverged at step {v.diverged_at}" for v in self.verdicts if v.status == DIVERGED]
        return "; ".join(parts or ["only fp32 was trained"]) + "."

    def summary(self) -> dict[str, Any]:
        """The data of summary.json."""
        return {
            "experiment": self.name,
            **({"learning_rates": self.learning_rates} if self.learning_rates else {}),
            "rule": rule(self.facts.metric, self.experiment.margin),
            "margin": self.experiment.margin,
            "metric": asdict(self.facts.metric) if self.facts.metric else None,
            "band": asdict(self.band) if self.band else None,
            "verdicts": [verdict.to_dict() for verdict in self.verdicts],
        }


def load(folder: RunFolder) -> Results:
    """Read a run folder and judge its recipes; runs that have not begun are left out.

    Raises:
        RunError: a file is damaged or was edited.
    """
    experiment, facts = folder.experiment(), folder.facts()
    runs: dict[str, dict[int, list[Row]]] = {recipe: {} for recipe in experiment.recipes}
    planned = experiment.runs()
    if BASELINE not in runs:  # fp32's runs of an earlier experiment may have been copied in
        planned += [(BASELINE, seed) for seed in experiment.baselines()]
        if any(folder.metrics(*run) for run in planned if run[0] == BASELINE):
            runs = {BASELINE: {}, **runs}
    for recipe, seed in planned:
        rows = folder.metrics(recipe, seed)
        if rows:
            runs[recipe][seed] = rows
    fp32 = runs.get(BASELINE, {})
    return Results(
        folder=folder,
        experiment=experiment,
        facts=facts,
        environment=read_json(folder.environment_file) if folder.environment_file.is_file() else {},
        runs=runs,
        band=band(list(final_values(fp32, facts.metric).values())),
        verdicts=tuple(judge(recipe, seeds, fp32, facts.metric, experiment.margin) for recipe, seeds in runs.items()),
    )
