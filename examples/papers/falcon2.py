"""Falcon2-11B's choices of training (Malartic et al. 2024, arXiv 2407.14885), in small Llamas on Python's own source.

Four questions. What is the effect of doubling the batch in the middle of training, and does it equal that of dividing
the learning rate by sqrt 2 (a temperature T = rate / sqrt(batch)) or by 2? Are loss spikes rarer at lower rates? What
is the effect of stages of growing context, and of a last stage of curated text, here the language's documentation,
compared with that text spread over the run? And what does it cost to compute the first stage in MXFP4, with a recipe
that changes with the stages?
"""

from __future__ import annotations

import copy
import math
import sysconfig
from bisect import bisect
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from next_byte import batch, held_out, windows
from study import Kept, compared, options, table, text
from torch import Tensor, nn

import halfstep
from halfstep.lab.models.llama import Llama
from halfstep.lab.task import VOCABULARY, Corpus, load_corpus


LONGEST, TOKENS, WARM_UP, WINDOW = 128, 512, 20, 50
SHARES = (0.7, 0.1, 0.1, 0.1)  # of the steps, by stage; the rate falls to its minimum in the first and stays there
RATE, FLOOR, Z_LOSS, SPIKING = 4e-3, 0.05, 1e-4, (1e-3, 4e-3, 1.6e-2, 6.4e-2)
BRANCHES = {"as before": (1, 1.0), "batch doubled": (2, 1.0), "rate / sqrt 2": (1, 2**-0.5), "rate / 2": (1, 0.5)}
"""The factors of batch and rate in the middle of training."""


class Plan(NamedTuple):
    """One run's stages: contexts; curated text in the last stage, spread over the run or never; and the recipe."""

    contexts: tuple[int, ...] = (32, 64, 128, 128)
    curated: str = "last"
    recipe: str = "fp32"


PLANS = {
    "stages": Plan(),
    "128 throughout": Plan(contexts=(128,) * 4),
    "32 throughout": Plan(contexts=(32,) * 4),
    "curated text spread": Plan(curated="spread"),
    "no curated text": Plan(curated="never"),
    "stages, bf16-mixed": Plan(recipe="bf16-mixed"),
    "stages, mxfp4": Plan(recipe="mxfp4"),
    "stages, mxfp4 then bf16-mixed": Plan(recipe="mxfp4 until 70%, then bf16-mixed"),
}
CONTROLS = {  # the pairs that are compared, and the held-out texts
    ("128 throughout", "stages"): ("general",),
    ("32 throughout", "stages"): ("general",),
    ("stages", "curated text spread"): ("curated", "general"),
    ("stages", "no curated text"): ("curated", "general"),
    ("stages, bf16-mixed", "stages"): ("general",),
    ("stages, mxfp4", "stages, bf16-mixed"): ("general",),
    ("stages, mxfp4 then bf16-mixed", "stages, bf16-mixed"): ("general",),
    ("stages, mxfp4 then bf16-mixed", "stages, mxfp4"): ("general",),
}
Runs = list[dict[str, Any]]


def warmed(step: int) -> float:
    """The share of the rate during warm-up."""
    return min(1.0, (step + 1) / WARM_UP)


def corpora() -> dict[str, Corpus]:
    """The general text, modules of Python's standard library, and the curated one, the language's documentation."""
    paths = {"general": "*.py", "curated": "pydoc_data/topics.py"}
    return {name: load_corpus(f"{sysconfig.get_paths()['stdlib']}/{path}", LONGEST) for name, path in paths.items()}


