"""Certified training by interval bounds with a short warm-up (Shi et al. 2021, arXiv 2103.17268), in 32 and 16 bits.

A network that computes a lower and an upper bound of every activation over a box of inputs is certified where the
bounds of its margins are positive. This script trains small networks on scikit-learn's 8x8 digits with and without the
paper's three fixes (initial weights that do not widen bounds, batch norm after every layer, two regularizers during the
warm-up), under fp32, bf16-mixed and fp16-mixed. It also tests whether bounds that are *computed* in 16 bits remain
valid: they do if lower ones are rounded down and upper ones up.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from certified import DEPTH, Certified
from sklearn.datasets import load_digits
from study import Kept, difference, options, said, table, text, update
from torch import Tensor, nn

import halfstep


EPSILON, LAMBDA = 0.04, 0.5
RECIPES = ("fp32", "bf16-mixed", "fp16-mixed")


def digits() -> tuple[Tensor, Tensor]:
    """1,797 images in [0, 1], shuffled with a fixed seed: the first 1,400 are for training."""
    found = load_digits()
    order = torch.randperm(len(found.data), generator=torch.Generator().manual_seed(0))
    return torch.tensor(found.data / 16, dtype=torch.float32)[order], torch.tensor(found.target)[order]


def trained(recipe: str, fixes: bool, seed: int, epochs: int, width: int) -> Certified:
    """The trained network, reverted to stock float32; the warm-up takes the first fifteenth of the steps."""
    torch.manual_seed(seed)
    model: Any = Certified(fixes, width)
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=5e-4)
    model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe)
    (x, y), step = digits(), 0
    warm = max(1, epochs * 22 // 15)
    for _ in range(epochs):
        for rows in torch.randperm(1400).split(64):
            share = min(1.0, max(0.0, (step - 0.1 * warm) / (0.9 * warm)))
            logits, margins, penalty = model(x[rows], y[rows], EPSILON * share)
            loss = F.cross_entropy(-margins if share else logits, y[rows])
            if fixes and 0 < share < 1:
                loss = loss + LAMBDA * (1 - share) * penalty
            update(scaler, optimizer, loss, 10.0)
            step += 1
    halfstep.revert(model)
    return model.eval()


def errors(model: Certified) -> dict[str, float]:
    """Shares of the 397 held-out images that are misclassified, and that are not certified, in float64."""
    x, y = (part[1400:] for part in digits())
    with torch.no_grad():
        logits, margins, _ = model.double()(x.double(), y, EPSILON)
    margins[torch.arange(len(y)), y] = 1
    wrong = float((logits.argmax(1) != y).double().mean())
    return {"error": round(wrong, 4), "verified_error": round(float((margins.min(1).values <= 0).double().mean()), 4)}


def growth(fixes: bool, width: int = 1024) -> list[float]:
    """The ratios of bounds' widths before ReLU of successive layers, at initialization (uniform inputs, box 0.01)."""
    torch.manual_seed(0)
    centre = torch.rand(64, width)
    radius, widths = torch.full_like(centre, 0.01), []
    for _ in range(DEPTH + 1):
        layer = nn.Linear(width, width, bias=False)
        if fixes:
            nn.init.normal_(layer.weight, std=math.sqrt(2 * math.pi) / width)
        weight = layer.weight.detach()
        centre, radius = F.linear(centre, weight), F.linear(radius, weight.abs())
        widths.append(float(radius.mean()))
        low, high = (centre - radius).relu(), (centre + radius).relu()
        centre, radius = (low + high) / 2, (high - low) / 2
    return [round(wider / narrower, 3) for narrower, wider in pairwise(widths)]


