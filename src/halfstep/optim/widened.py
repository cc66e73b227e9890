"""16-bit gradients that left their dtype for float32, until they are gone.

A 16-bit gradient that is divided by a loss scale or clipped where it stands is rounded, and a small one is lost. So it
leaves for float32 when that happens, and its parameter takes float32 gradients from then on. Once it is gone, the
parameter's own dtype returns: `optimizer.zero_grad()` sees to it, the loss scaler's next `scale`, and where neither is
called (`model.zero_grad()` or `p.grad = None`, then a bare backward) hooks on the parameter.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


_OWN = "_halfstep_own_gradients"  # on a parameter whose gradient has left
_TREATED = "_halfstep_treated"  # on a gradient that was unscaled or clipped: whatever drops it drops this


@dataclass
class _Own:
    """The dtype that the parameter's gradients had, and will have again."""

    stored: torch.dtype
    """The parameter's, by which others notice that it became another one since."""
    grads: torch.dtype | None
    handles: tuple[RemovableHandle, ...] = ()
    fresh: bool = False
    """Whether the gradient that is arriving has nothing to be added to."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # hooks and a gradient's dtype stay behind when a parameter is pickled


def can_widen(parameter: Tensor) -> bool:
    """Whether this torch (2.10 or newer) lets the parameter have gradients of another dtype."""
    return hasattr(parameter, "grad_dtype")


def widen(parameter: Tensor, grad: Tensor) -> None:
    """Put a float32 gradient in the place of the parameter's 16-bit one."""
    if _own(parameter) is None:
        own = _Own(parameter.dtype, parameter.grad_dtype)
        if parameter.requires_grad:
            own.handles = _hooks(parameter)
        setattr(parameter, _OWN, own)
    parameter.grad = None
    parameter.grad_dtype = torch.float32
    parameter.grad = grad
    mark(grad)


def put_back(parameter: Tensor, grad: Tensor | None) -> None:
    """Give a parameter a gradient that it had before, whatever backward ran in between."""
    if grad is not None and parameter.dtype != grad.dtype == torch.float32 and is_marked(grad):
        widen(parameter, grad)
    else:
        parameter.grad = grad


def mark(grad: Tensor) -> None:
    """Say of a gradient that it was unscaled or clipped."""
    setattr(grad, _TREATED, True)


def is_marked(grad: Tensor | None) -> bool:
    """Whether it was unscaled or clipped, and is still the same tensor (perhaps added to)."""
    return hasattr(grad, _TREATED)


def narrow(parameter: Tensor) -> None:
    """Let the parameter have its own gradients again, if the one that left is gone, or zeros."""
    own, grad = _own(parameter), parameter.grad
    if own is None or (grad is not None and not own.fresh and bool(grad.any())):
        return
    for handle in own.handles:
        handle.remove()
    delattr(parameter, _OWN)
    dtype = own.grads if parameter.dtype == own.stored else parameter.dtype
    parameter.grad = None
    parameter.grad_dtype = dtype
    parameter.grad = None if grad is None else grad.to(dtype or parameter.dtype)


def _own(parameter: Tensor) -> _Own | None:
    return getattr(parameter, _OWN, None)


def _hooks(parameter: Tensor) -> tuple[RemovableHandle, ...]:
    """A gradient that arrives where none is (or zeros) becomes the parameter's own kind, once it is there.

    (torch lets no hook change the dtype of one on its way.)
    """
    reference = weakref.ref(parameter)

    def arriving(_: Tensor) -> None:
        present = reference()
        own = None if present is None else _own(present)
        if present is not None and own is not None:
            if present.grad is not None and not bool(present.grad.any()):
                present.grad = None
            own.fresh = present.grad is None

    return (
        parameter.register_hook(arriving),  # type: ignore[no-untyped-call]
        parameter.register_post_accumulate_grad_hook(narrow),  # type: ignore[no-untyped-call]
    )
