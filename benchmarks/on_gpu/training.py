"""Fifty steps of a Llama under each recipe: tokens per second, peak memory, largest batch; and steps of a 1B model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

import halfstep
from halfstep.lab.task import Corpus, load_corpus
from on_gpu import twin
from on_gpu.bench import Bench, Row, swept
from on_gpu.llamas import RECIPES, Model, stepping


STEPS, WARM = 50, 10
GRAPHED = ("bf16-mixed", "fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block")
MODELS = (
    Model("318M, 8192 tokens", 20, 1152, 9, 8, 1024, 40 << 30),
    Model("85M, 8192 tokens", 12, 768, 6, 8, 1024),
)
LARGE = Model("1B, 16384 tokens", 22, 1920, 15, 8, 2048, 70 << 30)
SMALL = Model("tiny", 1, 128, 2, 2, 16)


def rows(bench: Bench) -> Iterator[Row]:
    """Each recipe on the largest model that fits in memory, steps of the large model, and the twin compared with a
    CPU."""
    memory = torch.cuda.get_device_properties(bench.device).total_memory if bench.on_gpu else 0
    model = next(m for m in MODELS if memory >= m.needs) if bench.on_gpu else SMALL
    corpus = load_corpus(None, model.context)
    kept = twin.kept()
    for number, recipe in enumerate(RECIPES):
        share = 0.8 / (len(RECIPES) - number + 1)
        yield Row(f"train: {recipe}", lambda r=recipe, s=share: trained(bench.within(s), model, r, corpus))  # type: ignore[misc]
        if number == 1:  # the bar's row, before what has none
            for each in RECIPES[:2]:
                yield Row(f"step: {each}", lambda r=each: _large(bench, memory, r, corpus))  # type: ignore[misc]
            for each in GRAPHED[:3]:
                yield Row(f"graphed step: {each}", lambda r=each: _large(bench, memory, r, corpus, graphed=True))  # type: ignore[misc]
            for each in GRAPHED:
                yield Row(f"graphed: {each}", lambda r=each: _graphed(bench.within(0.2), model, r, corpus))  # type: ignore[misc]
    for recipe in RECIPES:
        yield Row(f"twin: {recipe}", lambda r=recipe: twin.compared_with_cpu(bench, r, kept))  # type: ignore[misc]


def _graphed(bench: Bench, model: Model, recipe: str, corpus: Corpus) -> dict[str, Any]:
    """The same steps replayed from a CUDA graph."""
    count, warm = (STEPS, WARM) if bench.on_gpu else (5, 4)
    return steps(bench, model, recipe, corpus, count, warm, bench.left, graphed=True) | {"shape": model.name}


def trained(bench: Bench, model: Model, recipe: str, corpus: Corpus) -> dict[str, Any]:
    """Fifty steps, or as many as fit in three quarters of the time; then the largest batch, doubled until one does not
    fit."""
    count, warm = (STEPS, WARM) if bench.on_gpu else (2, 1)
    found = steps(bench, model, recipe, corpus, count, warm, 0.75 * bench.left)
    if bench.on_gpu:
        swept(bench)
        found["measures"] |= largest(bench, model, recipe, corpus)
    return found | {"shape": model.name}


def steps(
    bench: Bench,
    model: Model,
    recipe: str,
    corpus: Corpus,
    count: int,
    warm: int,
    seconds: float,
    graphed: bool = False,
) -> dict[str, Any]:
    """Train, and time all steps after the warm-up; losses stay on the device until the end."""
    step, losses = stepping(bench.device, model, recipe, corpus, graphed=graphed), []
    if bench.on_gpu:
        torch.cuda.reset_peak_memory_stats(bench.device)
    started, timed, done = time.monotonic(), stopwatch(bench), 0
    for number in range(count):
        if number == warm:
            timed, done = stopwatch(bench), 0
        losses.append(step())
        done += 1
        if number % 5 == 4:
            losses[-1].item()  # waits for the device, so that the elapsed time is that of its work
            if number >= warm and (time.monotonic() - started > seconds or bench.left <= 0):
                break
    elapsed, tokens = timed(), model.batch * model.context
    measures: dict[str, Any] = {
        "tokens/s": done * tokens / elapsed,
        "step, ms": 1000 * elapsed / done,
        "steps": len(losses),
    }
    if bench.on_gpu:
        measures["peak bytes"] = torch.cuda.max_memory_allocated(bench.device)
    values = torch.stack(losses).tolist()
    available, why = halfstep.is_native_available(recipe, str(bench.device), return_reason=True)
    return {
        "measures": measures | {"last loss": values[-1]},
        "losses": values,
        "fp8 units": "yes" if available else why,
    }


def largest(bench: Bench, model: Model, recipe: str, corpus: Corpus) -> dict[str, int]:
    """The largest batch, the model's times a power of two, with which two steps fit in memory; 0 if none does. If time
    runs out first, a lower bound."""
    batch, fits = model.batch, 0
    while bench.left > 0:
        try:
            step = stepping(bench.device, replace(model, batch=batch), recipe, corpus)
            for _ in range(2):
                step()
            if bench.on_gpu:
                torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            return {"largest batch": fits}
        finally:
            step = None  # type: ignore[assignment]
            swept(bench)
        fits, batch = batch, 2 * batch
    return {"largest batch, at least": fits}


def _large(bench: Bench, memory: int, recipe: str, corpus: Corpus, graphed: bool = False) -> dict[str, Any]:
    """Ten steps of the large model, or replays of a CUDA graph; with fewer sequences if it does not fit."""
    model = LARGE if bench.on_gpu else SMALL
    if memory < model.needs:
        return {"failed": f"the model needs {model.needs >> 30} GiB of memory; there are {memory >> 30}"}
    count, warm = (15, 5) if bench.on_gpu else (2, 1)
    while True:
        try:
            return steps(bench, model, recipe, corpus, count, warm, 30, graphed) | {"shape": model.name}
        except torch.OutOfMemoryError:
            if model.batch == 1:
                raise
        swept(bench)
        smaller = model.batch // 2
        model = replace(model, batch=smaller, name=f"1B, {smaller * model.context} tokens")


def stopwatch(bench: Bench) -> Callable[[], float]:
    """Start a clock: a function that waits for the device and returns the seconds since the start, by the device's
    clock."""
    if not bench.on_gpu:
        started = time.perf_counter()
        return lambda: time.perf_counter() - started
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()

    def stop() -> float:
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1000

    return stop
