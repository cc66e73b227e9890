"""Measure, from live tensors, the bytes that a model and its optimizer keep."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from halfstep.memory.live import parts_of
from halfstep.recipe import BytesPerParameter, is_master


def measure(model: nn.Module, optimizer: torch.optim.Optimizer) -> BytesPerParameter:
    """Bytes per trained parameter by role, as they are now: call it between backward() and step().

    Every tensor counts once, however many names it has. What has one element does not count: counters (`step`), and
    the scale of a whole tensor. The compute copies that autocast makes live inside a pass only and cannot be seen here;
    `Recipe.bytes_per_parameter` states them.

    Raises:
        ValueError: the model trains no parameter.
    """
    weights = {id(p): p for p in model.parameters() if p.requires_grad}
    count = sum(p.numel() for p in weights.values())
    if count == 0:
        raise ValueError("the model trains no parameter; bytes per parameter mean nothing")
    masters: list[Tensor] = []
    moments: list[Tensor] = []
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and name != "step" and (value.numel() > 1 or value.shape == parameter.shape):
                (masters if is_master(name) else moments).append(value)
    return BytesPerParameter(
        weights=_counted(weights.values()) / count,
        grads=_counted(p.grad for p in weights.values() if p.grad is not None) / count,
        master=_counted(masters) / count,
        states=_counted(moments) / count,
    )


def stored_bytes(model: nn.Module) -> int:
    """Bytes of every parameter and buffer of a model, each tensor once, however many names it has."""
    return _bytes(part for tensor in (*model.parameters(), *model.buffers()) for part in parts_of(tensor).values())


def _counted(tensors: Iterable[Tensor]) -> int:
    parts = (parts_of(tensor) for tensor in tensors)
    return _bytes(t for found in parts for name, t in found.items() if name != "scale" or t.numel() > 1)


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.numel() * t.element_size() for t in tensors if t.numel()}
    return sum(storages.values())
