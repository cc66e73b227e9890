"""Steps of many tensors by Triton kernels against the rules, bit for bit: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.kernels.gpu.kinds import Tensors
from halfstep.kernels.gpu.optimizer import Steps
from halfstep.kernels.selftest import Case, Outcome, hard, outcome
from halfstep.ops.code_tensor import CodeTensor, round_gradient
from halfstep.ops.code_tensor import parameter as code_parameter
from halfstep.optim.classes import Lamb, Lion
from halfstep.optim.conversion import convert
from halfstep.optim.lowbit import LowBit
from halfstep.optim.rules.adam import adamw
from halfstep.optim.rules.base import never
from halfstep.optim.together import Together
from halfstep.recipe import DTYPES, Recipe, get_recipe


SIZES = (0, 1, 17, 1024, 4096 + 259)
"""Of the tensors of one launch: none, few, a block, and several of them with a rest."""
_LARGE = 17
_RECIPES = (
    "fp32", "bf16-master", "bf16-pure", "bf16-stochastic", "bf16-split", "bf16-kahan", "bf16-collage-light",
    "bf16-collage-plus", "bf16-7byte", "fp16-pure", "fp16-master", "fp8-adam", "adamw-8bit",
    "coat", "fp8-fishman", "fp8lm-o1", "fp8lm-o2", "fp8lm-o3",
)  # fmt: skip
_OTHERS = ("fp32", "bf16-master", "bf16-stochastic", "adamw-8bit")
_SCALE = 8.0
GRADIENTS: dict[str, Callable[[int], Tensor]] = {
    "ordinary": torch.randn,
    "wide": lambda size: hard(size).nan_to_num(0.0).clamp(-1e15, 1e15),
    "hard": hard,
}
"""By kind: what one scale of a tensor can hold, and what it cannot."""
Make = Callable[[list[nn.Parameter]], Any]
"""The torch optimizer of some parameters."""


def outcomes(device: torch.device) -> Iterator[Outcome]:
    """Test every rule and way of keeping numbers, on tensors there: on a CPU Triton's interpreter must be on."""
    for kernel, name, test in tests():
        yield outcome(f"gpu {kernel}", name, partial(test, device=device))


def tests() -> Iterator[tuple[str, str, Callable[..., Iterator[Case]]]]:
    """As `kernels.selftest_gpu.tests`, by recipe."""
    for kernel, names, make in _OPTIMIZERS:
        for name in names:
            yield kernel, name, partial(_steps, make=make)
    yield "adamw of parts", "bf16-stochastic", _parts


def _steps(name: str, device: torch.device, make: Make) -> Iterator[Case]:
    yield from stepped_by(get_recipe(name), device, make)


def stepped_by(recipe: Recipe, device: torch.device, make: Make | None = None) -> Iterator[Case]:
    """Weights and states after steps under that recipe, of AdamW unless another optimizer is made."""
    make = make or _adamw
    weights = [
        torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float32, device="cpu")
        for size in SIZES
    ]
    for kind, gradient in GRADIENTS.items():
        grads = [[gradient(size) * 1e-3**k for size in SIZES] for k in range(2)]
        expected, _ = _stepped(recipe, weights, grads, make, None)
        found, together = _stepped(recipe, weights, grads, make, device)
        if not together:
            continue  # the kernels take no such tensors: that is no case
        for key, tensor in expected.items():
            yield (
                tensor,
                found[key].cpu(),
                torch.empty(0, dtype=torch.float32, device="cpu"),
                f"{kind} gradients, {key}",
            )


def _parts(name: str, device: torch.device) -> Iterator[Case]:
    """Parts of a tensor, as ranks have them, move as they do in the whole: noise is that of their places there."""
    whole = torch.randn(
        40, 30, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float32, device="cpu"
    ).bfloat16()
    parameter = nn.Parameter(whole.clone())
    optimizer = convert(_plain([parameter]), get_recipe(name), {}, 7)
    optimizer.rule = replace(optimizer.rule, fused=never, options=None)
    parameter.grad = whole.clone()
    optimizer.step()
    (group,) = optimizer.param_groups
    options = adamw.options(group) if adamw.options else None
    assert options is not None
    for rows, columns, place in _PARTS:
        weight = whole[rows, columns].to(device, copy=True).contiguous()
        moments = torch.zeros_like(weight, dtype=torch.float32), torch.zeros_like(weight, dtype=torch.float32)
        tensors = Tensors(
            weight, weight.clone(), torch.zeros((), device=device, dtype=torch.float32), "none", {}, moments, None,
            "stochastic", place, group["rounding_seed"], 0, 0,
        )  # fmt: skip
        Steps([tensors], [options]).run(None, None)
        yield (
            parameter.detach()[rows, columns],
            weight.cpu(),
            torch.empty(0, dtype=torch.float32, device="cpu"),
            f"the part that begins at {place[0]}",
        )


