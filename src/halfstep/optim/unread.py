"""Clipping and stepping by numbers that stay on a GPU: the host waits for none of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfstep.optim.pending import Pending


def clipping(norm: Tensor, divisor: Tensor, max_norm: float, in_float32: bool) -> tuple[Tensor, Tensor]:
    """The norm of gradients that are divided by `divisor`, and what they are multiplied by so that it is at most
    `max_norm`: float32 scalars there.

    Args:
        norm: of the gradients as they are.
        in_float32: they are multiplied once, in float32, by the number that the update would divide by.
    """
    divisor = divisor.double()
    norm = (norm / divisor).float()
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0).double()
    factor = coefficient
    if in_float32:
        factor = torch.where(coefficient == 0, 0.0, 1.0 / (divisor / coefficient).float().double())
    return norm, factor.float()


def step(
    given: torch.optim.Optimizer, optimizer: Any, pending: Pending, scale: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """A step that the optimizer leaves out by itself where gradients overflowed.

    Args:
        given: the optimizer, or what wraps it.
        scale: what its gradients are multiplied by, unless they were unscaled.
    """
    optimizer.grad_scale = scale if pending.stage == "ready" else None
    optimizer.found_inf = pending.found_inf
    pending.stage = "stepped"
    try:
        return given.step(*args, **kwargs)
    finally:
        del optimizer.grad_scale, optimizer.found_inf
        pending.stepped_unread(optimizer)
