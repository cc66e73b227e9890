"""The host time of a layer, of `scaler.update` and of an optimizer step on a GPU, measured without a GPU.

CPU tensors stand in for CUDA's. Triton's launches and `scaled_mm` are replaced by functions that do nothing but count:
measured is all that halfstep and torch do around them. torch's Linear under bf16 autocast and its
fused AdamW are timed for comparison, on tensors so small that their arithmetic takes little. Every round runs each in
turn, in one process and thread, by process CPU time; a ratio is the median over rounds. On a GPU torch's own
operations, allocations and launches cost more; `make bench-gpu` measures that.

    python benchmarks/host.py [--keep] [--rounds 30]

Needs Triton, for its decorators of kernels: PYTHONPATH=.triton/3.7.1, or torch for CUDA.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from halfstep.kernels import gpu, operator, operators, scaled_mm
from halfstep.kernels.gpu import amax, blocks, history, layouts
from halfstep.lab.environment import environment
from halfstep.ops import native, operand
from halfstep.optim.stepping import StepPlan
from halfstep.quant.scaling import StatefulScaling
from on_gpu.products import Sink


KEPT = Path(__file__).parent / "results" / "host.json"
LAYERS = {
    "fp8-current": (9, 0), "fp8-delayed": (9, 0), "fp8-rowwise": (9, 0), "fp8-block": (9, 0), "mxfp8": (10, 0),
    "nvfp4": (10, 0),
}  # fmt: skip
"""Recipes, with the compute capability of the simulated GPU."""
OPTIMIZERS = ("fp32", "bf16-stochastic", "bf16-split", "fp8-adam")
BARE = "bare"
DEEP, SIDE, STATES, TENSORS = 8, 128, 155, 300
BARS = {"fp8-current": 2.0, "fp8-delayed": 2.0, "fp8-rowwise": 2.5, "fp8-block": 2.5, "mxfp8": 2.5, "nvfp4": 3.3}
BARS |= {"update": 2.0} | dict.fromkeys(OPTIMIZERS, 1.0)
"""The largest allowed ratio to the time of torch's Linear, or of its fused AdamW."""
launches: list[str] = []


class Nothing:
    """A stand-in for a compiled kernel: launching it only records its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._run

    def _run(self, *arguments: Any) -> None:
        launches.append(self._name)


def stand_in() -> None:
    """Patch halfstep so that CPU tensors take the code paths of CUDA tensors."""

    def first(self: gpu.Launch, grid: int, key: tuple[bool | None, ...], arguments: tuple[Any, ...]) -> None:
        self._compiled[key] = Nothing(self._kernel.fn.__name__)

    def product(a: Tensor, b: Tensor, *_: Any, output_dtype: torch.dtype = torch.bfloat16, **__: Any) -> Tensor:
        return torch.empty(a.shape[0], b.shape[1], dtype=output_dtype)

    gpu.Launch._first = first  # type: ignore[method-assign]
    F.scaled_mm = product  # type: ignore[attr-defined]
    for kind in (StatefulScaling, *StatefulScaling.__subclasses__()):
        kind.waits = lambda self, state: True  # type: ignore[method-assign,attr-defined]
    for module in (native, blocks, layouts):
        module.plain = gpu.is_dense  # type: ignore[attr-defined]
    operators.on_cpu = history  # type: ignore[attr-defined]
    operand.amax_of = amax.run  # type: ignore[assignment]
    operator.here = lambda tensor: True  # type: ignore[assignment]


def layer(recipe: str | None, kind: type[nn.Linear] = nn.Linear) -> Callable[[], None]:
    """A function that runs forward and backward of DEEP linear layers: under a recipe, or as they are."""
    side = 16 if recipe is None and kind is nn.Linear else SIDE
    model = nn.Sequential(*(kind(side, side, bias=False) for _ in range(DEEP)))
    stepper: torch.optim.Optimizer | None = None

    def capability(device: torch.device) -> tuple[int, int]:
        return LAYERS.get(recipe, (9, 0))

    scaled_mm.capability = capability
    if recipe is not None:
        _, stepper, _ = halfstep.prepare(model, torch.optim.AdamW(model.parameters()), recipe)
    x, grad = torch.randn(side, side).bfloat16().requires_grad_(), torch.randn(side, side).bfloat16()

    def run(_: Any = stepper) -> None:  # keeps the optimizer alive: the model follows it while it exists
        x.grad = None
        model.zero_grad()
        scaled_mm.capability = capability
        with torch.autocast("cpu", torch.bfloat16) if kind is nn.Linear and recipe is None else nullcontext():
            y = model(x)
        Sink.apply(y, grad).backward()

    return run


class Bare(torch.autograd.Function):
    """The allocations, launches and GEMMs of an fp8-current layer, without any decisions, checks or preparation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        one, other = rounded(x), rounded(weight)
        ctx.save_for_backward(one[1], one[2], other[1], other[2])
        return F.scaled_mm(one[0], other[0].t(), one[2], None, other[2], None)  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        one, turned, scale = rounded(grad)
        grad_x = F.scaled_mm(one, weight.t(), scale, None, weight_scale, None)  # type: ignore[attr-defined]
        return grad_x, F.scaled_mm(turned, x.t(), scale, None, x_scale, None).float()  # type: ignore[attr-defined]


