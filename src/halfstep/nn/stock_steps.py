"""What a recipe asks of the optimizer, said once where an optimizer steps on the model that knows no recipe."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from traceback import walk_stack
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from halfstep.nn.averages import remove_after_step, watch_clones
from halfstep.ops.part import part_of
from halfstep.recipe import Recipe


def watch(model: nn.Module, recipe: Recipe) -> None:
    """Warn once of what the recipe loses, should an optimizer step on the model before `optimize` has taken one, and
    look for averages of 16-bit weights among its steps.

    Until then torch calls a hook before every step of any optimizer, and only where the recipe asks something of it.
    """
    scaled = recipe.loss_scale is not None and recipe.loss_scale.scales
    kept = recipe.master, recipe.codes, recipe.projection, recipe.moments != "fp32", recipe.weights != "fp32"
    if scaled or any(kept) or recipe.update_rounding != "nearest_even":
        reference, seen = weakref.ref(model), weakref.WeakSet[torch.optim.Optimizer]()

        def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            followed = reference()
            if followed is None:
                remove_after_step(optimizer, handle)
            elif optimizer not in seen:
                seen.add(optimizer)
                if recipe.weights != "fp32":
                    watch_clones(followed, optimizer, recipe.name)
                if _look(followed, recipe, optimizer):
                    remove_after_step(optimizer, handle)

        part = part_of(model).following
        part.watch = handle = register_optimizer_step_pre_hook(look)


def end_watch(model: nn.Module) -> None:
    """The model's optimizer knows the recipe, or the model follows none any more."""
    part = part_of(model).following
    if part is not None and part.watch is not None:
        part.watch.remove()
        part.watch = None


def _look(model: nn.Module, recipe: Recipe, optimizer: torch.optim.Optimizer) -> bool:
    """Whether that optimizer's step loses something of the recipe, which is warned of."""
    own = {id(p) for p in model.parameters()}
    stepped = [p for group in optimizer.param_groups for p in group["params"] if id(p) in own]
    told = [*_lacks(recipe, optimizer, stepped)] if stepped else []
    if told:
        warnings.warn(
            f"{type(model).__name__} follows recipe {recipe.name!r}, and its {type(optimizer).__name__} does not: "
            f"{'; '.join(told)}. Hand it over before the first step, optimizer, scaler = halfstep.optimize(model, "
            "optimizer), or call halfstep.prepare in place of halfstep.apply; and drive the loop with that scaler. For "
            "an optimizer without a counterpart take a recipe of float32 weights (bf16-mixed)",
            stacklevel=4,  # the loop, past torch's wrapper of step
        )
    return bool(told)


def _lacks(recipe: Recipe, optimizer: torch.optim.Optimizer, stepped: list[nn.Parameter]) -> Iterator[str]:
    """What of the recipe a step of that optimizer leaves out."""
    if recipe.loss_scale is not None and recipe.loss_scale.scales and not _is_scaled():
        yield "the loss is not scaled, and small gradients are zero in fp16 (halfstep.LossScaler() does, beside it)"
    if hasattr(optimizer, "awaits_scaler"):  # one of halfstep's own, which keeps and rounds as it was told
        return
    if any(p.itemsize < torch.float32.itemsize for p in stepped):
        lost = f"updates below half the spacing of {recipe.weights} weights are lost"
        if recipe.master is not None:
            yield f"it keeps no masters ({recipe.master}), and {lost}"
        elif recipe.update_rounding != "nearest_even" and not getattr(optimizer, "bf16_stochastic_round", False):
            yield f"it rounds weights to nearest and not by chance, and {lost}"
    if type(optimizer).__module__.startswith("torch."):  # others, such as bitsandbytes', were taken for how they keep
        if recipe.codes is not None:
            yield "weights and gradients are kept in float32, and not as codes"
        if recipe.moments != "fp32" or recipe.projection is not None:
            yield "moments are not kept as the recipe says"


def _is_scaled() -> bool:
    """Whether a loss scaler that is enabled takes this step: torch's, halfstep's or a subclass of theirs."""
    callers: list[Any] = [frame.f_locals.get("self") for frame, _ in walk_stack(None)]
    return any(hasattr(type(caller), "unscale_") and caller.is_enabled() for caller in callers)
