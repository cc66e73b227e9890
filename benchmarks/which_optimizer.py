"""Every recipe on one small Llama: bytes per parameter, loss against fp32's, step time. docs/which_optimizer.md.

    python benchmarks/which_optimizer.py [--keep] [--out FOLDER] [--recipes A,B] [--times]
    python benchmarks/which_optimizer.py --page

--keep adds the results of the recipes named to results/which_optimizer.json. An interrupted run
resumes. --times measures step times, for which the machine should be idle.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import halfstep
from halfstep.lab.environment import environment
from halfstep.lab.experiment import Experiment
from halfstep.lab.models import build_model
from halfstep.lab.task import VOCABULARY
from halfstep.lab.tasks import experiment_for, get_task
from halfstep.lab.verdict import difference
from halfstep.memory import measure
from halfstep.recipe import BytesPerParameter, Recipe, get_recipe, list_recipes
from harness import RESULTS, keep, ratio, timings
from losses import train
from which_optimizer_page import page, plot


DOCS = RESULTS.parent.parent / "docs"
STEPS, SEEDS, ROUNDS = 200, 3, 9


def experiment() -> Experiment:
    """The experiment: few steps, since every recipe is trained with every seed."""
    return experiment_for(
        "lm",
        recipes=("fp32",),
        model="llama-tiny",
        steps=STEPS,
        seeds=SEEDS,
        validations=1,
        statistics=1,
        checkpoints=1,
    )


def recipe_of(name: str) -> Recipe:
    """The recipe of that name; GaLore with a scale of 1, since the learning rate is that of the other recipes."""
    recipe = get_recipe(name)
    return recipe if recipe.projection is None else replace(recipe, projection=replace(recipe.projection, scale=1.0))


def bytes_of(name: str) -> BytesPerParameter:
    """Bytes per parameter by role, for a large weight; for GaLore, where they depend on the shape, measured on this
    model."""
    recipe = get_recipe(name)
    if recipe.projection is None:
        return recipe.bytes_per_parameter()
    training = Training(name)
    training.backward()
    return measure(training.model, training.optimizer)


def rows(losses: dict[str, list[float | None]]) -> dict[str, dict[str, Any]]:
    """By recipe: bytes per parameter by role, losses, and the difference to fp32."""
    finals = {name: {n: v for n, v in enumerate(values) if v is not None} for name, values in losses.items()}
    found = {}
    for name, values in losses.items():
        size, gap = bytes_of(name), difference(finals[name], finals["fp32"], same=name == "fp32")
        lost = len(values) - len(finals[name])
        found[name] = {
            "losses": values,
            "bytes": {"weights": size.weights, "grads": size.grads, "master": size.master, "states": size.states},
            "status": "diverged" if lost else gap.status,
            "gap": gap.gap,
            "interval": None if gap.interval is None else asdict(gap.interval),
            "seeds_to_decide": gap.seeds_to_decide,
        }
    return found


class Training:
    """The model under a recipe, and its training step."""

    def __init__(self, name: str) -> None:
        settings = experiment()
        task = get_task(settings.task).open(settings)
        model = build_model(settings.model, task.models(), seed=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.model, self.optimizer, self.scaler = halfstep.prepare(model, optimizer, recipe_of(name))
        self.tokens = torch.randint(0, VOCABULARY, (settings.batch, settings.context))

    def backward(self) -> None:
        logits = self.model(self.tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens.flatten())
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self.backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def times(names: list[str]) -> dict[str, float]:
    """By recipe: the time of a step relative to fp32's in the same round, the median over rounds."""
    seconds = timings({name: Training(name).step for name in names}, ROUNDS)
    return {name: ratio(seconds, name, "fp32") for name in names}


def main() -> None:
    """Train the recipes named, or all; write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument(
        "--page", action="store_true", help="write the page and the picture from the kept results alone"
    )
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--recipes", type=lambda text: text.split(","))
    parser.add_argument("--out", type=Path, default=Path("runs/which_optimizer"))
    arguments = parser.parse_args()
    file = RESULTS / "which_optimizer.json"
    data: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"rows": {}, "times": {}}
    if not arguments.page:
        names = ["fp32", *(name for name in arguments.recipes or list_recipes() if name != "fp32")]
        if arguments.times:
            data["times"] |= times(names)
        else:
            settings = experiment()
            data["rows"] |= rows(train(settings, {name: recipe_of(name) for name in names}, arguments.out))
            data |= {"machine": environment(), "experiment": settings.to_dict()}
        if arguments.keep:
            keep("which_optimizer", data)
    if arguments.page or arguments.keep:
        (DOCS / "which_optimizer.md").write_text(page(data))
        plot(data, DOCS / "images" / "which_optimizer.png")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
