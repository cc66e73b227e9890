"""Modules with code of their own and 16-bit weights: functions that refuse two dtypes get the wider one.

torch.autocast casts the operands of products. On a CPU it has nothing to say about layer_norm and a few others, whose
kernels refuse a float32 input with 16-bit weights; with both in the wider dtype they compute as autocast's widest-type
operations do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


_STRICT: frozenset[Callable[..., Any]] = frozenset(
    {
        F.layer_norm, F.group_norm, F.batch_norm, F.instance_norm, F.rms_norm, F.bilinear,
        torch.layer_norm, torch.group_norm, torch.batch_norm, torch.instance_norm, torch.rms_norm, torch.bilinear,
        torch.mv, torch.dot, torch.vdot, torch.inner, torch.addmv, torch.lerp, torch.tensordot,
        Tensor.mv, Tensor.dot, Tensor.vdot, Tensor.inner, Tensor.addmv, Tensor.lerp,
    }
)  # fmt: skip
_NARROW = (torch.bfloat16, torch.float16)


def fits(module: nn.Module) -> bool:
    """Whether the module's forward is not torch's, and has weights of its own to use."""
    own = any(parameter is not None for parameter in module._parameters.values())
    return own and not f"{type(module).forward.__module__}.".startswith("torch.")


def forward(stock: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """The stock forward; with the functions above widened where something in float32 comes in or lies beside."""
    if any(map(_is_wide, (*args, *kwargs.values(), *module._buffers.values()))):
        with _Widening():
            return stock(module, *args, **kwargs)
    return stock(module, *args, **kwargs)


class _Widening(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _STRICT:
            floating = [x.dtype for x in (*args, *kwargs.values()) if _is_floating(x)]
            if len(set(floating)) > 1:
                widest = floating[0]
                for dtype in floating[1:]:
                    widest = torch.promote_types(widest, dtype)
                args = [x.to(widest) if _is_floating(x) else x for x in args]
                kwargs = {name: x.to(widest) if _is_floating(x) else x for name, x in kwargs.items()}
        return function(*args, **kwargs)


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _is_wide(x: Any) -> bool:
    return _is_floating(x) and x.dtype not in _NARROW
