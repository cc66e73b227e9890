"""Collect the gradients of activations, which only exist while the backward runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from halfstep.tracking.nonfinite import tensors_in


@contextmanager
def activation_gradients(model: nn.Module, enabled: bool = True) -> Iterator[list[Tensor]]:
    """While active, a backward appends the gradient of every leaf module's output, or outputs, to
    the list."""
    collected: list[Tensor] = []

    def attach(_: nn.Module, __: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: collected.append(grad.detach().clone()))  # type: ignore[no-untyped-call]

    leaves = [module for module in model.modules() if enabled and not any(module.children())]
    handles = [leaf.register_forward_hook(attach) for leaf in leaves]
    try:
        yield collected
    finally:
        for handle in handles:
            handle.remove()
