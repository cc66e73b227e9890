"""What a loss scaler does to an optimizer's gradients: name them, measure them, multiply them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import LossScaleError
from halfstep.ops.subclasses import foreign
from halfstep.optim.overflow import alike
from halfstep.optim.shards import local
from halfstep.optim.widened import can_widen, is_marked, mark, narrow, widen


def late(device: torch.device) -> bool:
    """Whether the host would have to wait for a number that is there: then it is not read within a step."""
    return device.type == "cuda"


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Its parameters, in order."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def named_grads(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> list[tuple[str, Tensor]]:
    """The gradients that an optimizer will step on, by parameter name; of a sparse one, its stored values."""
    every = zip(names_of(optimizer, names), grads_of(optimizer), strict=True)
    return [(name, grad) for name, grad in every if grad is not None]


def names_of(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> tuple[str, ...]:
    """The names of all of its parameters, in order."""
    return tuple(
        names.get(parameter, f"parameter {p} of group {g}")
        for g, group in enumerate(optimizer.param_groups)
        for p, parameter in enumerate(group["params"])
    )


def grads_of(optimizer: torch.optim.Optimizer) -> list[Tensor | None]:
    """The gradients of all of its parameters, in order; of a sparse one, its stored values."""
    grads = [parameter.grad for parameter in parameters_of(optimizer)]
    return [grad._values() if grad is not None and grad.is_sparse else grad for grad in grads]


def takes_float32(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer steps on float32 gradients of 16-bit parameters (`LowBit` does, torch's do not)."""
    return bool(getattr(optimizer, "takes_float32_gradients", False))


def total_norm(grads: Sequence[Tensor], norm_type: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """The norm of all gradients together, taken in that dtype; a plain tensor, of all ranks where they are sharded."""
    norms = [torch.linalg.vector_norm(grad, norm_type, dtype=dtype) if _alone(grad) else grad for grad in grads]
    for places, members in alike([None if _alone(grad) else grad for grad in grads]):
        for place, one in zip(places, torch._foreach_norm(members, norm_type, dtype=dtype), strict=True):
            norms[place] = one
    whole = [_plain(norm) for norm in norms]
    norm: Tensor = torch.linalg.vector_norm(torch.stack([n.to(whole[0].device) for n in whole]), norm_type)
    return norm


def _alone(grad: Tensor) -> bool:
    """Whether its norm is not taken beside others': it is spread over ranks, or in codes, or empty."""
    return foreign(grad) is not None or not grad.numel()


@torch.no_grad()
def multiply(optimizer: torch.optim.Optimizer, factor: float | Tensor, names: Mapping[nn.Parameter, str]) -> None:
    """Multiply every gradient where it is, in float32; 16-bit ones leave for float32 where the optimizer takes that.

    A factor that is a tensor is a float32 scalar, and no gradient is then looked at one by one.

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
    if isinstance(factor, Tensor):
        _multiply_together(parameters, factor, wide)
        return
    for parameter in parameters:
        grad = parameter.grad
        assert grad is not None
        mark(grad)
        if wide and _half(grad) and can_widen(parameter):
            widen(parameter, grad.to(torch.float32).mul_(factor))
        else:
            grad.mul_(factor)


def _multiply_together(parameters: Sequence[Tensor], factor: Tensor, wide: bool) -> None:
    """The same in few launches, whatever the number of gradients."""
    leaving = [p for p in parameters if wide and _half(p.grad) and can_widen(p)]
    for parameter, grad in zip(leaving, _float32([p.grad for p in leaving if p.grad is not None]), strict=True):
        widen(parameter, grad)
    grads = [p.grad for p in parameters if p.grad is not None]
    for grad in grads:
        mark(grad)
    for _, members in alike([local(grad._values() if grad.is_sparse else grad) for grad in grads]):
        if foreign(members[0]) is not None:
            members[0].mul_(factor)
        elif _half(members[0]):  # in which a factor of their device would be rounded first
            copies = _float32(members)
            torch._foreach_mul_(copies, factor.to(members[0].device))
            torch._foreach_copy_(members, copies)
        else:
            torch._foreach_mul_(members, factor.to(members[0].device))


def _float32(grads: Sequence[Tensor]) -> list[Tensor]:
    """Copies in float32."""
    wide = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
    for places, members in alike([local(grad) for grad in grads]):
        torch._foreach_copy_([local(wide[place]) for place in places], members)
    return wide


def _half(grad: Tensor | None) -> bool:
    return grad is not None and grad.dtype in (torch.float16, torch.bfloat16)


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
