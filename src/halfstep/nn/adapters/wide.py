"""Modules that compute in float32 under autocast: what an op-level policy names beyond autocast's own lists."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn


def fits(module: nn.Module, kinds: Sequence[str]) -> bool:
    """Whether the module is of one of those kinds: globs on its class's name (`LlamaRMSNorm` is an `*RMSNorm`)."""
    return any(fnmatchcase(type(module).__name__, kind) for kind in kinds)


def forward(stock: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """The stock forward on float32 inputs, out of autocast's reach; its output stays float32."""
    device = next((a.device.type for a in args if isinstance(a, Tensor)), "cpu")
    with torch.autocast(device, enabled=False):
        return stock(module, *map(_widened, args), **{name: _widened(value) for name, value in kwargs.items()})


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
