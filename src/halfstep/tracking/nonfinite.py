"""Find the first tensor of a training step that is not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from halfstep.optim.widened import put_back


def first_nonfinite(model: nn.Module, loss: Callable[[], Tensor]) -> str | None:
    """The name of the first tensor with an infinity or NaN, in the order in which a step makes them; None if none has.

    That order is: weights, then what goes into and comes out of each module as the forward runs it, then the loss, then
    the gradients as the backward makes them. `loss` runs the forward and returns the loss; it is called once, and the
    parameters' gradients are put back afterwards.
    """
    for name, parameter in model.named_parameters():
        if not _finite(parameter):
            return f"weight {name}"
    found: list[str] = []
    handles: list[RemovableHandle] = []

    def look(what: str, name: str, value: Any) -> None:
        for tensor in tensors_in(value):
            if not found and not _finite(tensor):
                found.append(f"{what} of {name}")
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: look(f"gradient of the {what}", name, grad))  # type: ignore[no-untyped-call]

    for name, module in model.named_modules():
        label = f"{name or 'the model'} ({type(module).__name__})"
        handles.append(module.register_forward_pre_hook(lambda _, inputs, at=label: look("input", at, inputs)))
        handles.append(module.register_forward_hook(lambda _, __, output, at=label: look("output", at, output)))
    kept = {parameter: parameter.grad for parameter in model.parameters()}
    for parameter in kept:
        parameter.grad = None
    try:
        value = loss()
        if not found and not _finite(value):
            found.append("the loss")
        if not found:
            value.backward()  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters():
            if not found and parameter.grad is not None and not _finite(parameter.grad):
                found.append(f"gradient of the weight {name}")
    finally:
        for handle in handles:
            handle.remove()
        for parameter, grad in kept.items():
            put_back(parameter, grad)
    return found[0] if found else None


def _finite(tensor: Tensor) -> bool:
    values = tensor.detach()
    values = values.float() if values.dtype.itemsize == 1 else values  # torch has no isfinite for codes
    return not tensor.is_floating_point() or bool(torch.isfinite(values).all())


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in what a module takes or returns: dicts, lists and tuples, nested."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []
