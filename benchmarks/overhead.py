"""The overhead of halfstep for small layers: a step of eight 64 x 64 layers compared with a plain torch loop.

Every round runs a few steps of each loop in turn, in one process and one thread, and takes the process's CPU time; a
ratio is the median over rounds of a recipe's time over that of the plain float32 loop in the same round. Compared with
the recipes are torch's own means: `torch.autocast` (as bf16-mixed), and torchao's float8 training, emulated as
halfstep's is on a CPU (as fp8-current). `bare` is an autograd Function with fp8-current's roundings and GEMMs by
the same kernels, without decisions, checks or records, and torch's fused AdamW: the least that Python and torch take.

Two more races, of 300 small tensors: an optimizer's step, compared with torch's fused AdamW; and a step with a loss
scale and clipping, compared with torch.amp.GradScaler, clip_grad_norm_ and that AdamW.

    python benchmarks/overhead.py [--keep] [--rounds 60] [--recipes A,B]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

import halfstep
from halfstep import formats
from halfstep.kernels import carried
from halfstep.kernels.cpu import cast
from halfstep.quant.scaling import get_scaling


LAYERS, WIDTH, BATCH, STEPS = 8, 64, 32, 10
BARS = {"fp32": 1.1, "bf16-mixed": 1.3, "fp8-current": 2.2, "fp8-delayed": 2.2, "coat": 5.0}
"""The largest allowed ratio to the plain loop's time."""
KEPT = Path(__file__).parent / "results" / "overhead.json"
TENSORS = 300
STEPPED, SCALED = ("fp32", "bf16-mixed", "bf16-stochastic", "bf16-master"), ("fp16-mixed", "bf16-mixed")


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, with the same initial weights in each call, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def plain(
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model, fused: bool | None = None
) -> Callable[[], None]:
    """A function that runs STEPS steps of a plain training loop of the float32 model, or of the model that `wrap`
    returns."""
    model = wrap(model_and_optimizer()[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    x = torch.randn(BATCH, WIDTH)

    def steps() -> None:
        for _ in range(STEPS):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return steps


def prepared(recipe: str) -> Callable[[], None]:
    """A function that runs the same steps under a recipe."""
    model, optimizer, scaler = halfstep.prepare(*model_and_optimizer(), recipe)
    x = torch.randn(BATCH, WIDTH)

    def steps() -> None:
        for _ in range(STEPS):
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    return steps


class Autocast(nn.Module):
    """A model under torch.autocast to bf16, with its output in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The model's forward."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output: torch.Tensor = self.model(x)
        return output.float()


def torchao(model: nn.Module) -> nn.Module:
    """The model under torchao's float8 training with one scale per tensor."""
    made: nn.Module = convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    return made


class Bare(torch.autograd.Function):
    """The autograd Function of a linear layer with fp8-current's arithmetic."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """x w^T + b, in bf16."""
        (x, x_scale), (weight, weight_scale) = rounded(x, "e4m3fn"), rounded(weight, "e4m3fn")
        ctx.save_for_backward(x, x_scale, weight, weight_scale)
        return carried.run_native(x, weight.t(), bias, x_scale * weight_scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        """The gradients of x, in bf16, and of weight and bias, in float32."""
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        values, scale = rounded(grad, "e5m2")
        grad_x = carried.run_native(values, weight, None, scale * weight_scale)
        return grad_x, carried.run_native(values.t(), x, None, scale * x_scale).float(), grad.sum(0).float()


def rounded(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """A matrix rounded to the format over its scale, in bf16; and the scale."""
    made = cast.run_whole(x, torch.bfloat16, formats.get(format), "nearest_even", CURRENT, None, False)
    assert made is not None
    return made[:2]


class BareLinear(nn.Linear):
    """A linear layer that runs `Bare`."""

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear`."""
        return Bare.apply(x, self.weight, self.bias)  # type: ignore[no-any-return,no-untyped-call]


def bare(model: nn.Module) -> nn.Module:
    """The model with `BareLinear` layers of the same parameters."""
    for layer in model.children():
        layer.__class__ = BareLinear
    return model


CURRENT = get_scaling("current")
PEERS: dict[str, Callable[[nn.Module], nn.Module]] = {"torch.autocast": Autocast, "torchao float8": torchao}


def many() -> nn.ParameterList:
    """Small parameters with gradients."""
    found = nn.ParameterList(nn.Parameter(torch.randn(*((16, 24), (24,))[i % 2])) for i in range(TENSORS))
    for parameter in found:
        parameter.grad = torch.randn_like(parameter)
    return found


def step_of_many(recipe: str | None) -> Callable[[], None]:
    """A function that steps 300 tensors: under a recipe, or by torch's fused AdamW."""
    model = many()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if recipe is not None:
        _, optimizer, _ = halfstep.prepare(model, optimizer, recipe)
        for parameter in model:
            parameter.grad = torch.randn_like(parameter)
    return lambda: optimizer.step()


def scaled_step_of_many(recipe: str | None) -> Callable[[], None]:
    """A function that unscales, clips and steps 300 tensors: under a recipe, or as torch does."""
    model = many()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=1.0)
    if recipe is not None:
        _, optimizer, scaler = halfstep.prepare(model, optimizer, recipe)
    parameters, loss = list(model), torch.ones(())
    grads = [torch.randn_like(parameter) for parameter in parameters]

    def step() -> None:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        scaler.scale(loss)
        if recipe is None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, 1e9)
        else:
            scaler.clip_grad_norm_(optimizer, 1e9)
        scaler.step(optimizer)
        scaler.update()

    return step


