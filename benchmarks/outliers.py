"""Whether outliers of a gated MLP break FP8 with delayed scales, and whether Smooth-SwiGLU prevents it: a search.

    python benchmarks/outliers.py [--keep] [--steps N] [--seeds N]

A gated MLP is trained to reproduce another one, whose two input weights are equal in every channel, as after
alignment: its gated product is quadratic in the tokens. Token sizes are log-normal, so that outliers are in the data.
Only the operands of the down-projection are rounded, so that only the gated product's outliers matter.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import halfstep
from halfstep.lab.environment import environment
from halfstep.lab.models.llama import MLP
from halfstep.recipe import Recipe, get_recipe
from harness import keep


TAILS, DECAYS = (0.0, 0.5, 1.0), (0.0, 0.1)
WIDTH, INNER, TEACHER, TOKENS, RATE = 16, 64, 8, 64, 3e-3
SMOOTH = get_recipe("fp8-smooth-swiglu")
DOWN = replace(SMOOTH, rules=tuple(replace(rule, path="down_proj") for rule in SMOOTH.rules if rule.path == "*"))
RECIPES: dict[str, Recipe] = {
    "bf16": get_recipe("bf16-mixed"),
    "without": replace(DOWN, smooth_glu=None),
    "smooth": DOWN,
}


class Teacher:
    """Random tokens and their targets: sum_i o_i silu(v_i x) (v_i x), with v_i of unit length."""

    def __init__(self, tail: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = F.normalize(torch.randn(WIDTH, TEACHER, generator=generator), dim=0)
        self.outputs = torch.randn(TEACHER, WIDTH, generator=generator) / TEACHER**0.5
        self.tail, self.generator = tail, generator

    def batch(self, tokens: int) -> tuple[Tensor, Tensor]:
        """x (tokens, width), normal times exp(tail * a standard normal per token), and its targets y of the same
        shape."""
        size = torch.exp(self.tail * torch.randn(tokens, 1, generator=self.generator))
        x = torch.randn(tokens, WIDTH, generator=self.generator) * size
        seen = x @ self.inputs
        return x, (F.silu(seen) * seen) @ self.outputs


def run(recipe: Recipe, tail: float, decay: float, seed: int, steps: int) -> dict[str, float]:
    """Train, and return the loss on unseen tokens, the gated product's largest ratio of amax to RMS, and its largest
    ratio of amax to the amax of the step before, in the second half of the steps."""
    teacher = Teacher(tail, seed)
    torch.manual_seed(seed)
    mlp = MLP(WIDTH, INNER)
    stock = torch.optim.AdamW(mlp.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=decay)
    model, optimizer, scaler = halfstep.prepare(mlp, stock, recipe, generator=seed)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    products: list[tuple[float, float]] = []

    def record(_: Any, args: tuple[Tensor, ...]) -> None:
        product = args[0].detach().float()
        products.append((float(product.abs().max()), float(product.square().mean().sqrt())))

    handle = mlp.down_proj.register_forward_pre_hook(record)
    for _ in range(steps):
        x, y = teacher.batch(TOKENS)
        scaler.scale(F.smooth_l1_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
    handle.remove()
    with torch.no_grad():
        losses = [float(F.smooth_l1_loss(model(x), y)) for x, y in (teacher.batch(TOKENS) for _ in range(64))]
    amaxes = [amax for amax, _ in products[steps // 2 :]]
    return {
        "loss": statistics.fmean(losses),
        "outlier": max(amax / rms for amax, rms in products),
        "jump": max(after / before for before, after in itertools.pairwise(amaxes)),
    }


def search(seeds: int, steps: int) -> list[dict[str, Any]]:
    """For every tail and decay: each recipe's runs, and the ratios of its loss to bf16's with the same seed: mean,
    least, most."""
    rows = []
    for tail, decay in itertools.product(TAILS, DECAYS):
        runs = {name: [run(r, tail, decay, seed, steps) for seed in range(seeds)] for name, r in RECIPES.items()}
        row: dict[str, Any] = {"tail": tail, "decay": decay, "runs": runs}
        for name in ("without", "smooth"):
            ratios = [one["loss"] / exact["loss"] for one, exact in zip(runs[name], runs["bf16"], strict=True)]
            row[name] = {"ratio": statistics.fmean(ratios), "least": min(ratios), "most": max(ratios)}
        row["outlier"], row["jump"] = (max(one[key] for one in runs["bf16"]) for key in ("outlier", "jump"))
        print({key: value for key, value in row.items() if key != "runs"}, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    """Search, print, and with --keep write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    rows = search(arguments.seeds, arguments.steps)
    if arguments.keep:
        keep("outliers", {"machine": environment(), "steps": arguments.steps, "seeds": arguments.seeds, "rows": rows})


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
