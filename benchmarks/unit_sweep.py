"""Final losses over a grid of learning rates: fp32, 16 bits and FP8, with and without unit scaling.

    python benchmarks/unit_sweep.py [--cases gpt,bert] [--optimizers adamw] [--recipes fp32,...] [--seeds 3]
        [--octaves -1,0,1] [--out FOLDER] [--keep] [--plot]
    python benchmarks/unit_sweep.py --table

A run is (case, optimizer, recipe, learning rate, seed); one that has ended in --out is read, and an interrupted one
resumes. --keep adds the runs to results/unit_sweep.json. --plot draws
docs/images/unit_sweep_CASE.png from that file. With fewer than three seeds there are no verdicts.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from torch import nn

from halfstep import formats
from halfstep.lab.environment import environment
from halfstep.lab.experiment import Experiment
from halfstep.lab.interval import paired
from halfstep.lab.models.gpt import GPT
from halfstep.lab.task import VOCABULARY
from halfstep.lab.tasks import experiment_for
from halfstep.lab.tasks.mlm import BERT
from halfstep.lab.verdict import difference
from halfstep.quant import Quantizer
from halfstep.recipe import LossScale, Recipe, Rule, get_recipe, linear_spec
from halfstep.recipe.operands import KEEP
from harness import RESULTS
from losses import train
from unit_sweep_plot import picture


IMAGES = RESULTS.parent.parent / "docs" / "images"
KEPT = RESULTS / "unit_sweep.json"
ENOUGH = 3
"""The fewest seeds for a verdict."""
EXPONENTS = range(4, 25, 4)
"""Powers of two of the constant loss scales that are searched."""


def controls() -> dict[str, Recipe]:
    """Recipes that only this comparison needs.

    `fp8-plain`: inputs and weights in E4M3, gradients in E5M2, by plain casts; the rest in fp16, without a loss scale.
    `fp8-cscale` is not such a control: it has a loss scale of 512, keeps its weights in fp16, and uses the fnuz
    formats.

    `unit-fp32`: a unit-scaled model without rounding.

    `fp16-scale-N`: fp16 with a constant loss scale of 2^N, one point of the search that unit scaling makes unnecessary.
    """
    e4m3, e5m2 = Quantizer(formats.get("e4m3fn")), Quantizer(formats.get("e5m2"))
    source = "a control of Blake et al. 2023, arXiv 2303.11257"
    plain = Recipe(
        "fp8-plain",
        summary="fp16-mixed-unscaled whose linear layers round inputs and weights to E4M3, gradients to E5M2.",
        source=source,
        compute="fp16",
        rules=(*KEEP, Rule("*", linear_spec(input=e4m3, weight=e4m3, grad_output=e5m2))),
    )
    whole = Recipe("unit-fp32", summary="A unit-scaled model in fp32.", source=source, unit_scaled=True)
    scaled = (
        replace(get_recipe("fp16-static"), name=f"fp16-scale-{power}", loss_scale=LossScale(2.0**power, dynamic=False))
        for power in EXPONENTS
    )
    return {recipe.name: recipe for recipe in (plain, whole, *scaled)}


def recipe_of(name: str) -> Recipe:
    """The control of that name, or the named recipe."""
    own = controls()
    return own[name] if name in own else get_recipe(name)


@dataclass(frozen=True)
class Case:
    """A model on a task, and the learning rates in the middle of each grid."""

    task: str
    make: Callable[[], nn.Module] | None
    """Builds the model; None for the task's own model."""
    rates: Mapping[str, float]
    """Learning rates by optimizer."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the experiment."""


UNIT = {"adamw": 2**4, "adam": 2**4, "lion": 2**4, "lamb": 1, "sgd": 2**-3}
"""By optimizer, the factor of the grid's middle for unit-scaled models, whose weights are of size 1. LAMB's steps are
proportional to the weights already."""
RATES = {"adamw": 2**-9, "adam": 2**-9, "sgd": 2**-2, "lion": 2**-12, "lamb": 2**-7}
_LEAN = {"validations": 1, "statistics": 1, "checkpoints": 4, "clip": 1e9}
"""Nothing is clipped: each unit-scaled weight gradient is of size 1, and a clip to a norm of 1 would divide them by the
root of their number, which differs between steps."""

