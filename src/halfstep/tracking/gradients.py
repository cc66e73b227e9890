"""Collect the gradients of activations, which only exist while the backward runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from halfstep.tracking.nonfinite import tensors_in


@contextmanager
def activation_gradients(model: nn.Module, enabled: bool = True) -> Iterator[list[Tensor]]:
    """While active, a backward appends the gradient of every leaf module's output, or outputs, to
    the list."""
    collected: list[Tensor] = []
    with _hooked(model if enabled else None, lambda name, grad: collected.append(grad)):
        yield collected


@contextmanager
def activation_gradients_by_module(model: nn.Module, enabled: bool = True) -> Iterator[dict[str, list[Tensor]]]:
    """The same, by the module's name; of a model that is one leaf, under "the model"."""
    collected: dict[str, list[Tensor]] = {}
    with _hooked(model if enabled else None, lambda name, grad: collected.setdefault(name, []).append(grad)):
        yield collected


@contextmanager
def _hooked(model: nn.Module | None, take: Callable[[str, Tensor], None]) -> Iterator[None]:
    def attach(name: str, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: take(name, grad.detach().clone()))  # type: ignore[no-untyped-call]

    named = [] if model is None else list(model.named_modules())
    handles = [
        module.register_forward_hook(lambda _, __, output, name=name: attach(name or "the model", output))
        for name, module in named
        if not any(module.children())
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
