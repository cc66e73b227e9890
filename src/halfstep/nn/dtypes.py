"""Store a model's parameters in another dtype, in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from halfstep.errors import ModelError
from halfstep.nn.adapters import wide
from halfstep.nn.paths import adapters_of
from halfstep.ops.subclasses import foreign
from halfstep.recipe import DTYPES, Recipe


def storable(
    model: nn.Module, float32_modules: Sequence[str] = (), adapters: Mapping[str, nn.Parameter] | None = None
) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """The parameters that a recipe may store in its own dtype, by name, and those it keeps, with the reason: `adapters`
    are in float32."""
    wide_ones = {id(p) for module in wide.find(model, float32_modules).values() for p in module.parameters()}
    moves: dict[str, nn.Parameter] = {}
    kept: dict[str, str] = {}
    for path, module in model.named_modules():
        running = isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            if running:
                kept[full] = "its running statistics average over thousands of steps"
            elif full in (adapters or ()):
                kept[full] = "it is an adapter's, in float32"
            elif id(parameter) in wide_ones:
                kept[full] = "its module computes in float32"
            elif type(parameter) is not nn.Parameter and (kind := foreign(parameter)) is not None:
                kept[full] = f"it is a {kind}"
            elif parameter.dtype in DTYPES.values():
                moves[full] = parameter
            else:
                kept[full] = f"it is {parameter.dtype}"
    return moves, kept


def wide_adapters(model: nn.Module, recipe: Recipe) -> dict[str, nn.Parameter]:
    """The parameters of adapters, where a recipe stores others in fewer bits, and these in float32."""
    if recipe.weights == "fp32" or not recipe.float32_adapters:
        return {}
    is_adapter = adapters_of(model)
    named = model.named_parameters(remove_duplicate=False)
    return {name: p for name, p in named if is_adapter(name) and p.dtype in DTYPES.values() and foreign(p) is None}


def unstorable(parameter: nn.Parameter) -> str | None:
    """Why no recipe takes a model with this parameter, after its name; None where one does."""
    if parameter.dtype == torch.float64:
        return "is float64, which no recipe stores; call model.float() first"
    if parameter.is_complex():
        return (
            f"is {parameter.dtype}, and recipes store and step on real numbers; keep its real and imaginary parts as "
            "two parameters (torch.view_as_complex joins them)"
        )
    if hasattr(parameter, "device_mesh"):
        return "is sharded; apply the recipe before fully_shard"
    if parameter.requires_grad and type(parameter) is not nn.Parameter and (kind := foreign(parameter)) is not None:
        return (
            f"is trained and is a {kind}, whose numbers its own library keeps: apply the recipe before that library "
            "converts the model, or freeze these weights (requires_grad_(False)) and train others beside them, such as "
            "LoRA's"
        )
    return None


def store(parameter: Tensor, dtype: torch.dtype, grads: torch.dtype | None = None) -> None:
    """Round a parameter into `dtype` and a gradient that it carries into `grads` (None: the same dtype), in which
    gradients accumulate from then on. It stays the same object, ties and all."""
    grads = grads or dtype
    if parameter.dtype == dtype and (getattr(parameter, "grad_dtype", None) or dtype) == grads:
        return
    grad, parameter.grad = parameter.grad, None
    parameter.data = parameter.data.to(dtype)
    if (getattr(parameter, "grad_dtype", None) or dtype) != grads:
        parameter.grad_dtype = grads
    if grad is not None:
        parameter.grad = grad.to(grads)


def check_grad_dtype(grads: str, kind: type = Tensor) -> None:
    """Called before a model is changed.

    Raises:
        ModelError: this torch cannot keep gradients in another dtype than their parameter.
    """
    if not hasattr(kind, "grad_dtype"):
        raise ModelError(
            f"torch {torch.__version__} keeps gradients in the parameters' dtype, and this recipe in {grads}: use "
            "torch 2.10 or newer"
        )


def count(model: nn.Module, others: Mapping[int, torch.dtype] | None = None) -> dict[str, int]:
    """How many parameters the model stores in each dtype, most first; tied ones count once.

    Args:
        others: the dtypes that parameters will have, by their ids, where it is another.
    """
    counts: Counter[str] = Counter()
    for parameter in model.parameters():
        counts[str((others or {}).get(id(parameter), parameter.dtype)).removeprefix("torch.")] += parameter.numel()
    return dict(counts.most_common())