# Gradients shrink with batch x context, which a mean loss divides by: 16,384 and 8,192 tokens make those of queries and
# keys zero in fp16 at the start, so that attention learns late.
CASES = {
    "gpt": Case(
        "lm",
        lambda: GPT(VOCABULARY, 32, layers=2, width=32, heads=2),
        {**RATES, "adamw": 2**-7},
        {**_LEAN, "batch": 512, "context": 32, "steps": 120, "warmup": 30},
    ),
    "bert": Case(
        "mlm",
        lambda: BERT(VOCABULARY + 1, 32, layers=2, width=64, heads=2),
        {**RATES, "adamw": 2**-8},
        {**_LEAN, "batch": 256, "context": 32, "steps": 400, "warmup": 20},
    ),
    "vision": Case("vision", None, {**RATES, "adamw": 2**-8}, {**_LEAN, "steps": 100}),
}


@dataclass(frozen=True, order=True)
class Run:
    """One run and its final loss; None if it diverged."""

    case: str
    optimizer: str
    recipe: str
    lr: float
    seed: int
    loss: float | None = field(compare=False)

    @property
    def key(self) -> tuple[str, str, str, float, int]:
        """The fields that identify the run."""
        return self.case, self.optimizer, self.recipe, self.lr, self.seed


@dataclass(frozen=True)
class Best:
    """A recipe's results at its best learning rate."""

    lr: float
    losses: Mapping[int, float]
    """Losses by seed."""
    at_edge: bool
    """Whether the best rate is the smallest or the largest one tried, so that a better one may exist beyond."""
    runs: int
    diverged: int

    @property
    def mean(self) -> float:
        """The mean loss over seeds."""
        return statistics.fmean(self.losses.values())


def experiment(case: Case, optimizer: str, lr: float, seeds: int) -> Experiment:
    """The experiment of one point of the grid."""
    return experiment_for(
        case.task, recipes=("fp32",), optimizer=optimizer, lr=lr, seeds=seeds, baseline_seeds=seeds, **case.fields
    )


def runs(
    name: str, optimizer: str, recipes: Sequence[str], octaves: Sequence[int], seeds: int, out: Path
) -> Iterator[Run]:
    """The runs of a case under an optimizer; missing ones are trained."""
    case, known = CASES[name], {recipe: recipe_of(recipe) for recipe in recipes}
    for octave, scaled in product(octaves, (False, True)):
        some = {recipe: each for recipe, each in known.items() if each.unit_scaled == scaled}
        rate = case.rates[optimizer] * 2.0**octave * (UNIT[optimizer] if scaled else 1)
        point = experiment(case, optimizer, rate, seeds)
        losses = train(point, some, out / f"{name}-{optimizer}-{rate:.3g}-{point.key()[:8]}", case.make)
        for recipe, found in losses.items():
            yield from (Run(name, optimizer, recipe, rate, seed, loss) for seed, loss in enumerate(found))


def best(found: Iterable[Run]) -> Best | None:
    """A recipe's results at the rate with the least mean loss, among rates at which no seed diverged; None if a seed
    diverged at every rate."""
    by_rate: dict[float, dict[int, float | None]] = {}
    for run in found:
        by_rate.setdefault(run.lr, {})[run.seed] = run.loss
    most = max(map(len, by_rate.values()), default=0)
    whole = {
        rate: {seed: loss for seed, loss in losses.items() if loss is not None}
        for rate, losses in by_rate.items()
        if len(losses) == most and None not in losses.values()
    }
    if not whole:
        return None
    rate = min(whole, key=lambda each: statistics.fmean(whole[each].values()))
    every = [loss for losses in by_rate.values() for loss in losses.values()]
    return Best(rate, whole[rate], rate in (min(by_rate), max(by_rate)), len(every), every.count(None))


def verdict(found: Best | None, fp32: Best | None) -> str:
    """The recipe at its best rate compared with fp32 at its best, as `halfstep compare` judges; no verdict with fewer
    than three seeds."""
    if found is None:
        return "diverged at every rate"
    if fp32 is None or len(found.losses.keys() & fp32.losses.keys()) < ENOUGH:
        return "no verdict: fewer than three seeds"
    gap = difference(found.losses, fp32.losses, same=found.losses == fp32.losses)
    return f"{gap.status} ({gap.gap:+.2%})"


