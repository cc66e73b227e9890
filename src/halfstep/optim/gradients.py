"""What a loss scaler does to an optimizer's gradients: name them, measure them, multiply them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import LossScaleError
from halfstep.optim.widened import can_widen, is_marked, mark, narrow, widen


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Its parameters, in order."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def named_grads(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> list[tuple[str, Tensor]]:
    """The gradients that an optimizer will step on, by parameter name; of a sparse one, its stored values."""
    found = []
    for g, group in enumerate(optimizer.param_groups):
        for p, parameter in enumerate(group["params"]):
            grad = parameter.grad
            if grad is not None:
                name = names.get(parameter, f"parameter {p} of group {g}")
                found.append((name, grad._values() if grad.is_sparse else grad))
    return found


def takes_float32(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer steps on float32 gradients of 16-bit parameters (`LowBit` does, torch's do not)."""
    return bool(getattr(optimizer, "takes_float32_gradients", False))


def total_norm(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of all gradients together, taken in float32; over all ranks where they are sharded, a plain tensor."""
    norms = [_plain(torch.linalg.vector_norm(grad, norm_type, dtype=torch.float32)) for grad in grads]
    norm: Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]), norm_type)
    return norm


@torch.no_grad()
def multiply(optimizer: torch.optim.Optimizer, factor: float, names: Mapping[nn.Parameter, str]) -> None:
    """Multiply every gradient where it is, in float32; 16-bit ones leave for float32 where the optimizer takes that.

    Raises:
        LossScaleError: a gradient is fp16 and cannot leave: its small values would become zero. Nothing was changed.
    """
    wide = takes_float32(optimizer)
    parameters = [parameter for parameter in parameters_of(optimizer) if parameter.grad is not None]
    stuck = [
        name
        for parameter, (name, grad) in zip(parameters, named_grads(optimizer, names), strict=True)
        if grad.dtype == torch.float16 and not (wide and can_widen(parameter))
    ]
    if stuck:
        raise LossScaleError(
            f"dividing or clipping fp16 gradients in place would flush small ones to zero ({stuck[0]} and "
            f"{len(stuck) - 1} more). {_REMEDY if wide else _STOCK_REMEDY}"
        )
    for parameter in parameters:
        grad = parameter.grad
        assert grad is not None
        mark(grad)
        if grad.dtype in (torch.float16, torch.bfloat16) and wide and can_widen(parameter):
            widen(parameter, grad.to(torch.float32).mul_(factor))
        else:
            grad.mul_(factor)


_REMEDY = (
    "They can leave for float32 with torch 2.10 or newer; with this one leave the division to scaler.step(optimizer), "
    "without clipping, or train under 'fp16-mixed', whose gradients are float32"
)
_STOCK_REMEDY = (
    "Step with an optimizer from halfstep.prepare (or halfstep.optim.convert), which takes them in float32; a fused "
    "one from torch divides inside scaler.step(optimizer), without clipping"
)


def gone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the gradients have been dropped: none is there, or all are zeros."""
    return not any(p.grad is not None and bool(p.grad.any()) for p in parameters_of(optimizer))


def treated(optimizer: torch.optim.Optimizer) -> bool:
    """Whether gradients that `multiply` saw are there still."""
    return any(is_marked(parameter.grad) for parameter in parameters_of(optimizer))


def narrow_all(optimizer: torch.optim.Optimizer) -> None:
    """Gradients that are no longer there will be of their parameters' own dtype again."""
    for parameter in parameters_of(optimizer):
        narrow(parameter)


def _plain(tensor: Any) -> Tensor:
    """The whole of a sharded tensor, on every rank."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole
