"""Find out which gradients are not finite, on this rank and on all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import LossScaleError
from halfstep.ops.snapshot import values_of
from halfstep.ops.subclasses import foreign
from halfstep.optim.device_scale import NO_GRADIENT
from halfstep.optim.shards import local


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
    finite = [_all_finite(local(grad)).to(device) for _, grad in named]
    fine = torch.stack(finite) if finite else torch.zeros(0, dtype=torch.bool, device=device)
    found = _agreed((~fine.all()).float() if finite else None, device, process_group)
    if float(found) == NO_GRADIENT:
        raise LossScaleError(no_gradient(elsewhere=bool(named)))
    return bool(found), tuple(name for (name, _), ok in zip(named, fine.tolist(), strict=True) if not ok)


@torch.no_grad()
def find_late(grads: Sequence[Tensor | None], device: torch.device, process_group: Any) -> tuple[Tensor, Tensor]:
    """The same of gradients on a GPU, which the host does not wait for: above 0 where any rank has an infinity or NaN,
    and for each of this rank's whether it has.

    Args:
        grads: of every parameter, None where there is none.

    Raises:
        LossScaleError: none of them is there. Of another rank the host hears later (`DeviceScale.posted`).
    """
    largest = [torch.zeros((), device=device, dtype=torch.float32)] * len(grads)
    for places, parts in alike([None if grad is None else values_of(local(grad)) for grad in grads]):
        norms = torch._foreach_norm(parts, torch.inf)  # a NaN is the largest of all
        for place, norm in zip(places, norms, strict=True):
            largest[place] = norm.to(device)
    here = any(grad is not None for grad in grads)
    lost = ~torch.stack(largest).isfinite() if here else torch.zeros(0, dtype=torch.bool, device=device)
    found = _agreed(lost.any().float() if here else None, device, process_group)
    if not here:
        raise LossScaleError(no_gradient(elsewhere=False))
    return found, lost


def alike(tensors: Sequence[Tensor | None]) -> list[tuple[list[int], list[Tensor]]]:
    """Those that have elements, with their places, in groups of one device and dtype, which one launch takes; what is
    no plain tensor by itself."""
    groups: dict[object, tuple[list[int], list[Tensor]]] = {}
    for place, tensor in enumerate(tensors):
        if tensor is not None and tensor.numel():
            alone = foreign(tensor) is not None
            places, members = groups.setdefault(place if alone else (tensor.device, tensor.dtype), ([], []))
            places.append(place)
            members.append(tensor)
    return list(groups.values())


def _agreed(found: Tensor | None, device: torch.device, process_group: Any) -> Tensor:
    """The largest that any rank says; None says that this one has no gradient."""
    said = torch.full((), NO_GRADIENT, device=device, dtype=torch.float32) if found is None else found
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MAX, group=process_group)
    return said


def no_gradient(elsewhere: bool) -> str:
    """What to say where no parameter has a gradient, on this rank or another one."""
    where = "on another rank no parameter" if elsewhere else "no parameter"
    return (
        f"{where} of the optimizer has a gradient; call scaler.scale(loss).backward() first. If you did, something "
        "has replaced the model's parameters: under FSDP2 call halfstep.apply(model, recipe), then fully_shard, "
        "build the optimizer on the sharded parameters, and hand it to halfstep.optimize(model, optimizer)"
    )


def _all_finite(grad: Tensor) -> Tensor:
    """Whether every element is finite, in one read: the extremes of a tensor with a NaN are NaN."""
    if not grad.numel():
        return torch.ones((), dtype=torch.bool, device=grad.device)
    return torch.stack(torch.aminmax(grad)).isfinite().all()