def sound(model: Certified, format: str, outward: bool, samples: int) -> dict[str, float]:
    """Validity of bounds that are rounded to a format after every layer: `broken`, the share of bounds that are
    violated by one of `samples` points of the box; `false`, the images certified so and not in float64; and
    `verified_error`.

    The network has weights of that format, and its exact values are float64's.
    """
    down, up = ("down", "up") if outward else ("nearest_even", "nearest_even")
    x, y = (part[1400:] for part in digits())
    net = _folded(model, format)
    low, high = x.double() - EPSILON, x.double() + EPSILON
    signs = torch.randint(0, 2, (samples, *x.shape), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points = x.double() + EPSILON * (2 * signs - 1)
    exact, broken, bounds = (low, high), 0.0, 0
    low, high = halfstep.round_to(low, format, down), halfstep.round_to(high, format, up)
    for number, (weight, bias) in enumerate(net):
        if number == DEPTH:  # margins: the last layer's rows subtracted from the label's
            weight, bias = weight[y][:, None] - weight, bias[y][:, None] - bias
        low, high = _interval(weight, bias, low, high)
        low, high = halfstep.round_to(low, format, down), halfstep.round_to(high, format, up)
        exact = _interval(weight, bias, *exact)
        if number == DEPTH:
            break
        points = points @ weight.T + bias
        broken += float(((points.amin(0) < low) | (points.amax(0) > high)).sum())
        bounds += low.numel()
        low, high, points, exact = low.relu(), high.relu(), points.relu(), tuple(map(torch.relu, exact))
    own = torch.arange(len(y))
    low[own, y] = exact[0][own, y] = 1
    certified, truly = low.amin(1) > 0, exact[0].amin(1) > 0
    return {
        "broken": broken / bounds,
        "false": int((certified & ~truly).sum()),
        "verified_error": round(1 - float(certified.double().mean()), 4),
        "verified_error_float64": round(1 - float(truly.double().mean()), 4),
    }


def _folded(model: Certified, format: str) -> list[tuple[Tensor, Tensor]]:
    """Weights and biases with norms folded in, rounded to the format."""
    found = []
    for i, layer in enumerate((*model.layers, model.last)):
        weight, bias = layer.weight.detach().double(), layer.bias.detach().double()
        if i < DEPTH and model.norms:
            norm: Any = model.norms[i].double()
            scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
            weight, bias = weight * scale[:, None], (bias - norm.running_mean) * scale + norm.bias
        found.append((halfstep.round_to(weight.detach(), format), halfstep.round_to(bias.detach(), format)))
    return found


def _interval(weight: Tensor, bias: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    positive, negative = weight.clamp(min=0), weight.clamp(max=0)
    to = "bjk,bk->bj" if weight.dim() == 3 else "jk,bk->bj"
    return (
        torch.einsum(to, positive, low) + torch.einsum(to, negative, high) + bias,
        torch.einsum(to, positive, high) + torch.einsum(to, negative, low) + bias,
    )


def study(recipe: str, fixes: bool, seed: int, epochs: int, width: int, samples: int) -> dict[str, Any]:
    """One run: the errors of a network and, if fp32 trained it, the validity of its bounds in 16 bits."""
    model = trained(recipe, fixes, seed, epochs, width)
    run: dict[str, Any] = errors(model)
    if fixes and recipe == "fp32":
        for format in ("bf16", "fp16"):
            run[f"{format} to nearest"] = sound(model, format, False, samples)
            run[f"{format} outward"] = sound(model, format, True, samples)
    return run


def main() -> None:
    """Train, measure, print and save."""
    given = options(__doc__ or "", "runs/ibp.json", seeds=8)
    torch.set_num_threads(1)
    epochs, width, samples = (1, 32, 4) if given.quick else (30, 128, 200)
    kept = Kept(given.out, epochs=epochs, width=width, samples=samples, epsilon=EPSILON, depth=DEPTH)
    found: dict[tuple[str, bool], list[dict[str, Any]]] = {(r, f): [] for r in RECIPES for f in (False, True)}
    for seed in range(given.seeds):
        for (recipe, fixes), runs in found.items():
            name = f"{recipe}, {'three fixes' if fixes else 'none'}, seed {seed}"
            runs.append(kept.run(name, partial(study, recipe, fixes, seed, epochs, width, samples)))
    growths = {name: growth(fixes) for name, fixes in (("torch's initial weights", False), ("the paper's", True))}
    for name, ratios in growths.items():
        print(f"growth of bounds from layer to layer, {name}: {ratios}")
    verified = {key: [run["verified_error"] for run in runs] for key, runs in found.items()}
    print(f"\ndigits, box of {EPSILON}, {given.seeds} seeds, mean (95% interval):")
    rows = [
        (recipe, "three" if fixes else "none", text([r["error"] for r in runs]), text(verified[recipe, fixes]))
        for (recipe, fixes), runs in found.items()
    ]
    table(("recipe", "fixes", "error", "verified error"), rows)
    gains = {r: difference(verified[r, True], verified[r, False]) for r in RECIPES}
    against = {r: difference(verified[r, True], verified["fp32", True]) for r in RECIPES[1:]}
    for name, differences in (("with the fixes and without", gains), ("with the fixes and fp32", against)):
        for recipe, each in differences.items():
            words = f"{each.low:+.3f} to {each.high:+.3f}: {said(each, 'better', 'worse')}"
            print(f"verified error of {recipe}, {name}: {words}")
    print("\nbounds computed in 16 bits, of networks that fp32 trained with the fixes (mean):")
    ways = [f"{format} {how}" for format in ("bf16", "fp16") for how in ("to nearest", "outward")]
    means = {
        way: {k: fmean(run[way][k] for run in found["fp32", True]) for k in found["fp32", True][0][way]} for way in ways
    }
    table(
        ("bounds", *means[ways[0]]),
        [(way, *(f"{value:.4g}" for value in each.values())) for way, each in means.items()],
    )
    kept.write(growth=growths, gains={k: asdict(v) for k, v in gains.items()}, bounds=means)
    picture(found, given.out.with_suffix(".png"))


def picture(found: dict[tuple[str, bool], list[dict[str, Any]]], path: Path) -> None:
    """Verified errors of every run, by recipe, with the fixes and without."""
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for fixes, mark, words in ((False, "x", "without"), (True, "o", "with the three fixes")):
        points = [
            (RECIPES.index(r), run["verified_error"]) for (r, f), runs in found.items() if f == fixes for run in runs
        ]
        axes.plot(*zip(*points, strict=True), mark, label=words)
    axes.set(xticks=range(len(RECIPES)), xticklabels=RECIPES, ylabel="verified error", ylim=(0, 1.05))
    axes.set_title("Certified training on 8x8 digits, every seed")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
