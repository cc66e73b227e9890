"""Copies of a model, run on a batch, with random generators left as they were; and a loss to send back."""

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from halfstep.errors import ModelError
from halfstep.ops.subclasses import check_initialized
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


def copied(model: nn.Module) -> nn.Module:
    """A copy of a model, without gradients.

    Raises:
        ModelError: it has no parameters, or cannot be copied; or a forward that was set on an instance calls the model
            itself, as the copy's would.
    """
    name = type(model).__name__
    if not any(True for _ in model.parameters()):
        raise ModelError(f"{name} has no parameters; there is nothing to probe")
    check_initialized(model)
    try:
        own = copy.deepcopy(model)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ModelError(
            f"{name} cannot be copied ({error}), and a probe runs copies; give a model that can"
        ) from error
    originals = set(map(id, model.modules()))
    for path, module in own.named_modules():
        if _reaches(vars(module).get("forward"), originals):
            raise ModelError(
                f"{name}: {path or 'the model'} has a forward that was set on the instance and calls the original, so "
                "that a copy would compute with the original's weights. Give the model without it: del model.forward, "
                "or accelerator.unwrap_model(model, keep_fp32_wrapper=False)"
            )
    own.zero_grad()
    return own


def _reaches(start: Any, modules: set[int]) -> bool:
    """Whether a callable holds one of the modules: in closures, wrapped functions, bound and partial arguments."""
    seen, left = set[int](), [start]
    while left and len(seen) < 1000:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, nn.Module):
            if id(one) in modules:
                return True
            continue
        if isinstance(one, FunctionType):
            left += [cell.cell_contents for cell in one.__closure__ or () if cell != CellType()]
            left += [*(one.__defaults__ or ()), *vars(one).values()]
        elif isinstance(one, MethodType):
            left += [one.__self__, one.__func__]
        elif isinstance(one, partial):
            left += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, (tuple, list)):
            left += one
        elif callable(one) and hasattr(one, "__dict__") and not isinstance(one, type):
            left += vars(one).values()
    return False


@contextmanager
def unchanged_generators(device: torch.device) -> Iterator[None]:
    """While active, random numbers may be drawn; afterwards the generators are where they were."""
    kept, numpys = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(kept)
        np.random.set_state(numpys)