_PARTS = (
    (slice(0, 13), slice(0, 30), (0, 7800, 24000)),
    (slice(13, 40), slice(0, 30), (7800, 16200, 24000)),
    (slice(0, 40), slice(7, 30), (140, 460, 600)),
    (slice(20, 40), slice(0, 7), (12000, 140, 600)),
)
"""Rows and columns of a tensor of 40, 30 and 20, and where they lie: start, run and stride."""


def _stepped(
    recipe: Recipe,
    weights: list[Tensor],
    grads: list[list[Tensor]],
    make: Make,
    device: torch.device | None,
) -> tuple[dict[str, Tensor], bool]:
    """Weights and states after those gradients, by the rule on a CPU or together on a device; whether all were so."""
    parameters = [_parameter(w.to(device or "cpu"), recipe) for w in weights]
    has_masters = recipe.master or recipe.codes
    masters = {p: w.to(p.device, copy=True) for p, w in zip(parameters, weights, strict=True)} if has_masters else {}
    optimizer = convert(make(parameters), recipe, masters, 7)
    if device is None:
        optimizer.rule = replace(optimizer.rule, fused=never, options=None)
    else:
        optimizer._together = Together(anywhere=True)
    for number, step in enumerate(grads):
        for parameter, grad in zip(parameters, step, strict=True):
            parameter.grad = grad.to(parameter.device, parameter.dtype)
            if isinstance(parameter, CodeTensor):
                round_gradient(parameter)
        scaled(optimizer, parameters[0].device, overflowed=False)
        if not number:
            scaled(optimizer, parameters[0].device, overflowed=True)  # moves nothing
        with torch.no_grad():
            for parameter in parameters:
                parameter[::7] = 0.0  # as a mask would: what is kept beside them follows
    states = {
        f"{key} of {len(p)}": state for p in parameters for key, state in optimizer.state[p].items()
        if isinstance(state, Tensor)
    }  # fmt: skip
    found = {f"weight of {len(p)}": p.detach() for p in parameters if not isinstance(p, CodeTensor)}
    for p in parameters:
        if isinstance(p, CodeTensor):
            found |= {f"{part} of the weight of {len(p)}": tensor for part, tensor in p.parts.items()}
    return found | states, optimizer._together.all


def _parameter(weight: Tensor, recipe: Recipe) -> Any:
    """A parameter of those values: a large one as the recipe keeps weights that rules round."""
    if recipe.codes is None or weight.numel() < _LARGE:
        return nn.Parameter(weight.to(DTYPES[recipe.weights], copy=True))
    grads = recipe.codes.grads.quantizer if recipe.codes.grads else None
    return code_parameter(CodeTensor.encode(weight, recipe.codes.weights.quantizer), grads=grads)


def scaled(optimizer: LowBit, device: torch.device, overflowed: bool) -> None:
    """A step whose gradients were multiplied by a scale, or overflowed, as loss scalers tell optimizers."""
    optimizer.grad_scale = torch.full((), _SCALE, device=device, dtype=torch.float32)  # type: ignore[attr-defined]
    optimizer.found_inf = torch.full((), float(overflowed), device=device, dtype=torch.float32)  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


def _halves(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups, of which the second has options of its own."""
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 3e-3, "weight_decay": 0.0}]


def _plain(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_halves(parameters), lr=1e-2, weight_decay=0.1)


def _adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(_halves(parameters), lr=1e-2, weight_decay=0.1, maximize=True)


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(_halves(parameters), lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.1)


def _nesterov(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(_halves(parameters), lr=1e-2, momentum=0.9, nesterov=True)


def _descent(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(_halves(parameters), lr=1e-2, weight_decay=0.1)


def _lion(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Lion(_halves(parameters), lr=1e-2, weight_decay=0.1)


def _lamb(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Lamb(_halves(parameters), lr=1e-2, weight_decay=0.1)


def _nadam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.NAdam(_halves(parameters), lr=1e-2, weight_decay=0.1)


def _rmsprop(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(_halves(parameters), lr=1e-2, centered=True)


def _adagrad(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(_halves(parameters), lr=1e-2, lr_decay=0.1, maximize=True)


_OPTIMIZERS: tuple[tuple[str, tuple[str, ...], Make], ...] = (
    ("adamw", _RECIPES, _adamw),
    ("adam", _OTHERS, _adam),
    ("sgd", _OTHERS, _sgd),
    ("nesterov", ("fp32",), _nesterov),
    ("descent", ("fp32",), _descent),
    ("lion", _OTHERS, _lion),
    ("lamb", (*_OTHERS, "bf16-collage-plus", "coat", "fp8-fishman", "fp8lm-o3"), _lamb),
    ("nadam", ("fp32", "adamw-8bit"), _nadam),
    ("rmsprop", ("fp32", "adamw-8bit"), _rmsprop),
    ("adagrad", ("fp32",), _adagrad),
)
