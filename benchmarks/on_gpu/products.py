"""GEMMs: torch's FP8 GEMMs with given operands, then a linear layer forward and backward, casts included."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from halfstep.kernels import scaled_mm
from on_gpu import peers
from on_gpu.bars import HOST
from on_gpu.bench import Bench, Row, Run, race


RECIPES = ("fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block")
BLACKWELL = ("mxfp8", "nvfp4")
"""Recipes that have rows on a GPU with tensor cores for them."""
_DEEP, _CALLS = 8, 20
"""Layers of the model whose host time is measured, and calls per round."""
_TILE, _GROUP = 128, 4
"""The side of a block, and the multiple to which the number of scales along the summed dimension is padded."""


def rows(bench: Bench) -> Iterator[Row]:
    """The shapes of the bars first, then the grid of shapes while there is time."""
    side = bench.sizes.square
    for kind in KINDS:
        yield Row(f"product: {kind}", lambda k=kind: _judged(bench, k))  # type: ignore[misc]
    recipes = RECIPES + tuple(each for each in BLACKWELL if halfstep.is_native_available(each, bench.device))
    for recipe in (*recipes, "bf16-mixed"):
        yield Row(f"host of a layer: {recipe}", lambda r=recipe: _host(bench, r))  # type: ignore[misc]
    for recipe in recipes:
        yield Row(f"linear: {recipe}", lambda r=recipe: _linear(bench, r))  # type: ignore[misc]
    yield Row("linear: fp8-current, carried", lambda: _carried(bench))
    for m, k, n in bench.sizes.grid:
        if (m, k, n) != (side, side, side):
            yield Row(f"products of {m} x {k} x {n}", lambda m=m, k=k, n=n: _grid(bench, m, k, n))  # type: ignore[misc]


def half(bench: Bench, m: int, k: int, n: int) -> Run:
    """A bf16 GEMM on random data."""
    a, b = bench.normal(m, k, dtype=torch.bfloat16), bench.normal(n, k, dtype=torch.bfloat16)
    return lambda: a @ b.t()


def product(bench: Bench, kind: str, m: int, k: int, n: int, fast: bool = False) -> Run:
    """A GEMM (m, k) by (k, n) of E4M3 codes with bf16 output, by `scaled_mm` with scales in the layout that it
    expects."""
    a, b = (_codes(bench.normal(rows, k)) for rows in (m, n))
    kinds = F.ScalingType  # type: ignore[attr-defined]
    ones: dict[str, tuple[Any, Tensor, Any, Tensor]] = {
        "tensor": (kinds.TensorWise, _scales(bench), kinds.TensorWise, _scales(bench)),
        "row": (kinds.RowWise, _scales(bench, m, 1), kinds.RowWise, _scales(bench, 1, n)),
    }
    if kind == "1x128 by 128x128":
        groups = -(-k // _TILE)
        padded = -(-groups // _GROUP) * _GROUP
        squares = _scales(bench, -(-n // _TILE), padded).t()
        ones[kind] = kinds.BlockWise1x128, _scales(bench, groups, m).t(), kinds.BlockWise128x128, squares
    left, scale_a, right, scale_b = ones[kind]
    return lambda: F.scaled_mm(  # type: ignore[attr-defined]
        a, b.t(), scale_a, left, scale_b, right, output_dtype=torch.bfloat16, use_fast_accum=fast
    )


KINDS = ("tensor", "row", "1x128 by 128x128")


def _codes(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn)


def _scales(bench: Bench, *shape: int) -> Tensor:
    return torch.rand(shape, device=bench.device) + 0.5


def _judged(bench: Bench, kind: str) -> dict[str, Any]:
    side = bench.sizes.square
    shape = side, side, side
    others = {"bf16": lambda: half(bench, *shape), "fast accumulation": lambda: product(bench, kind, *shape, fast=True)}
    found = race(bench, product(bench, kind, *shape), others)
    return _times(found, "bf16", 2 * side**3) | {"shape": f"{side}^3"}


def _grid(bench: Bench, m: int, k: int, n: int) -> dict[str, Any]:
    """All kinds at one shape, relative to bf16: the data to which the shape rule's constant is fitted."""
    others = {kind: lambda kind=kind: product(bench, kind, m, k, n) for kind in KINDS}
    found = race(bench, half(bench, m, k, n), others)
    speeds = {f"{name}, times bf16": found["measures"][f"to {name}"] for name in KINDS if name in found["ms"]}
    return found | {"measures": speeds, "result": ", ".join(f"{name} {speed:.2f}" for name, speed in speeds.items())}


def _times(found: dict[str, Any], baseline: str, operations: int = 0) -> dict[str, Any]:
    """The figures with the speed relative to the baseline, and with TFLOP/s if `operations` is given."""
    measures = found["measures"]
    if f"to {baseline}" in measures:
        measures[f"times {baseline}"] = 1 / measures[f"to {baseline}"]
    if operations:
        measures["TFLOP/s"] = operations / found["ms"]["ours"] / 1e9
    return found