def grouped(found: Iterable[Run]) -> dict[tuple[str, str], dict[str, list[Run]]]:
    """The runs by case and optimizer, then by recipe, fp32 first."""
    groups: dict[tuple[str, str], dict[str, list[Run]]] = {}
    for run in sorted(found, key=lambda run: (run.case, run.optimizer, run.recipe != "fp32", run)):
        groups.setdefault((run.case, run.optimizer), {}).setdefault(run.recipe, []).append(run)
    return groups


def table(found: Iterable[Run]) -> str:
    """The table of recipes at their best learning rates, one row each."""
    lines = [
        "| case | optimizer | recipe | best rate | loss | verdict | runs |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (case, optimizer), recipes in grouped(found).items():
        at = {recipe: best(each) for recipe, each in recipes.items()}
        for recipe, each in at.items():
            words = "the baseline" if recipe == "fp32" else verdict(each, at.get("fp32"))
            if recipe.startswith("unit-") and recipe != (whole := "unit-fp32") and whole in at:
                words += f"; to {whole}: {verdict(each, at[whole])}"
            rate = "" if each is None else f"{each.lr:.3g}{', at the edge' if each.at_edge else ''}"
            loss = "" if each is None else f"{each.mean:.4f}"
            counted = len(recipes[recipe])
            lines.append(f"| {case} | {optimizer} | `{recipe}` | {rate} | {loss} | {words} | {counted} |")
    return "\n".join(lines) + "\n"


def summary(found: Iterable[Run]) -> dict[str, dict[str, float]]:
    """Every recipe at its best learning rate; with three seeds also its mean loss relative to fp32's and to
    unit-fp32's, each at its own best, with 95% intervals over paired seeds."""
    rows: dict[str, dict[str, float]] = {}
    for (case, optimizer), recipes in grouped(found).items():
        at = {recipe: each for recipe, runs in recipes.items() if (each := best(runs)) is not None}
        for recipe, each in at.items():
            row = rows[f"{case} {optimizer} {recipe}"] = {"lr": each.lr, "loss": each.mean}
            for base in ("fp32", "unit-fp32"):
                if base in at and len(each.losses.keys() & at[base].losses.keys()) >= ENOUGH:
                    row[f"to {base}"] = each.mean / at[base].mean - 1
                    shared = each.losses.keys() & at[base].losses.keys()
                    interval = paired([(each.losses[s] - at[base].losses[s]) / at[base].mean for s in sorted(shared)])
                    row |= {f"to {base}, low": interval.low, f"to {base}, high": interval.high}
    return rows


def kept() -> list[Run]:
    """The runs of results/unit_sweep.json."""
    return [Run(**run) for run in json.loads(KEPT.read_text())["runs"]] if KEPT.is_file() else []


def keep(found: Sequence[Run]) -> None:
    """Add the runs to results/unit_sweep.json."""
    every = {run.key: run for run in [*kept(), *found]}
    cases = {name: dict(case.fields) | {"task": case.task} for name, case in CASES.items()}
    data = {
        "machine": environment(),
        "cases": cases,
        "best": summary(every.values()),
        "runs": [vars(run) for _, run in sorted(every.items())],
    }
    KEPT.write_text(json.dumps(data, indent=2) + "\n")


def main() -> None:
    """Train, print, and write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="gpt,bert")
    parser.add_argument("--optimizers", default="adamw")
    parser.add_argument("--recipes", default="fp32,fp16-mixed-unscaled,fp8-plain,unit-fp32,unit-fp16,unit-fp8")
    parser.add_argument("--seeds", type=int, default=ENOUGH)
    parser.add_argument("--octaves", default="-1,0,1", help="the grid: powers of two around each case's rate")
    parser.add_argument("--out", type=Path, default=Path("runs/unit_sweep"))
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--table", action="store_true", help="print the table of what was kept; nothing is trained")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(kept()))
        return
    found: list[Run] = []
    octaves = [int(octave) for octave in arguments.octaves.split(",")]
    for case in arguments.cases.split(","):
        for optimizer in arguments.optimizers.split(","):
            found += runs(case, optimizer, arguments.recipes.split(","), octaves, arguments.seeds, arguments.out)
            if arguments.keep:
                keep(found)
    print(table(found))
    if arguments.plot:
        for case in arguments.cases.split(","):
            drawn = {optimizer: recipes for (each, optimizer), recipes in grouped(kept()).items() if each == case}
            picture(case, drawn).savefig(IMAGES / f"unit_sweep_{case}.png")


if __name__ == "__main__":
    main()