def rounded(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate codes in both layouts and their scale, with two launches."""
    one, other = (torch.empty(shape, dtype=torch.float8_e4m3fn) for shape in (x.shape, x.shape[::-1]))
    scale, found = torch.empty((), dtype=torch.float32), torch.zeros((), dtype=torch.float32)
    _AMAX[1, 1, 1](x, found)
    _CODES[1, 1, 1](x, one, other, scale, found)
    return one, other, scale


_AMAX, _CODES = Nothing("amax"), Nothing("codes")


class BareLinear(nn.Linear):
    """A linear layer that runs `Bare`."""

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear`, without a bias."""
        return Bare.apply(x, self.weight)  # type: ignore[no-any-return,no-untyped-call]


def update() -> Callable[[], None]:
    """A function that runs `scaler.update()` under fp8-delayed, for a model with three scaling states per layer."""
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(STATES)))
    model, stepper, scaler = halfstep.prepare(model, torch.optim.AdamW(model.parameters()), "fp8-delayed")
    scaler.scale(model(torch.randn(16, 16).bfloat16()).sum()).backward()

    return lambda _=stepper: scaler.update()  # as above


def optimizer(recipe: str | None) -> Callable[[], None]:
    """A function that runs an optimizer step over many tensors, whose gradients have other addresses each time."""
    model = nn.Module()
    model.weights = nn.ParameterList(nn.Parameter(torch.zeros(*((16, 24), (24,))[i % 2])) for i in range(TENSORS))
    stepper: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if recipe is not None:
        _, stepper, _ = halfstep.prepare(model, stepper, recipe, generator=7)
        stepper._together = StepPlan(anywhere=True)  # type: ignore[attr-defined]
    weights = list(model.parameters())
    sets = [[torch.zeros_like(weight) for weight in weights] for _ in range(2)]

    def run() -> None:
        sets.reverse()
        for weight, grad in zip(weights, sets[0], strict=True):
            weight.grad = grad
        stepper.step()

    return run


def measured(
    ours: dict[str, Callable[[], None]],
    peer: Callable[[], None],
    rounds: int,
    calls: int,
    parts: int = 1,
    peers: int = 1,
) -> dict[str, Any]:
    """By name: the microseconds of one of the `parts` of a call, its ratio to one of the peer's parts, and its
    launches."""
    found: dict[str, Any] = {}
    for name, run in ours.items():
        for _ in range(3):
            run()
        launches.clear()
        run()
        found[name] = {"launches": len(launches) / parts}
    times: dict[str, list[float]] = {name: [] for name in (*ours, "")}
    for _ in range(rounds):
        for name, run in (*ours.items(), ("", peer)):
            started = time.process_time()
            for _ in range(calls):
                run()
            times[name].append((time.process_time() - started) / calls)
    for name in ours:
        ratio = peers / parts * statistics.median(a / b for a, b in zip(times[name], times[""], strict=True))
        us, peer_us = (1e6 * statistics.median(times[each]) / of for each, of in ((name, parts), ("", peers)))
        found[name] |= {
            "of the peer's": round(ratio, 2),
            "bar": BARS.get(name),
            "us": round(us, 1),
            "peer us": round(peer_us, 1),
        }
    return found


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help=f"write {KEPT.name}")
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch_layer, torch_step = layer(None), optimizer(None)
    stand_in()
    rounds = arguments.rounds
    layers = {name: layer(name) for name in LAYERS} | {BARE: layer(None, BareLinear)}
    rows = measured(layers, torch_layer, rounds, 5, DEEP, DEEP)
    rows |= measured({"update": update()}, torch_layer, rounds, 5, 1, DEEP)
    rows |= measured({name: optimizer(name) for name in OPTIMIZERS}, torch_step, rounds, 4)
    for name, row in rows.items():
        print(f"{name:16}", *(f"{key} {value}" for key, value in row.items()), sep="  ")
    if arguments.keep:
        setup = {"layers": DEEP, "states": 3 * STATES, "tensors": TENSORS, "rounds": rounds, **environment()}
        KEPT.write_text(json.dumps({"setup": setup, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