class Sink(torch.autograd.Function):
    """Ends a model in a scalar with a given gradient, so that there is no loss to compute and no output to widen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, unused: Tensor) -> tuple[Tensor, None]:
        (grad,) = ctx.saved_tensors
        return grad, None


class Layer(nn.Module):
    """A model of one linear layer whose output stays in bf16, as between layers."""

    def __init__(self, linear: nn.Module, grad: Tensor) -> None:
        super().__init__()
        self.linear, self.grad = linear, grad

    def forward(self, x: Tensor) -> Tensor:
        """A scalar whose backward pass starts with the given gradient."""
        return Sink.apply(self.linear(x), self.grad)  # type: ignore[no-any-return]


def _linear(bench: Bench, recipe: str) -> dict[str, Any]:
    """A linear layer with fp32 weights, as in training; others under bf16 autocast."""
    m, side = bench.sizes.rows, bench.sizes.square
    x = bench.normal(m, side, dtype=torch.bfloat16).requires_grad_()
    grad = bench.normal(m, side, dtype=torch.bfloat16)

    def engine() -> Run:
        layer, context = peers.engine_linear(bench, side, recipe)
        return _both_passes(bench, Layer(layer, grad), x, context)

    others = {
        "bf16": lambda: _both_passes(bench, Layer(_plain(bench, side), grad), x),
        "torchao, compiled": lambda: _both_passes(bench, Layer(peers.torchao_linear(bench, side, recipe), grad), x),
        "Transformer Engine": engine,
    }
    found = race(bench, _ours(bench, recipe, x, grad), others)
    available, why = halfstep.is_native_available(recipe, bench.device, return_reason=True)
    return _times(found, "bf16") | {"shape": f"{m} x {side} x {side}", "fp8 units": "yes" if available else why}


def _carried(bench: Bench) -> dict[str, Any]:
    """fp8-current without FP8 tensor cores, as on a GPU that has none."""
    m, side = bench.sizes.rows, bench.sizes.square
    x, grad = (bench.normal(m, side, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    with mock.patch.object(scaled_mm, "may_have_tensor_cores", return_value=False):
        others = {"bf16": lambda: _both_passes(bench, Layer(_plain(bench, side), grad), x)}
        return race(bench, _ours(bench, "fp8-current", x, grad), others) | {"shape": f"{m} x {side} x {side}"}


def _host(bench: Bench, recipe: str) -> dict[str, Any]:
    """The host time of a layer, forward and backward, relative to torch's under bf16 autocast, at a size for which the
    GPU waits for the host: milliseconds of one layer of eight, and kernels launched beyond torch's."""
    side, rows = (1024, 256) if bench.on_gpu else (16, 16)
    runs, launched = {}, {}
    for name in ("ours", "bf16"):
        layers = [nn.Linear(side, side, bias=False, device=bench.device) for _ in range(_DEEP)]
        x = bench.normal(rows, side, dtype=torch.bfloat16).requires_grad_()
        model = Layer(nn.Sequential(*layers), bench.normal(rows, side, dtype=torch.bfloat16))
        if name == "ours":
            halfstep.apply(model, recipe)
        runs[name] = run = _both_passes(bench, model, x, nullcontext if name == "ours" else None)
        for _ in range(3):
            run()
            if name == "ours":
                halfstep.advance(model)
        launched[name] = _launched(run) if bench.on_gpu else 0
    times: dict[str, list[float]] = {name: [] for name in runs}
    calls = _CALLS if bench.on_gpu else 1
    for _ in range(5 if bench.on_gpu else 1):
        for name, run in runs.items():
            synchronize = torch.cuda.synchronize if bench.on_gpu else int
            synchronize()
            started = time.perf_counter()
            for _ in range(calls):
                run()
            synchronize()
            times[name].append(1000 * (time.perf_counter() - started) / calls / _DEEP)
    measures = {
        "to bf16": median(a / b for a, b in zip(times["ours"], times["bf16"], strict=True)),
        "launches beyond torch's": (launched["ours"] - launched["bf16"]) / _DEEP,
    }
    return {"measures": measures, "ms": {k: median(v) for k, v in times.items()}, "shape": HOST, "launches": launched}


def _launched(run: Run) -> int:
    """The number of kernels, copies and fills that a call launches."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def _plain(bench: Bench, side: int) -> nn.Linear:
    return nn.Linear(side, side, bias=False, device=bench.device)


def _ours(bench: Bench, recipe: str, x: Tensor, grad: Tensor) -> Run:
    """Forward and backward under a recipe, after two steps of its scaling states."""
    model = Layer(_plain(bench, x.shape[1]), grad)
    halfstep.apply(model, recipe)
    run = _both_passes(bench, model, x, nullcontext)
    for _ in range(2):
        run()
        halfstep.advance(model)
    return run


def _both_passes(
    bench: Bench, model: nn.Module, x: Tensor, context: Callable[[], AbstractContextManager[Any]] | None = None
) -> Run:
    """A function that runs forward under a context (default: bf16 autocast), then backward, with new gradients each
    time."""

    def autocast() -> AbstractContextManager[Any]:
        return torch.autocast(bench.device.type, torch.bfloat16)

    entered = context or autocast

    def run() -> None:
        x.grad = None
        model.zero_grad(set_to_none=True)
        with entered():
            end = model(x)
        end.backward()

    return run
