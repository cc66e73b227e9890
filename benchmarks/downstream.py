"""Whether models trained in FP8 lose accuracy that their loss does not show: a small probe set, docs/stability.md.

    python benchmarks/downstream.py RATES [--keep]

RATES is the sweep of `stability.py`; its models trained at a learning rate of 0.003 are evaluated.
Each is loaded from its last checkpoint and evaluated in fp32. --keep writes results/downstream.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.lab.environment import environment
from halfstep.lab.interval import paired, paired_power
from halfstep.lab.sweep.folder import SweepFolder
from halfstep.lab.sweep.run import Cells
from halfstep.lab.tasks.lm import LanguageModelling
from harness import RESULTS


KEPT = RESULTS / "downstream.json"
QUESTIONS, CONTEXT, ANSWER = 384, 48, 16
RATE, RECIPES = 3e-3, ("fp32", "bf16-mixed", "fp8-current", "fp8-delayed", "mxfp8")
EFFECT = 0.01
"""The drop in accuracy for whose detection the power is computed: one percentage point."""


def windows(task: LanguageModelling, places: Tensor) -> Tensor:
    """The 64 bytes of held-out text from each position: (places, 64)."""
    return task.corpus.windows("held_out", places, CONTEXT + ANSWER).long()


def places(task: LanguageModelling, count: int) -> Tensor:
    """`count` positions, evenly spaced over the held-out text."""
    return torch.arange(count, dtype=torch.int64, device="cpu") * (len(task.corpus.held_out) - 65) // count


def likelihoods(model: nn.Module, tokens: Tensor) -> Tensor:
    """The log-likelihood of each row's last 16 bytes given the bytes before them."""
    scores = F.log_softmax(model(tokens[:, :-1]), -1).gather(-1, tokens[:, 1:, None])[..., 0]
    return scores[:, -ANSWER:].sum(-1)


def next_byte(model: nn.Module, task: LanguageModelling) -> float:
    """The share of bytes that the model predicts as the most likely ones."""
    tokens = windows(task, places(task, QUESTIONS))
    return float((model(tokens[:, :-1]).argmax(-1) == tokens[:, 1:]).float().mean())


def continuation(model: nn.Module, task: LanguageModelling) -> float:
    """The share of windows whose own last 16 bytes are more likely than those of three other windows."""
    tokens = windows(task, places(task, QUESTIONS))
    scores = []
    for shift in range(4):
        other = tokens.clone()
        other[:, -ANSWER:] = tokens.roll(97 * shift, 0)[:, -ANSWER:]
        scores.append(likelihoods(model, other))
    return float((torch.stack(scores).argmax(0) == 0).float().mean())


def order(model: nn.Module, task: LanguageModelling) -> float:
    """The share of windows whose last 16 bytes are more likely than the same bytes with their halves swapped."""
    tokens = windows(task, places(task, QUESTIONS))
    other = tokens.clone()
    other[:, -ANSWER:] = tokens[:, -ANSWER:].roll(ANSWER // 2, -1)
    return float((likelihoods(model, tokens) > likelihoods(model, other)).float().mean())


TASKS: dict[str, Callable[[nn.Module, LanguageModelling], float]] = {
    "next byte": next_byte,
    "continuation": continuation,
    "order": order,
}
CHANCE = {"next byte": 1 / 256, "continuation": 0.25, "order": 0.5}


@torch.no_grad()
def measured(path: Path) -> dict[str, Any]:
    """Each recipe's accuracy on each task, and its difference to fp32's with the same seeds."""
    sweep = SweepFolder(path).sweep()
    cells, table = Cells(path, sweep), dict[str, dict[str, list[float]]]()
    for point, recipe, seed in sweep.cells():
        if sweep.points()[point].lr != RATE or recipe not in RECIPES:
            continue
        comparison = cells.comparison(point)
        model = comparison.trainer(recipe, seed).trained().eval()
        assert isinstance(comparison.task, LanguageModelling)
        for name, task in TASKS.items():
            table.setdefault(name, {}).setdefault(recipe, []).append(task(model, comparison.task))
    return {
        "tasks": {
            name: {recipe: compared(found, by["fp32"]) for recipe, found in by.items()} for name, by in table.items()
        }
    }


def compared(found: list[float], base: list[float]) -> dict[str, Any]:
    """The accuracies and their mean, and the paired differences to the baseline's with their interval and the power to
    detect one percentage point."""
    differences = [mine - other for mine, other in zip(found, base, strict=True)]
    row: dict[str, Any] = {"accuracies": found, "mean": statistics.fmean(found)}
    if not any(differences):
        return row
    ends, power = paired(differences), paired_power(statistics.stdev(differences), len(differences), EFFECT)
    return {**row, "gap": statistics.fmean(differences), **asdict(ends), "power": power}


def page(found: dict[str, Any]) -> str:
    """The table of docs/stability.md."""
    tasks = found["tasks"]
    lines = [f"| recipe | {' | '.join(f'{name} (chance {CHANCE[name]:.0%})' for name in tasks)} |"]
    lines.append("| --- " * (len(tasks) + 1) + "|")
    for recipe in next(iter(tasks.values())):
        cells = []
        for by in tasks.values():
            row = by[recipe]
            gap = f", {row['gap']:+.1%} ({row['low']:+.1%} to {row['high']:+.1%})" if "gap" in row else ""
            cells.append(f"{row['mean']:.1%}{gap}")
        lines.append(f"| `{recipe}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark as the module describes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="the sweep's folder")
    parser.add_argument("--keep", action="store_true", help=f"write {KEPT.name}")
    given = parser.parse_args()
    found = json.loads(json.dumps(measured(given.sweep)))
    print(page(found))
    if given.keep:
        KEPT.write_text(json.dumps({**found, "environment": environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
