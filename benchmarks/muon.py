"""Muon with low-bit momentum compared with AdamW and torch.optim.Muon: loss, bytes, time. docs/which_optimizer.md.

    python benchmarks/muon.py [--keep] [--out FOLDER]

The demo's GPT with three seeds, all in float32 except the optimizers' states. Muon updates the matrices, AdamW the
embeddings and vectors, both at the same learning rates (`adjust_lr_fn="match_rms_adamw"`). Time is that of updates
alone, with constant gradients, relative to torch's two optimizers in the same round. --keep writes results/muon.json.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import halfstep
from halfstep.lab.environment import environment
from halfstep.lab.experiment import Experiment
from halfstep.lab.models import build_model
from halfstep.lab.optimizer import build_optimizer
from halfstep.lab.tasks import experiment_for, get_task
from halfstep.memory import measure
from halfstep.recipe import Recipe, get_recipe
from harness import keep, ratio, timings
from losses import summary, train


RATES, ROUNDS = (1e-3, 3e-3, 1e-2), 15
CONTENDERS = {
    "adamw": ("adamw", "fp32"),
    "muon": ("muon", "fp32"),
    "muon, 8 bits": ("muon", "adamw-8bit"),
}
"""By name: an optimizer, and the recipe whose storage its states have."""


def recipe_of(kept: str) -> Recipe:
    """fp32, with optimizer states stored as in the recipe `kept`."""
    return replace(get_recipe("fp32"), name=f"states-{kept}", moments=get_recipe(kept).moments)


def experiment_of(optimizer: str, lr: float) -> Experiment:
    """The demo's experiment with this optimizer and learning rate."""
    return experiment_for(
        "lm", recipes=("fp32",), optimizer=optimizer, lr=lr, validations=1, statistics=1, checkpoints=1
    )


class Updates:
    """The demo's GPT with constant gradients, and its optimizer."""

    def __init__(self, optimizer: str, kept: str) -> None:
        experiment = experiment_of(optimizer, 1e-3)
        task = get_task(experiment.task).open(experiment)
        model = build_model(experiment.model, task.models(), seed=0)
        made = build_optimizer(experiment, model)
        self.model, self.optimizer, self.scaler = halfstep.prepare(model, made, recipe_of(kept))
        task.loss(self.model, task.batch(0, 1)).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def states(self) -> float:
        """Bytes per parameter of the optimizer's states."""
        return float(measure(self.model, self.optimizer).states)


def torchs() -> Any:
    """A function that steps torch.optim.Muon for matrices and torch.optim.AdamW for the rest, on the same gradients."""
    own = Updates("muon", "fp32")
    matrices = own.optimizer.param_groups[0]["params"]
    others = [p for group in own.optimizer.param_groups[1:] for p in group["params"]]
    made = torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-3)

    def step(model: nn.Module = own.model) -> None:
        for optimizer in made:
            optimizer.step()  # type: ignore[no-untyped-call]

    return step


def table(data: dict[str, Any]) -> str:
    """The table of docs/which_optimizer.md."""
    rates = data["losses"]
    heads = ["optimizer, its states", "bytes/param of states", "update", *(f"loss at {lr}" for lr in rates)]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for name, row in data["rows"].items():
        losses = [f"{found['adamw'][name]['loss']:.4f}" for found in rates.values()]
        lines.append(f"| {name} | {row['states']:.2f} | {row['update']:.2f} | {' | '.join(losses)} |")
    gaps = [found["muon"]["muon, 8 bits"] for found in rates.values()]
    intervals = ", ".join(f"{own['low']:+.2%} to {own['high']:+.2%}" for own in gaps)
    lines += ["", f"8 bits against Muon in fp32, at these rates in turn: {intervals}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train, measure, and with --keep write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/muon"))
    arguments = parser.parse_args()
    made = {name: Updates(*how) for name, how in CONTENDERS.items()}
    runs = {"torch.optim.Muon and AdamW": torchs(), **{name: own.optimizer.step for name, own in made.items()}}
    seconds = timings(runs, ROUNDS, span=0.2)
    rows: dict[str, Any] = {
        name: {"states": own.states(), "update": ratio(seconds, name, "torch.optim.Muon and AdamW")}
        for name, own in made.items()
    }
    found = {}
    for lr in RATES:
        losses = {}
        for name, (optimizer, kept) in CONTENDERS.items():
            folder = arguments.out / f"{optimizer}-{lr:g}"
            losses[name] = train(experiment_of(optimizer, lr), {kept: recipe_of(kept)}, folder)[kept]
        found[f"{lr:g}"] = {name: summary(losses, name) for name in ("adamw", "muon")}
        print(lr, found[f"{lr:g}"], flush=True)
    data = {
        "machine": environment(),
        "experiment": experiment_of("muon", RATES[0]).to_dict(),
        "rows": rows,
        "losses": found,
    }
    print(rows)
    if arguments.keep:
        keep("muon", data)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
