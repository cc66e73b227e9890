"""What `apply` leaves on a model's root, for its forward, for `advance` and for `revert`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halfstep.errors import RecipeError
from halfstep.recipe import Recipe


class Clock:
    """Notices an optimizer step that nobody ended with `advance`: stale scales would go on unseen."""

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}

    def __reduce__(self) -> Any:
        return Clock, ()  # torch counts the versions of copied weights anew

    def check(self, model: nn.Module) -> None:
        """Called before a training forward.

        Raises:
            RecipeError: trained weights have changed since the last one, and `end` was not called.
        """
        if not model.training:
            return
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad and not p.is_inference()}
        versions = {name: parameter._version for name, parameter in trained.items()}
        if any(self._versions.get(name, version) != version for name, version in versions.items()):
            raise RecipeError(
                f"{type(model).__name__}'s weights have changed and its scaling states have not moved on: call "
                "scaler.update() after every optimizer step, or halfstep.advance(model) where there is no scaler"
            )
        self._versions = versions

    def end(self) -> None:
        """An optimizer step has ended, or the weights are others from here on."""
        self._versions = {}


@dataclass(frozen=True)
class Applied:
    """The recipe that a model follows, and what it was before."""

    recipe: Recipe
    autocast: torch.dtype | None
    dtypes: dict[str, torch.dtype]
    """The dtype that each parameter had."""
    grads: torch.dtype
    """The dtype that their gradients accumulate in."""
    clock: Clock | None
    """Where scales depend on earlier steps."""
    rounded: tuple[str, ...] = ()
    """The layers whose products round their operands."""
    quantized: bool = False
    """Whether the weights are quantised for good (`nn.quantize_model`)."""


def applied_to(model: nn.Module) -> Applied:
    """What `apply` left on the model.

    Raises:
        RecipeError: it follows no recipe.
    """
    applied = vars(model).get("_halfstep")
    if not isinstance(applied, Applied):
        raise RecipeError(
            f"this {type(model).__name__} follows no recipe; call halfstep.apply or halfstep.prepare on it first "
            "(on the module itself, not on what wraps it)"
        )
    return applied
