"""Train Large, Then Compress (Li et al. 2020, arXiv 2002.11794): widths for equal CPU time, and bits.

Trains byte-level GPTs of several widths on Python's standard library for equal CPU time: the number of steps is a
budget divided by a step's measured time, so that other processes do not change it. Each is then compressed without
training: rounded to integers of 8 to 2 bits (blocks of 64), to MXFP4, or by pruning its smallest weights, including
embeddings. Models are trained with smaller budgets too, each with its own decay, so that costs can be compared at equal
loss: a wider model has seen less data, and is easier to compress for that reason alone.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from next_byte import batch, held_out, loss, windows
from study import Kept, compared, options, table, text
from torch import nn

import halfstep
from halfstep.formats.integer import Integer
from halfstep.lab.models.gpt import GPT
from halfstep.lab.task import VOCABULARY, Corpus, load_corpus
from halfstep.quant import Quantizer, Scales, Tile
from halfstep.quant.scaling import get_scaling


CONTEXT, BATCH, LAYERS, HEADS = 64, 8, 2, 4
SHARES = (1 / 8, 1 / 4, 1 / 2, 1.0)  # of the budget: one run for each
LIGHT, HEAVY = ("bf16", "int8"), ("int4", "mxfp4", "int3", "pruned 75%")


def _integers(bits: int) -> Quantizer:
    most = 2 ** (bits - 1) - 1
    format = Integer(f"int{bits}", -most, most, source="symmetric, as halfstep's int8 and int4")
    return Quantizer(format, scales=Scales(Tile(1, 64), get_scaling("absmax")))


QUANTIZERS = {f"int{bits}": _integers(bits) for bits in (8, 6, 4, 3, 2)} | {"mxfp4": halfstep.get_quantizer("mxfp4")}
PRUNED = {"pruned 50%": 0.5, "pruned 75%": 0.75}
METHODS = (*QUANTIZERS, *PRUNED)


def smaller(model: nn.Module, method: str) -> tuple[nn.Module, float]:
    """A copy of the model with every matrix compressed and the rest in bf16, and its bytes: codes and scales, or bf16
    values; with pruning, the remaining values and one bit per element."""
    model, total = copy.deepcopy(model), 0.0
    matrices = [parameter.detach().abs().flatten() for parameter in model.parameters() if parameter.dim() == 2]
    least = torch.cat(matrices).quantile(PRUNED.get(method, 0.0))
    with torch.no_grad():
        for parameter in model.parameters():
            values, size = halfstep.round_to(parameter, "bf16"), 2.0 * parameter.numel()
            if parameter.dim() == 2 and method in QUANTIZERS:
                made = QUANTIZERS[method].quantize(parameter)
                values, size = made.dequantize(), made.quantizer.format.bits * parameter.numel() / 8 + made.scale.nbytes
            elif parameter.dim() == 2 and method in PRUNED:
                left = parameter.abs() > least
                values, size = values * left, 2.0 * float(left.sum()) + parameter.numel() / 8
            parameter.copy_(values)
            total += size
    return model, total


class Training:
    """A GPT, its optimizer and its batches."""

    def __init__(self, width: int, seed: int, corpus: Corpus, steps: int) -> None:
        torch.manual_seed(seed)
        self.model = GPT(VOCABULARY, CONTEXT, LAYERS, width, HEADS)
        self.corpus, self.generator = corpus, torch.Generator().manual_seed(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate(width), betas=(0.9, 0.95))
        warm = max(1, min(40, steps // 10))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda n: min(1, (n + 1) / warm) * (1 + math.cos(math.pi * n / steps)) / 2
        )

    def step(self) -> None:
        """One update."""
        loss(self.model, batch(self.corpus, BATCH, CONTEXT, self.generator)).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()


def rate(width: int) -> float:
    """The learning rate for a width."""
    return 3e-3 * math.sqrt(64 / width)


def seconds(widths: Sequence[int], corpus: Corpus, times: int) -> dict[str, float]:
    """The median CPU time of a step of each width, interleaved."""
    trainings = {width: Training(width, 0, corpus, times) for width in widths}
    found: dict[int, list[float]] = {width: [] for width in widths}
    for _ in range(times):
        for width, training in trainings.items():
            began = time.process_time()
            training.step()
            found[width].append(time.process_time() - began)
    return {str(width): statistics.median(each) for width, each in found.items()}


def study(width: int, steps: int, seed: int, corpus: Corpus, seen: int) -> dict[str, Any]:
    """One run: the held-out loss in bf16, and the increase by each compression."""
    training, began = Training(width, seed, corpus, steps), time.process_time()
    for _ in range(steps):
        training.step()
    run: dict[str, Any] = {"steps": steps, "cpu_seconds": round(time.process_time() - began, 2)}
    rows = windows(corpus, seen, CONTEXT)
    for method in ("bf16", *METHODS):
        run[method] = round(held_out(smaller(training.model, method)[0], rows), 4)
    return run


Runs = dict[tuple[int, float], list[dict[str, Any]]]
"""By width and share of the budget: the runs, one per seed."""


def cost(runs: list[dict[str, Any]], method: str) -> list[float]:
    """The increase of loss by a compression, for each seed."""
    return [run[method] - run["bf16"] for run in runs]


def at_loss(found: Runs, width: int, method: str, seed: int, target: float) -> float | None:
    """The cost of a compression where the loss in bf16 equals the target, interpolated between budgets, or None."""
    points = [(runs[seed]["bf16"], cost(runs, method)[seed]) for (w, _), runs in found.items() if w == width]
    for (high, cost_high), (low, cost_low) in pairwise(sorted(points, reverse=True)):
        if low <= target <= high:
            return cost_low + (cost_high - cost_low) * (target - low) / (high - low)
    return None


def front(points: dict[tuple[int, str], tuple[float, float]]) -> list[tuple[int, str]]:
    """The Pareto front of points (bytes, loss), smallest first."""
    best, kept = math.inf, []
    for name, (_, height) in sorted(points.items(), key=lambda item: item[1]):
        if height < best:
            best = height
            kept.append(name)
    return kept


def pairs_of(costs: dict[int, list[float]]) -> dict[str, tuple[list[float], list[float]]]:
    """The costs of each width and of the next narrower one, and of the widest and the narrowest."""
    pairs = [*pairwise(costs), (min(costs), max(costs))] if len(costs) > 1 else []
    return {f"width {narrow} to {wide}": (costs[wide], costs[narrow]) for narrow, wide in pairs}


def conclusions(found: Runs, widths: Sequence[int]) -> dict[str, Any]:
    """The results for each part of the claim, which are also printed."""
    full = {width: found[width, 1.0] for width in widths}
    seeds, shares = range(len(full[widths[0]])), sorted({share for _, share in found})
    sizes = {
        (w, m): smaller(GPT(VOCABULARY, CONTEXT, LAYERS, w, HEADS), m)[1] for w in widths for m in ("bf16", *METHODS)
    }
    points = {(w, m): (size, statistics.fmean(run[m] for run in full[w])) for (w, m), size in sizes.items()}
    print(f"\nheld-out loss in bf16, {len(seeds)} seeds, mean (95% interval):")
    rows = [[f"{w}", *(text([r["bf16"] for r in found[w, s]], ".3f") for s in shares)] for w in widths]
    table(("width", *(f"{share:g} of the time" for share in shares)), rows)
    timed = {
        f"{share:g} of the time": compared(
            f"loss in bf16 after {share:g} of the time",
            pairs_of({w: [run["bf16"] for run in found[w, share]] for w in widths}),
            "wider is better",
            "wider is worse",
        )
        for share in shares
    }
    target = max(run["bf16"] for runs in full.values() for run in runs)
    ends = {m: {w: cost(full[w], m) for w in widths} for m in METHODS}
    equal: dict[str, dict[int, list[float]]] = {method: {} for method in METHODS}
    for method, width in ((m, w) for m in METHODS for w in widths):
        costs = [at_loss(found, width, method, seed, target) for seed in seeds]
        if None not in costs:  # every seed reached that loss
            equal[method][width] = costs  # type: ignore[assignment]
    changed = {}
    for where, each in (("after the same time", ends), (f"at a loss of {target:g}", equal)):
        print(f"\nwhat compression adds {where}:")
        rows = [[m, *(text(costs[w], ".3f") if w in costs else "-" for w in widths)] for m, costs in each.items()]
        table(("", *(f"width {w}" for w in widths)), rows)
        pairs = {f"{m}, {k}": pair for m, costs in each.items() for k, pair in pairs_of(costs).items()}
        changed[where.partition(" of")[0]] = compared(f"change of what it adds {where}", pairs, "falls", "rises")
    pairs = {}
    for small, light, heavy in ((w, one, other) for w in widths for one in LIGHT for other in HEAVY):
        large = max((w for w in widths if sizes[w, heavy] <= sizes[small, light]), default=small)
        if large > small:
            name = f"{large} in {heavy}, {sizes[large, heavy]:.0f} bytes; {small} in {light}, {sizes[small, light]:.0f}"
            pairs[name] = ([run[heavy] for run in full[large]], [run[light] for run in full[small]])
    against = compared("a large model in few bits against a small one", pairs, "large wins", "small wins")
    best = [f"width {w} in {m}: {points[w, m][0]:.0f} bytes, {points[w, m][1]:.3f}" for w, m in front(points)]
    print("\nno other point has both fewer bytes and a lower loss:", *best, sep="\n  ")
    return {
        "bytes": {f"{w}, {m}": size for (w, m), size in sizes.items()},
        "same_time": timed,
        "loss_compared_at": target,
        "costs": {"same_time": ends, "same_loss": equal},
        "changes": changed,
        "front": best,
        "large_against_small": against,
    }


def main() -> None:
    """Train, compress, print and save."""
    given, corpus = options(__doc__ or "", "runs/large.json"), load_corpus(None, CONTEXT)
    torch.set_num_threads(1)
    budget, widths, seen, times = (0.3, (16, 32), 8, 2) if given.quick else (10.0, (16, 32, 64, 128), 128, 21)
    kept = Kept(given.out, budget=budget, widths=widths, windows=seen, layers=LAYERS, batch=BATCH, context=CONTEXT)
    step = kept.run("CPU seconds a step", partial(seconds, widths, corpus, times))
    found: Runs = {(width, share): [] for width in widths for share in SHARES[2 * given.quick :]}
    for seed in range(given.seeds):
        for (width, share), runs in found.items():
            steps = max(2, round(share * budget / step[str(width)]))
            name = f"width {width}, {share:g} of the budget, seed {seed}"
            runs.append(kept.run(name, partial(study, width, steps, seed, corpus, seen)))
    said_of = conclusions(found, widths)
    kept.write(conclusions=said_of)
    picture(found, said_of["bytes"], given.out.with_suffix(".png"))


def picture(found: Runs, sizes: dict[str, float], path: Path) -> None:
    """Loss against bytes after the whole budget, and the cost of MXFP4 against the loss before compression."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for width in sorted({width for width, _ in found}):
        methods = ("bf16", "int8", "int6", "int4", "mxfp4", "int3", "pruned 50%")
        means = [statistics.fmean(run[m] for run in found[width, 1.0]) for m in methods]
        left.plot([sizes[f"{width}, {m}"] / 1000 for m in methods], means, "o", label=f"width {width}")
        for method, mean in zip(methods, means, strict=True):
            left.annotate(method, (sizes[f"{width}, {method}"] / 1000, mean), fontsize=6)
        starts = sorted(
            (r["bf16"], r["mxfp4"] - r["bf16"]) for (w, _), runs in found.items() if w == width for r in runs
        )
        right.plot(*zip(*starts, strict=True), "o-", markersize=3, label=f"width {width}")
    left.set(xscale="log", xlabel="kB", ylabel="held-out loss", title="The same CPU time, then compression (means)")
    right.set(xlabel="held-out loss in bf16", ylabel="added by MXFP4", title="Every run, all budgets")
    left.legend()
    right.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
