"""Find out which gradients are not finite, on this rank and on all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import LossScaleError


_NONE = 2.0  # what a rank without gradients says; 1 is an overflow, 0 none


@torch.no_grad()
def find_nonfinite(
    named: Sequence[tuple[str, Tensor]], device: torch.device, process_group: Any
) -> tuple[bool, tuple[str, ...]]:
    """Whether any rank has a gradient with an infinity or NaN, and the names of those on this one.

    Args:
        named: this rank's gradients.
        device: where ranks exchange what they found.
        process_group: over which they do; None is the default group where there is one.

    Raises:
        LossScaleError: a rank has no gradient: all ranks say so, or the others would wait for it for ever.
    """
    finite = [_all_finite(_local(grad)).to(device) for _, grad in named]
    fine = torch.stack(finite) if finite else torch.zeros(0, dtype=torch.bool, device=device)
    found = (~fine.all()).float() if finite else torch.full((), _NONE, device=device)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=process_group)
    if float(found) == _NONE:
        where = "on another rank no parameter" if named else "no parameter"
        raise LossScaleError(
            f"{where} of the optimizer has a gradient; call scaler.scale(loss).backward() first. If you did, something "
            "has replaced the model's parameters: under FSDP2 call halfstep.apply(model, recipe), then fully_shard, "
            "build the optimizer on the sharded parameters, and hand it to halfstep.optimize(model, optimizer)"
        )
    return bool(found), tuple(name for (name, _), ok in zip(named, fine.tolist(), strict=True) if not ok)


def _local(grad: Tensor) -> Tensor:
    """This rank's part of a sharded gradient."""
    to_local = getattr(grad, "to_local", None)
    return grad if to_local is None else to_local()


def _all_finite(grad: Tensor) -> Tensor:
    """Whether every element is finite, in one read: the extremes of a tensor with a NaN are NaN."""
    if not grad.numel():
        return torch.ones((), dtype=torch.bool, device=grad.device)
    return torch.stack(torch.aminmax(grad)).isfinite().all()
