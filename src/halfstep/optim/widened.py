"""16-bit gradients that left their dtype for float32, until they are gone.

A 16-bit gradient that is divided by a loss scale or clipped where it stands is rounded, and a small one is lost. So it
leaves for float32 when that happens, and its parameter takes float32 gradients from then on. Once it is gone, the
parameter's own dtype returns: `optimizer.zero_grad()` sees to it, the loss scaler's next `scale`, and where neither is
called (`model.zero_grad()` or `p.grad = None`, then a bare backward) hooks on the parameter.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


_OWN = "_halfstep_own_gradients"  # on a parameter whose gradient has left
_LEFT = "_halfstep_left"  # on such a gradient: whatever drops it drops this


@dataclass
class _Own:
    """What gradients of the parameter were, and will be."""

    stored: torch.dtype
    """The parameter's, by which others notice that it became another one since."""
    grads: torch.dtype | None
    handles: tuple[RemovableHandle, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # hooks and a gradient's dtype stay behind when a parameter is pickled


def can_widen(parameter: Tensor) -> bool:
    """Whether this torch (2.10 or newer) lets the parameter have gradients of another dtype."""
    return hasattr(parameter, "grad_dtype")


def widen(parameter: Tensor, grad: Tensor) -> None:
    """Put a float32 gradient in the place of the parameter's 16-bit one."""
    if getattr(parameter, _OWN, None) is None:
        own = _Own(parameter.dtype, parameter.grad_dtype)
        if parameter.requires_grad:
            own.handles = _hooks(parameter)
        setattr(parameter, _OWN, own)
    parameter.grad = None
    parameter.grad_dtype = torch.float32
    parameter.grad = grad
    setattr(grad, _LEFT, True)


def narrow(parameter: Tensor) -> None:
    """Let the parameter have its own gradients again, unless the one that left is still there (and not all zeros)."""
    own, grad = cast("_Own | None", getattr(parameter, _OWN, None)), parameter.grad
    if own is None or (hasattr(grad, _LEFT) and bool(cast(Tensor, grad).any())):
        return
    for handle in own.handles:
        handle.remove()
    delattr(parameter, _OWN)
    dtype = own.grads if parameter.dtype == own.stored else parameter.dtype
    parameter.grad = None
    parameter.grad_dtype = dtype
    parameter.grad = None if grad is None else grad.to(dtype or parameter.dtype)


def _hooks(parameter: Tensor) -> tuple[RemovableHandle, ...]:
    """Before a gradient arrives, zeros that it would be added to in float32 go; after it has, the parameter's own dtype
    returns: torch lets no hook change that of a gradient on its way."""
    reference = weakref.ref(parameter)

    def arriving(_: Tensor) -> None:
        present = reference()
        if present is not None and hasattr(present.grad, _LEFT) and not bool(cast(Tensor, present.grad).any()):
            present.grad = None

    return (
        parameter.register_hook(arriving),  # type: ignore[no-untyped-call]
        parameter.register_post_accumulate_grad_hook(narrow),  # type: ignore[no-untyped-call]
    )
