"""Optimizer steps: over one large tensor relative to a copy, and over 300 tensors by host time."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import halfstep
from halfstep.optim import AdamW8bit, AdamWFp8
from halfstep.recipe import Recipe, get_recipe
from on_gpu.bench import Bench, Row, Run, fitting, power, race
from on_gpu.peers import found


Shapes = Sequence[tuple[int, ...]]
FUSED = "torch fused, fp32"
Peers = Mapping[str, Callable[[Bench, Shapes], Run]]


def rows(bench: Bench) -> Iterator[Row]:
    """The rows of the table of bars, then those with many tensors."""
    yield Row("host: optimizer.step() over 300 tensors", lambda: _host(bench))
    yield Row("host: optimizer.step() by new gradients", lambda: _new_gradients(bench))
    fused = {FUSED: _fused(torch.float32)}
    yield _row(bench, "adamw: fp32", get_recipe("fp32"), 16, fused)
    yield _row(bench, "adamw: bf16-stochastic", get_recipe("bf16-stochastic"), 12, fused)
    yield _row(
        bench, "adamw: bf16-master", get_recipe("bf16-master"), 16, {"torch fused, fp32, and a copy": _fused_and_copy}
    )
    for name in ("bf16-split", "bf16-kahan"):
        yield _row(bench, f"adamw: {name}", get_recipe(name), 14, fused)
    for name in ("bf16-collage-light", "bf16-collage-plus"):
        yield _row(bench, f"adamw: {name}", get_recipe(name), 12)
    pure, noisy = get_recipe("bf16-pure"), replace(get_recipe("bf16-stochastic"), name="noisy", moments="bf16")
    yield _row(bench, "adamw: all bf16", pure, 8, {"torch fused, bf16": _fused(torch.bfloat16)})
    alike = {"torchao _AdamW, stochastic": _theirs("torchao.optim:_AdamW", bf16_stochastic_round=True)}
    yield _row(bench, "adamw: all bf16, stochastic", noisy, 8, alike)
    fp8 = {**fused, "torchao AdamWFp8": _theirs("torchao.optim:AdamWFp8", bf16_stochastic_round=True)}
    yield _row(bench, "adamw: FP8 moments", AdamWFp8, 7, fp8)
    dynamic = {"bitsandbytes AdamW8bit": _theirs("bitsandbytes.optim:AdamW8bit")}
    yield _row(bench, "adamw: 8-bit dynamic moments", AdamW8bit, 7, dynamic)
    yield Row("adamw: 300 tensors, 8-bit dynamic moments", lambda: _many(bench, AdamW8bit, dynamic))


def _row(bench: Bench, name: str, kind: Recipe | type, bytes_each: int, peers: Peers | None = None) -> Row:
    """A row of an optimizer step, where weight, gradient and states of ours take `bytes_each` bytes per parameter;
    peers are assumed to take as many as torch's in fp32."""

    def measure() -> dict[str, Any]:
        size = fitting(bench, bench.sizes.parameters, bytes_each + 16 * len(peers or {}) + 4)
        shapes = [(size // 64, 64)]
        optimizer = ours(bench, shapes, kind)
        optimizer.step()
        traffic = moved(optimizer)
        runs = {peer: lambda make=make: make(bench, shapes) for peer, make in (peers or {}).items()}
        return race(bench, optimizer.step, runs, traffic) | {"shape": power(size), "bytes/parameter": traffic / size}

    return Row(name, measure)


def weights(bench: Bench, shapes: Shapes, dtype: torch.dtype) -> list[nn.Parameter]:
    """Random parameters of those shapes, with gradients of their dtype."""
    made = [nn.Parameter(bench.normal(*shape, dtype=dtype)) for shape in shapes]
    for weight in made:
        weight.grad = bench.normal(*weight.shape, dtype=dtype)
    return made


def ours(bench: Bench, shapes: Shapes, kind: Recipe | type) -> torch.optim.Optimizer:
    """The optimizer of a recipe, or one of our classes with bf16 weights; parameters have gradients."""
    if not isinstance(kind, Recipe):
        return kind(weights(bench, shapes, torch.bfloat16), lr=1e-4, bf16_stochastic_round=True, generator=7)  # type: ignore[no-any-return]
    model = nn.Module()
    model.weights = nn.ParameterList(nn.Parameter(bench.normal(*shape)) for shape in shapes)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-4)
    _, optimizer, _ = halfstep.prepare(model, plain, kind, generator=7)
    for weight in model.parameters():
        weight.grad = bench.normal(*weight.shape, dtype=weight.dtype)
    return optimizer


def moved(optimizer: torch.optim.Optimizer) -> int:
    """The bytes that a step reads and writes: gradients once, weights and states twice; a weight with a full master is
    only written."""
    total = 0
    for group in optimizer.param_groups:
        for weight in group["params"]:
            state = {key: value for key, value in optimizer.state[weight].items() if key != "step"}
            total += weight.grad.nbytes + weight.nbytes * (1 if "master" in state else 2)
            total += 2 * sum(map(_bytes, state.values()))
    return total


def _bytes(value: object) -> int:
    if not isinstance(value, Tensor):
        return 0
    if hasattr(value, "__tensor_flatten__"):
        return sum(_bytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return value.nbytes


def _fused(dtype: torch.dtype) -> Callable[[Bench, Shapes], Run]:
    return lambda bench, shapes: torch.optim.AdamW(weights(bench, shapes, dtype), lr=1e-4, fused=True).step


def _fused_and_copy(bench: Bench, shapes: Shapes) -> Run:
    masters = weights(bench, shapes, torch.float32)
    step, half = (
        torch.optim.AdamW(masters, lr=1e-4, fused=True).step,
        [torch.empty_like(w, dtype=torch.bfloat16) for w in masters],
    )

    def run() -> None:
        step()
        for target, master in zip(half, masters, strict=True):
            target.copy_(master.detach())

    return run


def _theirs(place: str, **options: Any) -> Callable[[Bench, Shapes], Run]:
    return lambda bench, shapes: found(place)(weights(bench, shapes, torch.bfloat16), lr=1e-4, **options).step


def _many(bench: Bench, kind: type, peers: Peers) -> dict[str, Any]:
    shapes = bench.sizes.tensors
    runs = {peer: lambda make=make: make(bench, shapes) for peer, make in peers.items()}
    return race(bench, ours(bench, shapes, kind).step, runs) | {"shape": f"{len(shapes)} tensors"}


def _host(bench: Bench) -> dict[str, Any]:
    """The host's part of a step over many tensors: milliseconds while the GPU is busy with other work, kernels
    launched, and how often it waits for the GPU."""
    shapes = bench.sizes.tensors
    optimizer = ours(bench, shapes, get_recipe("bf16-stochastic"))
    for _ in range(3):
        optimizer.step()
    ms = median(_queued(bench, optimizer) for _ in range(20))
    kernels, waits = (_launched(optimizer), _waits(optimizer)) if bench.on_gpu else ([], [])
    measures = {
        "ms": ms, "launches beyond one a kind": max(len(kernels) - 1, 0), "waits for the GPU": len(waits),
    }  # fmt: skip
    return {"measures": measures, "shape": f"{len(shapes)} tensors", "kernels": kernels[:40], "waits": waits[:5]}


def _new_gradients(bench: Bench) -> dict[str, Any]:
    """The host time of a step over many fp32 tensors relative to torch's, where every tensor has a new gradient, as
    after `zero_grad()` and another backward pass."""
    shapes = bench.sizes.tensors
    steps = {"ours": ours(bench, shapes, get_recipe("fp32"))}
    for kind in ("foreach", "fused"):
        steps[f"torch {kind}"] = torch.optim.AdamW(weights(bench, shapes, torch.float32), lr=1e-4, **{kind: True})
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(23):
        for name, optimizer in steps.items():
            for weight in optimizer.param_groups[0]["params"]:
                weight.grad = torch.empty_like(weight)
            taken = _queued(bench, optimizer)
            if turn >= 3:
                times[name].append(taken)
    ms = {name: median(taken) for name, taken in times.items()}
    measures = {f"to {name}": ms["ours"] / ms[name] for name in steps if name != "ours"}
    return {"measures": measures, "ms": ms, "shape": f"{len(shapes)} tensors"}


def _queued(bench: Bench, optimizer: torch.optim.Optimizer) -> float:
    """The milliseconds of host time of a step while the GPU has other work."""
    gc.disable()
    if bench.on_gpu:
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)  # cycles: tens of milliseconds in which the queue is not empty
    started = time.perf_counter()
    optimizer.step()
    taken = 1000 * (time.perf_counter() - started)
    gc.enable()
    return taken


def _launched(optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of the kernels and copies of one step, in order."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        optimizer.step()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def _waits(optimizer: torch.optim.Optimizer) -> list[str]:
    """torch's warnings of operations that wait for the GPU."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    messages = [str(warning.message) for warning in seen]
    return [
        words for words in messages if "synchroniz" in words and "prototype feature" not in words
    ]  # said at first use