def race(loops: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """By name, the ratio of a loop's time to that of the loop named "" in each round."""
    ratios: dict[str, list[float]] = {name: [] for name in loops if name}
    for number in range(rounds + 2):  # two to warm up
        taken = {}
        for name, steps in loops.items():
            begun = time.process_time()
            steps()
            taken[name] = time.process_time() - begun
        for name in ratios if number >= 2 else ():
            ratios[name].append(taken[name] / taken[""])
    return ratios


def shown(ratios: dict[str, list[float]], peer: str) -> dict[str, Any]:
    """The medians and quartiles by name, printed."""
    found = {}
    for name, each in ratios.items():
        low, middle, high = statistics.quantiles(each, n=4)
        found[name] = {"median": round(middle, 3), "quartiles": [round(low, 3), round(high, 3)]}
        bar = BARS.get(name) if peer == PLAIN else None
        verdict = "" if bar is None else f", at most {bar} wanted: {'kept' if middle <= bar else 'missed'}"
        print(f"{name:16} {middle:5.2f} of {peer} (quartiles {low:.2f}, {high:.2f}){verdict}")
    return found


PLAIN = "the plain loop"


def main() -> None:
    """Time all, print, and with --keep write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipes", default=",".join(BARS))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--keep", action="store_true", help=f"write {KEPT.name}")
    given = parser.parse_args()
    torch.set_num_threads(1)
    loops = {"": plain(), **{peer: plain(wrap) for peer, wrap in PEERS.items()}, "bare": plain(bare, fused=True)}
    found = shown(race(loops | {name: prepared(name) for name in given.recipes.split(",")}, given.rounds), PLAIN)
    races = {"step": (step_of_many, STEPPED, "fused AdamW"), "scaled": (scaled_step_of_many, SCALED, "torch's")}
    many_found = {
        what: shown(race({"": of(None), **{name: of(name) for name in names}}, given.rounds), f"{peer}, {what}")
        for what, (of, names, peer) in races.items()
    }
    if given.keep:
        setup = {"layers": LAYERS, "width": WIDTH, "batch": BATCH, "rounds": given.rounds, "torch": torch.__version__}
        KEPT.write_text(
            json.dumps({"setup": setup, "of_plain": found, "bars": BARS, "of_300_tensors": many_found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
