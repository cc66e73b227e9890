"""Gradients averaged over ranks by a call, without DDP: in any dtype, whatever the weights have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.distributed.compress import reduction_of
from halfstep.distributed.reduction import Reduction
from halfstep.errors import ModelError
from halfstep.optim import LossScaler
from halfstep.recipe import Communication


BUCKET = 2**24
"""Elements that are sent together, at most, where a gradient has no more."""


@torch.no_grad()
def reduce_gradients(
    model: nn.Module,
    communication: Communication | None = None,
    *,
    process_group: Any = None,
    scaler: LossScaler | None = None,
) -> Reduction:
    """Replace every gradient by its mean over the ranks, as the model's recipe says they cross; the model's reduction,
    whose `exchange.sent` counts bytes.

        loss.backward()                                  # as often as wanted
        halfstep.distributed.reduce_gradients(model)     # once a step, on all ranks
        scaler.clip_grad_norm_(optimizer, 1.0); scaler.step(optimizer); scaler.update(); optimizer.zero_grad()

    For recipes whose gradients have another dtype than their weights, which DDP and FSDP2 do not reduce
    ('bf16-megatron'), and for loops without DDP. Gradients are summed in float32 in rank order, sent in the format of
    the recipe's `communication`, or in their own. Weights must be alike at the start: the first call sends rank 0's
    checksum round and refuses others. It does not overlap with the backward pass.

    A parameter that has no gradient on one rank and one on another counts as zeros there; one without on all stays so.

    Args:
        communication, scaler: as for `compress`; None is the recipe's, and where it has none, gradients as they are.
            The first call's hold.
        process_group: the ranks that train together; None is all of them.

    Raises:
        RecipeError: error feedback under a recipe that scales its loss, without the scaler.
        ModelError: ranks have other models, recipes or weights, or one has failed; a gradient is sparse or sharded.
    """
    state = reduction_of(model, communication, process_group, scaler)
    parameters = [p for p in model.parameters() if p.requires_grad]
    for bucket in _buckets(_with_gradients(parameters, state)):
        values = torch.cat([_grad(p).flatten() for p in bucket])
        state.begin(values, bucket, lambda bucket=bucket, values=values: _write(bucket, values))  # type: ignore[misc]
    state.finish()
    return state


def _with_gradients(parameters: Sequence[Tensor], state: Reduction) -> list[Tensor]:
    """The parameters that have a gradient on any rank; where this one has none, it is zero."""
    here = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=parameters[0].device)
    everyone = here.repeat(state.exchange.ranks, 1)
    state.exchange.all_gather(everyone).wait()
    found = []
    for parameter, somewhere in zip(parameters, everyone.amax(0).tolist(), strict=True):
        if somewhere and parameter.grad is None:
            dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
            parameter.grad = torch.zeros_like(parameter, dtype=dtype)
        if somewhere:
            found.append(parameter)
    return found


def _grad(parameter: Tensor) -> Tensor:
    grad = parameter.grad
    assert grad is not None
    if grad.layout != torch.strided or hasattr(grad, "device_mesh"):
        kind = "sharded (fully_shard reduces it)" if hasattr(grad, "device_mesh") else f"{grad.layout}"
        raise ModelError(
            f"a gradient of shape {tuple(grad.shape)} is {kind}; halfstep.distributed.reduce_gradients takes whole, "
            "dense ones. Nothing was sent of it"
        )
    return grad


def _buckets(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Parameters whose gradients have one dtype and device, in order."""
    found: dict[Any, list[list[Tensor]]] = {}
    for parameter in parameters:
        grad = _grad(parameter)
        groups = found.setdefault((grad.dtype, grad.device), [[]])
        if groups[-1] and sum(p.numel() for p in groups[-1]) + grad.numel() > BUCKET:
            groups.append([])
        groups[-1].append(parameter)
    return [group for groups in found.values() for group in groups]


def _write(bucket: Sequence[Tensor], values: Tensor) -> None:
    for parameter, mean in zip(bucket, values.split_with_sizes([p.numel() for p in bucket]), strict=True):
        _grad(parameter).copy_(mean.view(parameter.shape))
