"""Run a model on a batch, and a loss to send back: the model's own, or a stated stand-in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import ModelError
from halfstep.tracking.nonfinite import tensors_in


Batch = Any
"""What the model is called with: a mapping gives arguments by name, a tuple or list by position, a tensor alone."""
Loss = Callable[[nn.Module, Batch], Tensor]

_STAND_IN = "the outputs times fixed normal noise, summed, over their rows (the model returns no loss)"


def call(model: nn.Module, batch: Batch) -> Any:
    """What the model returns for a batch.

    Raises:
        ModelError: it raised.
    """
    try:
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        raise ModelError(
            f"{type(model).__name__} raised {type(error).__name__} on a batch of {described(batch)}: {error}. "
            "Give data that it takes"
        ) from error


def loss_of(model: nn.Module, batch: Batch, own: Loss | None) -> tuple[Tensor, str]:
    """The loss on a batch, with a graph behind it, and what loss it is in words.

    `own` if given; else the output's `loss`, or an output that is a single number; else the sum of the floating outputs
    times fixed numbers r from a standard normal distribution, divided by their rows: the gradient is r / rows, about as
    large as a mean cross-entropy's. (A sum of squares has none behind a last layer norm, which keeps it constant.)

    Raises:
        ModelError: the model raised, or nothing of what it returns carries a gradient.
    """
    loss: Tensor | None
    if own is not None:
        loss, words = own(model, batch), "the given one"
    else:
        loss, words = loss_of_output(call(model, batch))
    if not (isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1):
        raise ModelError(
            f"{type(model).__name__} gives no loss to send back on a batch of {described(batch)}: nothing of what it "
            "returns carries a gradient. Give a model that returns a differentiable floating tensor, or a `loss`"
        )
    return loss.reshape(()), words


def loss_of_output(output: Any) -> tuple[Tensor | None, str]:
    """The loss in what a model returned, or a stand-in, as `loss_of` says; None where nothing carries a gradient."""
    given = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if given is None and isinstance(output, Tensor) and output.dim() == 0:
        given = output
    return (given, "the model's own") if isinstance(given, Tensor) else (_stand_in(output), _STAND_IN)


def _stand_in(output: Any) -> Tensor | None:
    found = [t for t in tensors_in(output) if t.is_floating_point() and t.requires_grad]
    return torch.stack([_against_noise(t.float()) for t in found]).sum() if found else None


def _against_noise(output: Tensor) -> Tensor:
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu").to(
        output.device
    )
    return (output * noise).sum() / max(1, output.shape[:-1].numel())


def described(batch: Batch) -> str:
    """The shapes and dtypes of a batch."""
    named = batch.items() if isinstance(batch, Mapping) else (("", t) for t in tensors_in(batch))
    words = [
        f"{name + ' ' if name else ''}{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"
        for name, t in named
        if isinstance(t, Tensor)
    ]
    return ", ".join(words) or type(batch).__name__


def moved(batch: Batch, device: torch.device, dtype: torch.dtype = torch.float32) -> Batch:
    """The batch on a device, its floating tensors in `dtype`."""
    if isinstance(batch, Tensor):
        return batch.to(device, dtype if batch.is_floating_point() else batch.dtype)
    if isinstance(batch, Mapping):
        return {name: moved(value, device, dtype) for name, value in batch.items()}
    return type(batch)(moved(value, device, dtype) for value in batch) if isinstance(batch, (tuple, list)) else batch
