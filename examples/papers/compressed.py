"""Compressed reals (Rossi et al. 2023, arXiv 2309.07158): weights of 8 and 16 bits, widened when a product reads them.

A product of a vector and a matrix reads each weight once, so its time depends on the bytes where memory is slow. Here
weights are stored as bf16 (widened by a shift), E4M3 and E5M2 (converted through fp16), and posits of 8 and 16 bits (by
table), and no decoded matrix is written to memory. Measured: the errors of the product; the loss of a small model; and
the size from which the product is faster than in fp32, compared with the size that a cost model predicts from bandwidth
and decoding rates. Activations stay float32. Times are CPU time of one thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from math import log
from pathlib import Path
from statistics import fmean, median
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from next_byte import batch, held_out, loss, windows
from study import Kept, in_codes, options, table, text
from torch import nn

import halfstep
from halfstep.lab.interval import paired
from halfstep.lab.models.gpt import GPT
from halfstep.lab.task import Corpus, load_corpus
from halfstep.quant import get_quantizer
from halfstep.recipe import Recipe, Rule, linear_spec


FORMATS = ("bf16", "e4m3fn", "e5m2", "posit8_0", "posit8_1", "posit8_2", "posit16_1", "posit16_2")
TIMED = ("bf16", "e4m3fn", "posit8_1", "posit16_1")
CONTEXT, COLUMNS, CACHED = 64, 2048, (1 << 17, 1 << 20)
"""Bytes of text; columns of timed matrices; bytes of two matrices in the second-level cache, whose slope is a rate."""


def stored(model: nn.Module) -> int:
    """Bytes of a layer's weights."""
    return sum(t.nbytes for n, t in model.state_dict().items() if n.endswith(("weight", "weight_codes")))


@torch.no_grad()
def errors(seed: int) -> dict[str, dict[str, Any]]:
    """For X W, (64, 256) by (256, 256), normally distributed: the error relative to float64 (Frobenius norms), bytes,
    and whether products that read codes equal those of decoded values bit for bit."""
    draw = np.random.default_rng(seed)
    weight, x = (torch.tensor(draw.standard_normal(shape), dtype=torch.float32) for shape in ((256, 256), (64, 256)))
    exact, layer = x.double() @ weight.double(), nn.Sequential(nn.Linear(256, 256, bias=False))
    layer[0].weight.copy_(weight.T)
    found = {}
    for format in FORMATS:
        codes, values = in_codes(layer, get_quantizer(format)), in_codes(layer, get_quantizer(format))
        halfstep.dequantize_model(values)
        spec = linear_spec(None, get_quantizer(format), None)
        halfstep.apply(values, Recipe("rounded", "", "", compute="fp32", rules=(Rule("*", spec),)))
        y, same = (torch.cat([model.eval()(part) for part in x.split(8)]) for model in (codes, values))
        error = float((y.double() - exact).norm() / exact.norm())
        found[format] = {"error": error, "bytes": stored(codes) / stored(layer), "same bits": torch.equal(y, same)}
    return found


