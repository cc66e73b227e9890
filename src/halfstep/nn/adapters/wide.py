"""Modules that compute in float32 under autocast: what an op-level policy names beyond autocast's own lists."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.nn.tuners import matches


def find(model: nn.Module, globs: Sequence[str]) -> dict[str, nn.Module]:
    """The modules, by path, whose class's name (`LlamaRMSNorm` is an `*RMSNorm`) or whose path a glob matches."""
    if not globs:
        return {}
    return {
        path: module
        for path, module in model.named_modules()
        if path and any(fnmatchcase(type(module).__name__, glob) or matches(path, glob) for glob in globs)
    }


def forward(stock: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """The stock forward on float32 inputs, out of autocast's reach; its output stays float32."""
    device = next((a.device.type for a in args if isinstance(a, Tensor)), "cpu")
    with torch.autocast(device, enabled=False):
        return stock(module, *map(_widened, args), **{name: _widened(value) for name, value in kwargs.items()})


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
