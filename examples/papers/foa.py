"""Test-time adaptation by forward passes alone (FOA, Niu et al. 2024, arXiv 2404.01650), of a transformer in int8.

A small vision transformer is trained on scikit-learn's digits, and then reads batches of corrupted digits. FOA changes
no weight: CMA-ES searches for prompts, tokens after the class token, under which the batch's features have the training
images' statistics and its predictions have low entropy; and the last feature is shifted to the training images' mean.
It needs no backward pass, so the model may be quantized. It is compared with TENT, which lowers the entropy by
gradients of the layer norms' parameters, in fp32; with no adaptation; and with the shift alone. Needs cma (`pip install
'halfstep[papers]'`).
"""

from __future__ import annotations

import tracemalloc
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import cma
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from corruptions import CORRUPTIONS, corrupted, images
from study import Kept, compared, options, table, text
from torch import Tensor, nn
from vit import Transformer

import halfstep
from halfstep.memory import Live, stored_bytes
from halfstep.quant import get_quantizer
from halfstep.recipe import LinearSpec, Matmul, Recipe, Rule, get_recipe


BATCH = 64
PROMPTS, STEP, ALPHA, LAMBDA = 3, 1.0, 0.1, 4.0  # LAMBDA was chosen on seed 100, which is not among those reported
RATES = (1e-3, 1e-2, 3e-2)
FP32, INT8, SHIFT, FOA = "none, fp32", "none, int8", "shift alone, int8", "FOA, int8"
DRAWN, BARE, BEST = "drawn prompts, int8", "entropy alone, int8", "TENT, each stream's best rate, fp32"
TENTS = [f"TENT {rate:g}, fp32" for rate in RATES]


def int8() -> Recipe:
    """A recipe with both operands of linear layers in int8: weights with a scale per row, inputs one per tensor."""
    weights, inputs = get_quantizer("int8_row"), get_quantizer("int8_tensor")
    *kept, _ = (base := get_recipe("int8-weight-only")).rules
    rules = (*kept, Rule("*", LinearSpec(output=Matmul(lhs=inputs, rhs=weights))))
    return replace(base, name="int8-both", summary="Weights and inputs of linear layers in int8.", rules=rules)


@cache
def trained(seed: int, steps: int) -> tuple[Transformer, nn.Module, Tensor]:
    """The network in fp32, the quantized network, and 512 training images without labels."""
    torch.manual_seed(seed)
    model, generator = Transformer(), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    x, y = images(True, BATCH * steps, generator)
    for some, labels in zip(x.split(BATCH), y.split(BATCH), strict=True):
        F.cross_entropy(model(some)[0][0], labels).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    small = deepcopy(model)
    halfstep.quantize_model(small, int8())
    return model.eval().requires_grad_(False), small, x[-512:]


def entropy(logits: Tensor) -> Tensor:
    """The entropy of predictions, summed over the batch."""
    return -(logits.softmax(1) * logits.log_softmax(1)).sum()