def losses(seed: int, corpus: Corpus, width: int, steps: int, texts: int) -> dict[str, float]:
    """The increase of loss of a small GPT, trained in float32, by format: bits per byte of held-out text."""
    torch.manual_seed(seed)
    model, draw = GPT(256, CONTEXT, layers=2, width=width, heads=4), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 40, 1.1 - step / steps)
        optimizer.zero_grad()
        loss(model, batch(corpus, 12, CONTEXT, draw)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    models = {"whole": model.eval()} | {format: in_codes(model, get_quantizer(format)) for format in FORMATS}
    found = {format: held_out(each, windows(corpus, texts, CONTEXT)) / log(2) for format, each in models.items()}
    return {format: bits - (found["whole"] if format != "whole" else 0) for format, bits in found.items()}


def timed(calls: dict[str, Callable[[], Any]], rounds: int, seconds: float = 1e-3) -> dict[str, float]:
    """Median CPU seconds per call over interleaved rounds; an untimed call brings the data into the cache first."""
    counts, found = {}, {name: [] for name in calls}  # type: ignore[var-annotated]
    for name, call in calls.items():
        call()
        start = time.process_time()
        call()
        counts[name] = 1 + int(seconds / max(1e-6, time.process_time() - start))
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            start = time.process_time()
            for _ in range(counts[name]):
                call()
            found[name].append((time.process_time() - start) / counts[name])
    return {name: median(values) for name, values in found.items()}


@torch.no_grad()
def times(rows: list[int], rounds: int) -> dict[str, Any]:
    """By format: seconds of a product for each number of rows; weights decoded per second in the second-level cache
    (the slope between two sizes); and the constant seconds per call."""
    x, run = torch.randn(1, COLUMNS), {"seconds": {f: [] for f in ("fp32", *TIMED)}}  # type: ignore[var-annotated]

    def call(format: str, count: int) -> Callable[[], Any]:
        layer = nn.Sequential(nn.Linear(COLUMNS, count, bias=False)).eval()
        return partial(layer if format == "fp32" else in_codes(layer, get_quantizer(format)), x)

    for count in rows:
        for format, found in timed({f: call(f, count) for f in run["seconds"]}, rounds).items():
            run["seconds"][format].append(found)
    widths = {format: COLUMNS * int(get_quantizer(format).format.bytes) for format in run["seconds"]}
    few, many = (timed({f: call(f, n // w) for f, w in widths.items()}, 5 * rounds) for n in CACHED)
    run["rate"] = {f: COLUMNS * (CACHED[1] - CACHED[0]) / w / (many[f] - few[f]) for f, w in widths.items()}
    run["overhead"] = {f: max(0.0, few[f] - COLUMNS * CACHED[0] / w / run["rate"][f]) for f, w in widths.items()}
    return run | {"load": os.getloadavg()[0]}


def predicted(run: dict[str, Any], format: str, rows: list[int], joined: Callable[..., float]) -> list[float]:
    """Seconds by the cost model: an overhead and, for each weight, its decoding `joined` with the reading of its bytes.
    The reading time of a byte is the excess of fp32's product of as many bytes over that in the second-level cache."""
    weights, fp32 = [COLUMNS * count for count in rows], run["seconds"]["fp32"]
    fast, width = 1 / run["rate"]["fp32"], get_quantizer(format).format.bytes
    more = [(time - run["overhead"]["fp32"]) / count - fast for count, time in zip(weights, fp32, strict=True)]
    reading = np.interp([log(width * n) for n in weights], [log(4 * n) for n in weights], np.maximum(more, 0) / 4)
    each = [joined((1 / run["rate"][format], width * seconds)) for seconds in reading]
    return [run["overhead"][format] + count * seconds for count, seconds in zip(weights, each, strict=True)]


def crossover(weights: list[int], ours: list[float], fp32: list[float]) -> float | None:
    """The number of weights from which a product is faster than fp32's, interpolated in log ratios, or None."""
    ratios = [log(a / b) for a, b in zip(ours, fp32, strict=True)]
    if ratios[-1] >= 0:
        return None
    last = max((i for i, ratio in enumerate(ratios) if ratio >= 0), default=-1)
    if last < 0:
        return float(weights[0])
    share = ratios[last] / (ratios[last] - ratios[last + 1])
    return weights[last] * (weights[last + 1] / weights[last]) ** share


def main() -> None:
    """Measure, predict, print and save."""
    given = options(__doc__ or "", "runs/compressed.json", seeds=5)
    torch.set_num_threads(1)
    width, steps, texts, rounds = (64, 2, 4, 2) if given.quick else (128, 300, 48, 25)
    rows = [128, 256] if given.quick else [round(2 ** (half / 2)) for half in range(12, 29)]
    weights = [COLUMNS * count for count in rows]
    corpus = load_corpus(None, CONTEXT)
    kept = Kept(given.out, width=width, steps=steps, texts=texts, rounds=rounds, rows=rows, columns=COLUMNS)
    found, lost, takes = [], [], []
    for seed in range(given.seeds):
        found.append(kept.run(f"errors, seed {seed}", partial(errors, seed)))
        lost.append(kept.run(f"losses, seed {seed}", partial(losses, seed, corpus, width, steps, texts)))
        takes.append(kept.run(f"times, take {seed}", partial(times, rows, rounds)))
    print(
        f"\nmean (95% interval) of {given.seeds} seeds; unquantised {text([run['whole'] for run in lost], '.4g')} bits:"
    )
    lines = [
        (
            format,
            f"{found[0][format]['bytes']:g}",
            f"{found[0][format]['error']:.3e}",
            "yes" if all(run[format]["same bits"] for run in found) else "no",
            text([1e3 * run[format] for run in lost]),
        )
        for format in FORMATS
    ]
    table(("weights", "bytes", "error of X W", "bits of decoded", "more bits a byte, 1e-3"), lines)
    crossings = {format: crossings_of(takes, format, rows) for format in TIMED}
    print(
        f"\none thread, {given.seeds} takes, load {max(run['load'] for run in takes):.1f}; faster from so many weights:"
    )
    lines = [
        (
            format,
            f"{fmean(run['rate'][format] for run in takes) / 1e9:.2f}",
            f"{fmean(run['seconds'][format][-1] / run['seconds']['fp32'][-1] for run in takes):.2f}",
            *(words(each[key]) for key in ("measured", "predicted", "overlapped")),
        )
        for format, each in crossings.items()
    ]
    table(
        (
            "weights",
            "1e9 weights/s",
            f"time to fp32's at {weights[-1]:.2g}",
            "measured",
            "predicted",
            "if they overlapped",
        ),
        lines,
    )
    apart = {format: prediction_errors(each) for format, each in crossings.items() if all(map(all, each.values()))}
    for format, each in apart.items():
        print(f"{format}: predicted {each['low']:+.1%} to {each['high']:+.1%} from measured (95% interval)")
    last = {f: asdict(paired([run["seconds"][f][-1] / run["seconds"]["fp32"][-1] for run in takes])) for f in TIMED}
    kept.write(crossings=crossings, apart=apart, last=last)
    picture(takes, rows, given.out.with_suffix(".png"))


def crossings_of(takes: list[dict[str, Any]], format: str, rows: list[int]) -> dict[str, Any]:
    """The number of weights from which the format is faster than fp32, by take: measured, and by the cost model."""
    ways: dict[str, Callable[..., list[float]]] = {
        "measured": lambda run: run["seconds"][format],
        "predicted": lambda run: predicted(run, format, rows, sum),
        "overlapped": lambda run: predicted(run, format, rows, max),
    }
    weights = [COLUMNS * count for count in rows]
    return {way: [crossover(weights, of(run), run["seconds"]["fp32"]) for run in takes] for way, of in ways.items()}


def prediction_errors(crossing: dict[str, list[float]]) -> dict[str, float]:
    """The mean sizes, and the relative errors of the predicted ones."""
    means = {way: fmean(sizes) for way, sizes in crossing.items()}
    return means | asdict(paired([p / m - 1 for p, m in zip(crossing["predicted"], crossing["measured"], strict=True)]))


def words(sizes: list[float | None]) -> str:
    """The sizes of all takes as text, in millions."""
    return ", ".join("never" if size is None else f"{size / 1e6:.2f}M" for size in sizes)


def picture(takes: list[dict[str, Any]], rows: list[int], path: Path) -> None:
    """Times relative to fp32's by the number of weights: measured in every take, and predicted for the first."""
    weights = [COLUMNS * count for count in rows]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for color, format in enumerate(TIMED):
        for number, run in enumerate(takes):
            ratios = [a / b for a, b in zip(run["seconds"][format], run["seconds"]["fp32"], strict=True)]
            axes.loglog(weights, ratios, "-", color=f"C{color}", lw=1, label=format if number == 0 else None)
        times = zip(predicted(takes[0], format, rows, sum), takes[0]["seconds"]["fp32"], strict=True)
        ratios = [a / b for a, b in times]
        axes.loglog(weights, ratios, "--", color=f"C{color}", lw=1)
    axes.axhline(1.0, color="grey", lw=0.8)
    axes.set(xlabel="weights", ylabel="time of a product over fp32's", title="measured (lines), predicted (dashed)")
    axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
