"""Find out which gradients are not finite, on this rank and on all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import LossScaleError
from halfstep.ops import grad_values


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


@torch.no_grad()
def find_nonfinite(named: Sequence[tuple[str, Tensor]], process_group: Any) -> tuple[bool, tuple[str, ...]]:
    """Whether any rank has a gradient with an infinity or NaN, and the names of those on this one.

    Raises:
        LossScaleError: there is no gradient.
    """
    if not named:
        raise LossScaleError("no parameter of the optimizer has a gradient; call scaler.scale(loss).backward() first")
    device = named[0][1].device
    finite = torch.stack([_all_finite(_local(grad)).to(device) for _, grad in named])
    flag = (~finite.all()).float()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=process_group)
    return bool(flag), tuple(name for (name, _), ok in zip(named, finite.tolist(), strict=True) if not ok)


def _local(grad: Tensor) -> Tensor:
    """This rank's part of a sharded gradient."""
    to_local = getattr(grad, "to_local", None)
    return grad if to_local is None else to_local()


def _all_finite(grad: Tensor) -> Tensor:
    """Whether every element is finite, in one read: the extremes of a tensor with a NaN are NaN."""
    if not grad.numel():
        return torch.ones((), dtype=torch.bool, device=grad.device)
    return torch.stack(torch.aminmax(grad_values(grad))).isfinite().all()
