"""Functions that compute in float32 under autocast: a recipe's own list, where autocast's differs by device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only


_OPERATORS = {"pow": ("__pow__", "__rpow__", "float_power"), "reciprocal": ("__rtruediv__", "__rdiv__")}
"""What else calls a function of that name."""


class Float32Functions(TorchFunctionMode):
    """Within it, functions of those names, and methods, take 16-bit inputs widened to float32 and return float32.

    As with torch.autocast, calls in place, with `out=` or with a `dtype` of their own are left alone.
    """

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.names = frozenset(other for name in names for other in (name, *_OPERATORS.get(name, ())))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in self.names and not _says_where(kwargs):
            args, kwargs = tree_map_only(Tensor, _widened, (args, dict(kwargs)))
        return func(*args, **kwargs)


def _says_where(kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("dtype") is not None or kwargs.get("out") is not None


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
