"""The training runs behind docs/which_bf16.md: recipes in the lab, and the two plain loops."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.lab.compare import Comparison, open_experiment
from halfstep.lab.experiment import Experiment, read_json, write_json
from halfstep.lab.models import build_model
from halfstep.lab.task import Batch, Task
from halfstep.lab.tasks import experiment_for, get_task
from halfstep.lab.train import Trainer
from halfstep.memory import measure
from halfstep.optim import Update
from halfstep.tracking import Arrival, arrival
from two_loops import LOOPS, loss_fn


RECIPES = (
    "fp32", "bf16-mixed", "bf16-truncate", "bf16-megatron", "bf16-master", "bf16-split", "bf16-kahan", "bf16-fp32grad",
    "bf16-collage-plus", "bf16-nomaster", "bf16-stochastic", "bf16-collage-light", "bf16-pure",
)  # fmt: skip
SEEDS = 3
TASKS = ("lm", "vision")
"""The tasks of the loops; recipes are trained on the first. vision has float inputs, which x.to(bfloat16) changes."""


def experiments(steps: int) -> dict[str, Experiment]:
    """The experiments by task: lm with all recipes, vision with fp32 only, for its band."""
    recipes: dict[str, tuple[str, ...]] = {"lm": RECIPES, "vision": ("fp32",)}
    return {t: experiment_for(t, recipes=recipes[t], steps=steps, seeds=SEEDS, validations=3) for t in TASKS}


def opened(experiment: Experiment, out: Path) -> Comparison:
    """The experiment in its folder, created or resumed."""
    folder = out / experiment.task
    return open_experiment(experiment, folder, resume=(folder / "experiment.json").is_file())


def train_all(steps: int, out: Path) -> None:
    """Train the runs that are missing, with one thread each and as many processes as there are processors."""
    chosen = experiments(steps)
    for experiment in chosen.values():
        opened(experiment, out)
    jobs: list[partial[None]] = []
    for task, experiment in chosen.items():
        jobs += [partial(recipe_run, experiment, out, recipe, seed) for recipe, seed in experiment.runs()]
        jobs += [partial(loop_run, experiment, out, loop, seed) for loop in LOOPS for seed in range(SEEDS)]
        print(f"{task}: {len(jobs)} runs so far", flush=True)
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), one_thread) as pool:
        for done, _ in enumerate(pool.map(_call, jobs), 1):
            print(f"{done} of {len(jobs)}", flush=True)


def one_thread() -> None:
    """Use one thread in this process, since as many runs as processors run at once."""
    torch.set_num_threads(1)


def _call(job: partial[None]) -> None:
    job()


def recipe_run(experiment: Experiment, out: Path, recipe: str, seed: int) -> None:
    """Train one run of the lab, unless it has ended."""
    comparison = opened(experiment, out)
    build = partial(build_model, experiment.model, comparison.task.models())
    folder = comparison.folder.run(recipe, seed)
    Trainer(experiment, comparison.recipes[recipe], seed, comparison.task, build, folder).run()


def loop_file(out: Path, task: str, loop: str, seed: int) -> Path:
    """The path of a plain loop's result."""
    return out / "loops" / f"{task} {loop} {seed}.json"


def loop_run(experiment: Experiment, out: Path, loop: str, seed: int) -> None:
    """Train one run of a plain loop, with the same initial weights, batches and schedule as the recipes' runs of that
    seed."""
    file = loop_file(out, experiment.task, loop, seed)
    if file.is_file():
        return
    task = get_task(experiment.task).open(experiment)
    model = build_model(experiment.model, task.models(), seed)
    model.train()
    found: dict[str, Any] = {"descent": []}
    torch.manual_seed(seed)
    for _ in LOOPS[loop](model, batches(task, experiment, seed), partial(set_up, experiment, found=found)):
        pass
    model.eval()
    found["loss"] = held_out(model, task, autocasts=loop != "model.to(bfloat16)")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, found)


def read_loop(out: Path, task: str, loop: str) -> dict[int, dict[str, Any]]:
    """The results of a loop's runs that have ended, by seed."""
    files = {seed: loop_file(out, task, loop, seed) for seed in range(SEEDS)}
    return {seed: read_json(file) for seed, file in files.items() if file.is_file()}


def batches(task: Task, experiment: Experiment, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(x, y) for every step."""
    return (pair(task.batch(seed, step)) for step in range(1, experiment.steps + 1))


def pair(batch: Batch) -> tuple[Tensor, Tensor]:
    """A batch as (x, y)."""
    x, y = batch.values()
    return x, y


@torch.no_grad()
def held_out(model: nn.Module, task: Task, autocasts: bool) -> float:
    """The validation loss, in the precision of training, with logits widened to float32."""
    dtype = next(model.parameters()).dtype
    losses = []
    for x, y in map(pair, task.held_out()):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocasts):
            logits = model(x.to(dtype) if x.is_floating_point() else x)
        losses.append(float(loss_fn(lambda _, given=logits: given.float(), x, y)))  # type: ignore[arg-type]
    return sum(losses) / len(losses)


def set_up(
    experiment: Experiment, model: nn.Module, found: dict[str, Any] | None = None
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """torch's AdamW with the experiment's parameter groups and schedule, watched if `found` is given."""
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=experiment.lr, betas=experiment.betas, weight_decay=experiment.weight_decay
    )
    if found is not None:
        Watch(experiment, model, optimizer, found)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: experiment.learning_rate(done + 1) / experiment.lr
    )
    return optimizer, schedule


class Watch:
    """Records the bytes per parameter, and the descent of the steps due for statistics, in `found`, without changing
    the run."""

    def __init__(
        self, experiment: Experiment, model: nn.Module, optimizer: torch.optim.AdamW, found: dict[str, Any]
    ) -> None:
        self.experiment, self.model, self.found, self.step = experiment, model, found, 0
        self.trained = list(model.parameters())
        optimizer.register_step_pre_hook(lambda *_: self.before(optimizer))
        optimizer.register_step_post_hook(lambda *_: self.after())

    def before(self, optimizer: torch.optim.AdamW) -> None:
        """Compute a float32 step on copies before the optimizer's step."""
        self.step += 1
        if self.step == 2:
            self.found["bytes"] = asdict(measure(self.model, optimizer))
        self.looking = self.experiment.due(self.step, self.experiment.statistics)
        if not self.looking:
            return
        self.old = [p.detach().float().clone() for p in self.trained]
        wide = {p: nn.Parameter(old.clone()) for p, old in zip(self.trained, self.old, strict=True)}
        exact = torch.optim.AdamW([{**g, "params": [wide[p] for p in g["params"]]} for g in optimizer.param_groups])
        for p, full in wide.items():
            assert p.grad is not None
            full.grad = p.grad.float()
            exact.state[full] = {k: v.float().clone() for k, v in optimizer.state[p].items()}
        exact.step()
        self.wanted = [wide[p].detach() - old for p, old in zip(self.trained, self.old, strict=True)]

    def after(self) -> None:
        """Compare the optimizer's update with the float32 one."""
        if not self.looking:
            return
        total = Arrival()
        for p, old, wanted in zip(self.trained, self.old, self.wanted, strict=True):
            total += arrival(Update(p, old, wanted, p.detach().float() - old))
        self.found["descent"].append({"step": self.step, "quality": total.quality, "lost_share": total.lost_share})
