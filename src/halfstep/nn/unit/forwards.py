"""The forwards of a model that is unit-scaled: of whole modules, and of modules whose own code computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.errors import ModelError
from halfstep.nn.unit.functions import named
from halfstep.nn.unit.steps import Own
from halfstep.ops.scale import scale_backward, scaled
from halfstep.unit.activations import IN_PLACE, times
from halfstep.unit.part import unit_part


@dataclass(frozen=True)
class Whole:
    """The factors of a module that is one operation."""

    name: str
    """Which: of norms, `layer_norm`, `rms_norm`, `group_norm`, `batch_norm`; of functions, an activation's name."""
    alpha: float
    """What its output is multiplied by."""
    backward: tuple[float, ...]
    """What the gradients of its inputs are multiplied by in all."""
    eps: float = 0.0
    free: bool = False
    """Whether gain and bias have gradients of their own size, rows^-1/2."""
    beside: float = 1.0
    """What the gradients of gain and bias are multiplied by besides."""


def own(stock: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The module's forward, whose calls of functions are scaled."""
    plan: Own = unit_part(module).forward
    running = plan.mode()
    with running:
        output = stock(module, *args, **kwargs)
    running.finish()
    return output


@dataclass(frozen=True)
class Shield:
    """The members of a module that is one operation: the code of the module around it does not hear what it calls."""

    beneath: bool = True

    def __call__(self, stock: type[nn.Module]) -> dict[str, Any]:
        call: Any = stock.__call__

        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with torch._C.DisableTorchFunction():
                return call(self, *args, **kwargs)

        return {"__call__": __call__}


@dataclass(frozen=True)
class Unsaved:
    """The members of a model that Hugging Face's readers would misread: its files would hold unit-scaled weights."""

    beneath: bool = True

    def __call__(self, stock: type[nn.Module]) -> dict[str, Any]:
        def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            raise ModelError(
                f"{type(self).__name__}.save_pretrained: the weights are unit-scaled, and a plain from_pretrained "
                "would compute something else with them. Save model.state_dict() (torch.save, safetensors), and load "
                "it into a model that halfstep.unit_scale was called on with inputs like these"
            )

        return {"save_pretrained": save_pretrained, "push_to_hub": save_pretrained}


def one_input(stock: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """An embedding's lookup, or a function of each element: both of its factors are its output's."""
    plan: Whole = unit_part(module).forward
    if plan.name in IN_PLACE:
        x: Tensor = args[0] if args else next(iter(kwargs.values()))
        return times(x, plan.name, plan.alpha, plan.backward[0])
    return scaled(stock(module, *args, **kwargs), plan.alpha, plan.backward[0])


def attention(stock: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Attention as a module: one factor, and those that residual branches leave at its inputs."""
    plan: Whole = unit_part(module).forward
    given = named(("query", "key", "value", "mask", "is_causal"), args, kwargs)
    for name, factor in zip(("query", "key", "value"), plan.backward, strict=True):
        given[name] = scale_backward(given[name], factor / plan.alpha)
    return stock(module, **given) * plan.alpha


def norm(stock: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """The norm, whose gain and bias have gradients of unit size."""
    plan: Whole = unit_part(module).forward
    x: Tensor = args[0] if args else next(iter(kwargs.values()))
    x = scale_backward(x, plan.backward[0])
    weight, bias = (_parameter(module, name, x, plan) for name in ("weight", "bias"))
    if plan.name == "layer_norm":
        shape = getattr(module, "normalized_shape", x.shape[-1:])
        return F.layer_norm(x, tuple(shape), weight, bias, plan.eps)
    if plan.name == "rms_norm":
        shape = getattr(module, "normalized_shape", x.shape[-1:])
        eps = module.eps if isinstance(module, nn.RMSNorm) else plan.eps
        return F.rms_norm(x, tuple(shape), weight, eps)
    if plan.name == "group_norm":
        return F.group_norm(x, module.num_groups, weight, bias, plan.eps)
    return _batch_norm(module, x, weight, bias)


def _parameter(module: Any, name: str, x: Tensor, plan: Whole) -> Tensor | None:
    """A gain or bias in the dtype that its input asks for, with its gradient's factor."""
    parameter = getattr(module, name, None)
    if parameter is None:
        return None
    dtype = torch.promote_types(parameter.dtype, x.dtype)
    rows = x.numel() / max(parameter.numel(), 1)
    factor = plan.beside * (max(rows, 1.0) ** -0.5 if plan.free else 1.0)
    return scale_backward(parameter.to(dtype), factor)


def _batch_norm(module: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """torch's own forward, with weights that are given."""
    module._check_input_dim(x)
    average = 0.0 if module.momentum is None else module.momentum
    if module.training and module.track_running_stats and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:
            average = 1.0 / float(module.num_batches_tracked)
    tracked = not module.training or module.track_running_stats
    mean, variance = (module.running_mean, module.running_var) if tracked else (None, None)
    batch = module.training or (module.running_mean is None and module.running_var is None)
    return F.batch_norm(x, mean, variance, weight, bias, batch, average, module.eps)


WHOLE = {"norm": norm, "embedding": one_input, "elementwise": one_input, "attention": attention}
"""The forwards of modules that are one operation, by their kind; a product's is its adapter's."""
