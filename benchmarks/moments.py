"""The error of rounding Adam's moments from training: COAT's table 1. --keep writes results/moments.json.

    python benchmarks/moments.py [--keep]

The error is the mean over all weights of the squared difference of m / (sqrt(v) + eps), eps = 1e-8, after rounding m
and v in groups of 128; `zeros` is the share of second moments that are rounded to zero.
"""

from __future__ import annotations

import statistics

import torch
from torch import Tensor

from halfstep import formats
from halfstep.lab.environment import environment
from halfstep.lab.models import build_model
from halfstep.lab.tasks import experiment_for, get_task
from halfstep.quant import Quantizer, Scales, Tile
from halfstep.quant.scaling import get_scaling
from harness import keep, keeps


MODELS, SEEDS, STEPS, EPS = ("gpt-tiny", "llama-tiny"), 3, (30, 100, 300), 1e-8
PLAIN, KERNEL, PAPER = "absmax", "expansion_sixteenths", "expansion"
PAIRS = {
    "E4M3, E4M3": (("e4m3fn", PLAIN), ("e4m3fn", PLAIN)),
    "E4M3, E5M2": (("e4m3fn", PLAIN), ("e5m2", PLAIN)),
    "E5M2, E5M2": (("e5m2", PLAIN), ("e5m2", PLAIN)),
    "E4M3, E4M3, both expanded": (("e4m3fn", KERNEL), ("e4m3fn", KERNEL)),
    "E4M3, E5M2, both expanded": (("e4m3fn", KERNEL), ("e5m2", KERNEL)),
    "E4M3, E4M3, the first expanded": (("e4m3fn", KERNEL), ("e4m3fn", PLAIN)),
    "E4M3, E4M3, the second expanded": (("e4m3fn", PLAIN), ("e4m3fn", KERNEL)),
    "E4M3, E4M3, both expanded as the paper has it": (("e4m3fn", PAPER), ("e4m3fn", PAPER)),
}
"""By name: (format, scale rule) of the first and of the second moment."""


def trained(model_name: str, seed: int) -> dict[int, tuple[Tensor, Tensor]]:
    """By step, the first and second moments of all matrices of a model trained in float32, each flattened into one
    tensor."""
    experiment = experiment_for("lm", recipes=("fp32",), model=model_name)
    task = get_task("lm").open(experiment)
    model = build_model(experiment.model, task.models(), seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=experiment.lr, betas=experiment.betas, weight_decay=experiment.weight_decay
    )
    found = {}
    for step in range(1, max(STEPS) + 1):
        task.loss(model, task.batch(seed, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in STEPS:
            states = [optimizer.state[p] for p in model.parameters() if p.dim() == 2]
            m, v = (torch.cat([state[name].flatten() for state in states]) for name in ("exp_avg", "exp_avg_sq"))
            found[step] = m, v
    return found


def errors(m: Tensor, v: Tensor) -> dict[str, dict[str, float]]:
    """By pair: the mean squared error of m / (sqrt(v) + eps), and the share of v that is rounded to zero."""
    exact, found = m / (v.sqrt() + EPS), {}
    for name, pair in PAIRS.items():
        first, second = (_rounded(x, *kind) for x, kind in zip((m, v), pair, strict=True))
        error = (first / (second.sqrt() + EPS) - exact).double().square().mean()
        found[name] = {"error": float(error), "zeros": float(((second == 0) & (v != 0)).double().mean())}
    return found


def _rounded(x: Tensor, format: str, rule: str) -> Tensor:
    scales = Scales(Tile(1, 128), get_scaling(rule))
    return Quantizer(formats.get(format), scales=scales)(x.view(1, -1)).view(-1)


def main() -> None:
    """Train, round, print, and with --keep write."""
    kept = keeps(__doc__)
    runs = {
        f"{model}, seed {seed}, step {step}": errors(*moments)
        for model in MODELS
        for seed in range(SEEDS)
        for step, moments in trained(model, seed).items()
    }
    plain = {run: found["E4M3, E4M3"]["error"] for run, found in runs.items()}
    table = {}
    for name in PAIRS:
        ratios = [found[name]["error"] / plain[run] for run, found in runs.items()]
        table[name] = {
            "median error": statistics.median(found[name]["error"] for found in runs.values()),
            "to plain E4M3": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
            "zeros": statistics.median(found[name]["zeros"] for found in runs.values()),
        }
        print(f"{name:48}", "  ".join(f"{key} {value:.4g}" for key, value in table[name].items()))
    if kept:
        keep("moments", {"machine": environment(), "table": table, "runs": runs})


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
