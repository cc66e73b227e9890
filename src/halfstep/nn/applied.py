"""What `apply` leaves on a model's root, for its forward, for `advance` and for `revert`."""

from dataclasses import dataclass, field

import torch
from torch import nn

from halfstep.errors import RecipeError
from halfstep.nn.clock import Clock
from halfstep.nn.plan import Plan
from halfstep.nn.schedule import Schedule
from halfstep.ops.part import part_of
from halfstep.recipe import Recipe


@dataclass(frozen=True)
class Applied:
    """The recipe that a model follows, and what it was before."""

    recipe: Recipe
    autocast: torch.dtype | None
    dtypes: dict[str, torch.dtype]
    """The dtype that each parameter had which the recipe stores in its own."""
    grads: torch.dtype
    """The dtype that their gradients accumulate in."""
    clock: Clock | None
    """Where scales, or the stage of the recipe, depend on earlier steps."""
    plan: Plan
    """What was done to the model, for people and programs."""
    rounded: tuple[str, ...] = ()
    """The parameters that products round, by name."""
    adapters: dict[str, torch.dtype] = field(default_factory=dict)
    """The dtype that each parameter of an adapter had, which is float32 now."""
    quantized: bool = False
    """Whether the weights are quantised for good (`nn.quantize_model`)."""
    adapts: bool = False
    """Whether a quantised model trains adapters beside its codes."""
    schedule: Schedule | None = None
    """Which stage of the recipe is in force, where it has several."""

    @property
    def stage(self) -> Recipe:
        """The recipe whose arithmetic is in force."""
        return self.recipe if self.schedule is None else self.recipe.by_stage[self.schedule.stage]


def applied_to(model: nn.Module) -> Applied:
    """What `apply` left on the model.

    Raises:
        RecipeError: it follows no recipe.
    """
    applied: Applied | None = part_of(model).applied
    if applied is None:
        raise RecipeError(
            f"this {type(model).__name__} follows no recipe; call halfstep.apply or halfstep.prepare on it first"
        )
    return applied
