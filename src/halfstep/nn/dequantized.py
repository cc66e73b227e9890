"""From a quantised model back to one of values: parameters in the place of codes, and no recipe."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from halfstep.errors import RecipeError
from halfstep.nn.applied import applied_to
from halfstep.nn.following import root_of
from halfstep.nn.quantized_weights import Stored, check_before_loading
from halfstep.nn.stages import clear
from halfstep.ops.part import part_of


@torch.no_grad()
def dequantize_model(model: nn.Module) -> None:
    """Make a quantised model a stock one again, in place: each weight has the values of its codes, in the dtype that it
    had when it was quantised, and requires no gradient. What rounding took stays lost; nothing is rounded any more.

    For adapters: to merge them into weights in full precision, `halfstep.dequantize_model(model)` comes before PEFT's
    `model.merge_and_unload()`.

    Args:
        model: what `halfstep.quantize_model` was called on, or what wraps it (PEFT).

    Raises:
        RecipeError: the model is not quantised.
    """
    root = root_of(model)
    if not applied_to(root).quantized:
        raise RecipeError(
            f"this {type(root).__name__} follows {applied_to(root).recipe.name!r} and is not quantised, its weights "
            "are values; halfstep.revert(model) takes the recipe away"
        )
    values: list[tuple[Any, dict[str, nn.Parameter]]] = []
    for module in root.modules():
        stored = part_of(module).stored
        if not stored:
            continue
        hooks = module._load_state_dict_pre_hooks
        for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook) is check_before_loading]:
            del hooks[key]
        found = {}
        for name, entry in stored.items():
            if isinstance(entry, Stored):
                found[name] = nn.Parameter(entry.values(module), requires_grad=False)
                for part in (*entry.parts, "format"):
                    delattr(module, f"{name}_{part}")
        values.append((module, found))
    clear(root)
    for module, found in values:
        module._parameters = {**found, **module._parameters}