def llama(width: int, layers: int, seed: int) -> tuple[Any, Any, torch.Generator]:
    """A model, its optimizer, and the generator of its batches."""
    torch.manual_seed(seed)
    model = Llama(VOCABULARY, LONGEST, layers, width, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    return model, optimizer, torch.Generator().manual_seed(seed)


def losses(model: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The mean cross-entropy of the next byte, without and with the z-loss."""
    logits = model(rows[:, :-1]).flatten(0, 1)
    plain = F.cross_entropy(logits, rows[:, 1:].flatten())
    return plain, plain + Z_LOSS * logits.logsumexp(-1).square().mean()


def update(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor, rate: float, most: float) -> float:
    """One step at a given rate, with gradients clipped to a norm of at most `most`; returns the loss before it."""
    optimizer.param_groups[0]["lr"] = rate
    plain, whole = losses(model, rows)
    whole.backward()
    nn.utils.clip_grad_norm_(model.parameters(), most)
    optimizer.step()
    optimizer.zero_grad()
    return float(plain.detach())


def doubling(seed: int, width: int, before: int, after: int, corpus: Corpus, rows: int) -> dict[str, list[float]]:
    """Losses of every branch after each quarter of `after` steps; the unchanged branch continues to twice as many."""
    model, optimizer, generator = llama(width, 2, seed)
    for step in range(before):
        update(model, optimizer, batch(corpus, TOKENS // 64, 64, generator), RATE * warmed(step), 1.0)
    start, found, seen = (model, optimizer), {}, windows(corpus, rows, 64)
    for name, (more, factor) in BRANCHES.items():
        (model, optimizer), generator = copy.deepcopy(start), torch.Generator().manual_seed(seed + 1)
        found[name] = [round(held_out(model, seen), 4)]
        for step in range(2 * after if name == "as before" else after):
            update(model, optimizer, batch(corpus, more * TOKENS // 64, 64, generator), RATE * factor, 1.0)
            if (step + 1) % (after // 4) == 0:
                found[name].append(round(held_out(model, seen), 4))
    return found


def quadratic(rule: Any, steps: int = 600, **options: Any) -> dict[str, float]:
    """The mean excess loss x^2 / 2 of 5,000 numbers after a change; their gradient is x, with noise 1 / sqrt(batch)."""
    found, change = {}, steps // 3
    for name, (more, factor) in BRANCHES.items():
        x, noise = torch.zeros(5000, requires_grad=True), torch.Generator().manual_seed(0)
        optimizer, excess = rule([x], **options), []
        for step in range(steps):
            optimizer.param_groups[0]["lr"] *= factor if step == change else 1
            x.grad = x.detach() + torch.randn(5000, generator=noise) / math.sqrt(more if step >= change else 1)
            optimizer.step()
            excess.append(float(x.detach().square().mean()) / 2)
        found[name] = fmean(excess[2 * change :])
    return {name: round(each / found["as before"], 3) for name, each in found.items()}


def spikes(series: list[float]) -> dict[str, float]:
    """The number of values above mean + 3 standard deviations of the WINDOW before them, and the largest rise."""
    befores = [series[n - WINDOW : n] for n in range(WINDOW, len(series))]
    rises = [(value - fmean(before), stdev(before)) for value, before in zip(series[WINDOW:], befores, strict=True)]
    return {"count": sum(rise > 3 * spread for rise, spread in rises), "largest": round(max(rises)[0], 4)}


def spiking(seed: int, rate: float, layers: int, steps: int, corpus: Corpus) -> dict[str, Any]:
    """Spikes of a deep model's training loss, and of its loss on one fixed batch, without clipping."""
    model, optimizer, generator = llama(32, layers, seed)
    same, seen, fixed = batch(corpus, 8, 32, generator), [], []
    for step in range(steps):
        seen.append(update(model, optimizer, batch(corpus, 8, 32, generator), rate * warmed(step), math.inf))
        fixed.append(held_out(model, same))
    return {"training": spikes(seen), "one batch": spikes(fixed), "loss": round(fmean(fixed[-WINDOW:]), 4)}


def staged(seed: int, plan: Plan, width: int, steps: int, texts: dict[str, Corpus], rows: int) -> dict[str, Any]:
    """One run through the stages: losses at the longest context after each stage."""
    model, optimizer, generator = llama(width, 2, seed)
    model, optimizer, scaler = halfstep.prepare(model, optimizer, plan.recipe, total_steps=steps)
    ends = [round(steps * share) for share in accumulate(SHARES)]
    run: dict[str, Any] = {name: [] for name in texts}
    for step in range(steps):
        stage = bisect(ends, step)
        cosine = (1 + math.cos(math.pi * min(1, step / ends[0]))) / 2
        optimizer.param_groups[0]["lr"] = RATE * warmed(step) * (FLOOR + (1 - FLOOR) * cosine)
        special = {"last": stage == 3, "spread": step % 10 == 9, "never": False}[plan.curated]  # a tenth in both cases
        context = plan.contexts[stage]
        drawn = batch(texts["curated" if special else "general"], TOKENS // context, context, generator)
        scaler.scale(losses(model, drawn)[1]).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step + 1 in ends:
            for name, corpus in texts.items():
                run[name].append(round(held_out(model, windows(corpus, rows, LONGEST)), 4))
    return run


def main() -> None:
    """Train, measure, print and save."""
    given = options(__doc__ or "", "runs/falcon2.json")
    torch.set_num_threads(1)
    sizes = (8, 10, 2, 4, 1, WINDOW + 2, 2) if given.quick else (64, 250, 160, 80, 12, 200, 64)
    width, steps, before, after, layers, spiked, rows = sizes
    names = ("width", "steps", "before", "after", "layers", "spiked", "windows")
    kept, texts = Kept(given.out, **dict(zip(names, sizes, strict=True))), corpora()
    long, chosen = (30, SPIKING[:2]) if given.quick else (600, SPIKING)
    batches, plans, rates = list[Any](), {name: list[Any]() for name in PLANS}, {rate: list[Any]() for rate in chosen}
    for seed in range(given.seeds):
        for each in (2 * seed, 2 * seed + 1):  # twice as many, because they are short
            make: Any = partial(doubling, each, width, before, after, texts["general"], rows)
            batches.append(kept.run(f"batch, seed {each}", make))
        for name, plan in PLANS.items():
            make = partial(staged, seed, plan, width, steps, texts, rows)
            plans[name].append(kept.run(f"{name}, seed {seed}", make))
        for rate, runs in rates.items():
            make = partial(spiking, seed, rate, layers, spiked, texts["general"])
            runs.append(kept.run(f"rate {rate:g}, seed {seed}", make))
    adam = quadratic(torch.optim.Adam, long, lr=0.01, betas=(0.9, 0.95))
    excess = {"SGD": quadratic(torch.optim.SGD, long, lr=0.05), "Adam": adam}
    kept.write(quadratic=excess, **conclusions(batches, plans, rates, excess))
    picture(batches, plans, rates, given.out.with_suffix(".png"))


def conclusions(batches: Runs, plans: dict[str, Runs], rates: dict[float, Runs], excess: Any) -> dict[str, Any]:
    """Tables and intervals for all questions, which are also printed."""
    print(f"\na noisy quadratic's excess loss, of that without a change: {excess}\n\nheld-out loss (95% interval):")
    last = {(name, t): [run[t][-1] for run in runs] for name, runs in plans.items() for t in ("general", "curated")}
    rows = [(name, text(last[name, "general"], ".3f"), text(last[name, "curated"], ".3f")) for name in plans]
    table(("plan", "general", "curated"), rows)
    ends = {name: [run[name][4] for run in batches] for name in BRANCHES}
    ends["as before, as many bytes"] = [run["as before"][8] for run in batches]
    first, doubled, *others = ends
    pairs = {f"{name} against {first}": (ends[name], ends[first]) for name in (doubled, *others[:2])}
    pairs |= {f"{doubled} against {name}": (ends[doubled], ends[name]) for name in others}
    found = {"batch": compared(f"loss after a change in the middle, {len(batches)} seeds", pairs, "better", "worse")}
    pairs = {f"{a} against {b}, {t}": (last[a, t], last[b, t]) for (a, b), texts in CONTROLS.items() for t in texts}
    found["plans"] = compared("loss after the stages", pairs, "better", "worse")
    for kind in ("training", "one batch"):
        for what in ("count", "largest"):
            values = {rate: [run[kind][what] for run in runs] for rate, runs in rates.items()}
            print(f"\nspikes of the loss ({kind}), {what}:", {rate: text(each) for rate, each in values.items()})
            pairs = {f"rate {low:g} to {high:g}": (values[high], values[low]) for low, high in pairwise(rates)}
            found[f"spikes, {kind}, {what}"] = compared("change with the rate", pairs, "rarer", "more")
    return found


def picture(batches: Runs, plans: dict[str, Runs], rates: dict[float, Runs], path: Path) -> None:
    """The effect of changes in the middle, the loss at the longest context by stage, and spikes by rate."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for name in BRANCHES:
        means = [fmean(run[name][n] - run["as before"][n] for run in batches) for n in range(5)]
        left.plot([0, 25, 50, 75, 100], means, "o-", markersize=3, label=name)
    left.set(xlabel="% of the steps after it", ylabel="held-out loss less that without", title="A change in the middle")
    for name in PLANS:
        means = [fmean(run["general"][n] for run in plans[name]) for n in range(4)]
        middle.plot([1, 2, 3, 4], means, "o-", markersize=3, label=name)
    middle.set(xticks=[1, 2, 3, 4], xlabel="after stage", ylabel="held-out loss", title="Contexts of 128")
    for kind, mark in ("training", "o"), ("one batch", "x"):
        points = [(rate, run[kind]["largest"]) for rate, runs in rates.items() for run in runs]
        right.plot(*zip(*points, strict=True), mark, label=f"loss ({kind})")
    right.set(xscale="log", xlabel="rate", ylabel="largest rise of the loss", title="A deep model, every seed")
    for axes in (left, middle, right):
        axes.legend(fontsize=6)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