class Tent:
    """Lowers the entropy of each batch's predictions by one step on the layer norms' parameters."""

    def __init__(self, model: nn.Module, rate: float = RATES[0]) -> None:
        self.model = deepcopy(model)
        parameters = [p.requires_grad_() for name, p in self.model.named_parameters() if "norm" in name]
        self.optimizer = torch.optim.SGD(parameters, rate, momentum=0.9)

    @torch.enable_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """The logits before the step."""
        logits = self.model(x)[0][0]
        (entropy(logits) / len(x)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return logits.detach()


@dataclass
class Foa:
    """Searches for prompts, one generation of CMA-ES per batch, and shifts the last feature to the training mean."""

    model: nn.Module
    source: Tensor
    """Training images."""
    seed: int
    prompts: bool = True
    """Whether prompts are used; otherwise the last feature is only shifted."""
    weight: float = LAMBDA
    """The weight of the statistics relative to the entropy."""
    learns: bool = True
    """Whether CMA-ES gets the scores; otherwise prompts of every batch have the first batch's distribution."""

    @torch.no_grad()
    def __post_init__(self) -> None:
        features = self.model(self.source)[1]
        self.mean, self.std = features.mean(0), features.std(0)
        self.seen, self.best, self.search, self.losses = None, None, None, []
        if self.prompts:
            self.best = torch.zeros(PROMPTS, features.shape[-1])
            quiet = {"seed": self.seed + 1, "verbose": -9}
            self.search = cma.CMAEvolutionStrategy([0.0] * self.best.numel(), STEP, quiet)

    def score(self, x: Tensor, prompts: Tensor | None) -> tuple[float, Tensor, Tensor]:
        """The loss (entropy, and distance of the statistics), the logits, and the class token's mean."""
        shift = 0.0 if self.seen is None else self.mean[-1] - self.seen
        logits, features = self.model(x, prompts, shift)
        distance = (features.mean(0) - self.mean).square().sum() + (features.std(0) - self.std).square().sum()
        loss = entropy(logits[0]) + self.weight * len(x) / 64 * distance
        return float(loss), logits[1], features[:, -1].mean(0)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Logits under the best prompts of this batch's generation, which includes the last batch's best."""
        found: list[Any] = [self.best]
        if self.search is not None:
            found += [torch.tensor(each, dtype=torch.float32).view_as(self.best) for each in self.search.ask()]
        scores = [self.score(x, prompts) for prompts in found]
        self.losses = [loss for loss, _, _ in scores]
        best = min(range(len(found)), key=self.losses.__getitem__)
        if self.search is not None and self.learns:
            self.best = found[best]
            self.search.tell([each.double().flatten().numpy() for each in found], self.losses)
        mean = torch.stack([mean for _, _, mean in scores]).mean(0)
        self.seen = mean if self.seen is None else ALPHA * mean + (1 - ALPHA) * self.seen
        return scores[best][1]


def study(kind: str, amount: float, seed: int, steps: int, batches: int, ablated: bool) -> dict[str, Any]:
    """One run: the accuracy of every method on one kind of corruption."""
    model, small, source = trained(seed, steps)
    generator = torch.Generator().manual_seed(1000 + seed)
    x, y = images(False, BATCH * batches, generator)
    x = corrupted(x, kind, amount, generator)
    foa = partial(Foa, small, source, seed)
    methods: dict[str, Any] = {FP32: lambda x: model(x)[0][0], INT8: lambda x: small(x)[0][0]}
    methods |= {name: Tent(model, rate) for name, rate in zip(TENTS, RATES, strict=True)}
    methods |= {SHIFT: foa(prompts=False), FOA: foa()}
    if ablated:
        methods |= {DRAWN: foa(learns=False), BARE: foa(weight=0.0)}
    found = {name: torch.cat([method(some) for some in x.split(BATCH)]) for name, method in methods.items()}
    return {name: round(float((logits.argmax(1) == y).float().mean()), 4) for name, logits in found.items()}


@torch.no_grad()
def sizes(width: int, depth: int, side: int) -> dict[str, Any]:
    """Bytes of a network, torch's peak while it reads a batch, and CMA-ES's peak."""
    model, x = Transformer(width, depth, side).requires_grad_(False), torch.rand(BATCH, side, side)
    small = deepcopy(model)
    halfstep.quantize_model(small, int8())
    tent, foa = Tent(model), Foa(small, x, 0)
    ways = {FP32: (model, model), "TENT, fp32": (tent.model, tent), INT8: (small, small)}
    found = {}
    for name, (network, read) in (ways | {FOA: (small, lambda x: foa.score(x, foa.best))}).items():
        with Live() as live:
            live.give("model", [*network.parameters(), *network.buffers()])
            read(x)
        found[name] = {"model": stored_bytes(network), "peak": live.peak.total(), "search": 0}
    tracemalloc.start()
    search = cma.CMAEvolutionStrategy([0.0] * PROMPTS * width, STEP, {"seed": 1, "verbose": -9})
    asked = search.ask()
    search.tell(asked, range(len(asked)))
    found[FOA]["search"] = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found


def main() -> None:
    """Train, adapt, print and save."""
    given = options(__doc__ or "", "runs/foa.json")
    torch.set_num_threads(1)
    steps, batches, large = (20, 1, (32, 2, 12)) if given.quick else (700, 24, (192, 12, 32))
    kinds = {"blur": CORRUPTIONS["blur"]} if given.quick else CORRUPTIONS
    kept = Kept(given.out, steps=steps, batches=batches, corruptions=kinds, step=STEP, weight=LAMBDA, rates=RATES)
    streams = [("clean", 0, False)] + [(k, a, a == many[-1]) for k, many in kinds.items() for a in many]
    runs: dict[str, list[dict[str, float]]] = {f"{kind} {amount}": [] for kind, amount, _ in streams}
    for seed in range(given.seeds):
        for (name, made), (kind, amount, ablated) in zip(runs.items(), streams, strict=True):
            made.append(kept.run(f"{name}, seed {seed}", partial(study, kind, amount, seed, steps, batches, ablated)))
    held = {f"{size}": kept.run(f"bytes {size}", partial(sizes, *size)) for size in ((48, 2, 12), large)}
    methods = list(runs["clean 0"][0])
    print(f"\naccuracy on {batches} batches of {BATCH}, mean of {given.seeds} seeds:")
    table(("", *methods), [(k, *(f"{fmean(r[m] for r in made):.3f}" for m in methods)) for k, made in runs.items()])
    means = conclusions(runs, given.seeds)
    print("\nmean of the corrupted streams, and of each corruption's harder one (95% interval):")
    table(("method", "accuracy"), [(name, text(values)) for name, values in means.items()])
    pairs = [(FOA, INT8), (FOA, SHIFT), (SHIFT, INT8), (FOA, BEST), (INT8, FP32), *((tent, FP32) for tent in TENTS)]
    pairs += [(f"{FOA}, harder", f"{other}, harder") for other in (INT8, SHIFT, DRAWN, BARE)]
    named = {f"{one} - {other}": (means[one], means[other]) for one, other in pairs}
    gains = compared("differences of accuracy", named, "worse", "better")
    for size, ways in held.items():
        print(f"\nbytes, of (width, depth, side) {size}:")
        table(("", "model", "peak", "search"), [(name, *map(str, each.values())) for name, each in ways.items()])
    kept.write(means={name: fmean(values) for name, values in means.items()}, gains=gains)
    picture(runs, given.out.with_suffix(".png"))


def conclusions(runs: dict[str, list[dict[str, float]]], seeds: int) -> dict[str, list[float]]:
    """By method, a value per seed: the mean accuracy over all corruptions, and over those with ablations."""
    streams = list(runs.values())[1:]
    hard = [made for made in streams if DRAWN in made[0]]
    chosen = [max(TENTS, key=lambda tent: fmean(run[tent] for run in made)) for made in streams]
    found = {name: [fmean(made[s][name] for made in streams) for s in range(seeds)] for name in runs["clean 0"][0]}
    found[BEST] = [fmean(made[s][tent] for made, tent in zip(streams, chosen, strict=True)) for s in range(seeds)]
    return found | {f"{m}, harder": [fmean(made[s][m] for made in hard) for s in range(seeds)] for m in hard[0][0]}


def picture(runs: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Accuracies by corruption, every seed."""
    figure, axes = plt.subplots(figsize=(8, 3.8), layout="constrained")
    for place, (name, mark) in enumerate(zip((FP32, TENTS[0], INT8, SHIFT, FOA), "xv+.o", strict=True)):
        points = [(i + (place - 2) / 8, run[name]) for i, made in enumerate(runs.values()) for run in made]
        axes.plot(*zip(*points, strict=True), mark, label=name, markersize=5)
    axes.set(ylabel="accuracy", title="Corrupted digits, every seed", xticks=range(len(runs)))
    axes.set_xticklabels([name.replace(" ", "\n") for name in runs])
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
