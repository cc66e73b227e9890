"""Where a module computes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from torch import Tensor, nn


def device_type_of(module: nn.Module) -> str:
    """The type of the device of its first parameter, or of its first buffer where it has none."""
    return next(chain(_held(module, "_parameters"), _held(module, "_buffers"))).device.type


def _held(module: nn.Module, what: str) -> Iterator[Tensor]:
    """The parameters or buffers of a module and those within it, in torch's order: torch finds their names too, which
    takes longer than a layer."""
    yield from (tensor for tensor in getattr(module, what).values() if tensor is not None)
    for child in module._modules.values():
        if child is not None:
            yield from _held(child, what)
