"""`convert`: a torch optimizer to a `LowBit` one that continues from its state."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from halfstep.errors import OptimizerError
from halfstep.optim.checks import check_optimizer
from halfstep.optim.classes import Combined, Described
from halfstep.optim.lowbit import LowBit
from halfstep.optim.present import Reference
from halfstep.optim.rules import UpdateRule
from halfstep.quant import draw_seed
from halfstep.recipe import Origin, Projection, Recipe


def convert(
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    masters: Mapping[torch.nn.Parameter, torch.Tensor],
    generator: torch.Generator | int | None = None,
    model: Reference | None = None,
    process_group: Any = None,
    projections: Mapping[torch.nn.Parameter, Projection] | None = None,
    recipe_change: str = "refuse",
    rule: UpdateRule | None = None,
) -> LowBit:
    """An optimizer that continues `optimizer` under a recipe, with the same groups, moments and step counts.

    The parameter groups are shared, not copied, so a scheduler built on the old optimizer before, or on the new one
    after, sets the learning rate of both. The old one's state and hooks move over; it raises if it is stepped, saved or
    loaded from then on.

    Args:
        masters: the float32 values of parameters that are stored in fewer bits, taken before they were rounded.
        generator: the source of the seed of stochastic rounding. If processes train together, all take the first one's
            seed.
        model: a weak reference to the model, to detect parameters that were replaced since.
        process_group: the processes that train together; None: the default group, if there is one.
        projections: the projections of parameters that are updated in a subspace of their gradients.
        recipe_change: whether states of other recipes may be loaded, "refuse" or "allow".
        rule: the result of `check_optimizer`; None: it is called here.

    Raises:
        OptimizerError: the class, an option, a parameter or a state has no counterpart; the optimizer is not changed.
    """
    rule = rule or check_optimizer(optimizer, projections=projections)
    # Drawn only if used, so that recipes that round to nearest do not change the model's dropout masks.
    seed = int(draw_seed(generator)) if recipe.update_rounding == "stochastic" else 0
    result = LowBit(list(optimizer.param_groups), rule, recipe, seed, model, process_group, projections)
    result.defaults = {**optimizer.defaults, **result.defaults}
    result.param_groups = optimizer.param_groups
    result.origin = Origin(recipe, recipe_change)
    result.agree_on_the_seed()
    result.take_over(optimizer.state, masters)
    result.awaits_scaler = recipe.loss_scale is not None and recipe.loss_scale.scales
    _move_hooks(optimizer, result)
    for old in (optimizer, *(optimizer.optimizers if isinstance(optimizer, Combined) else ())):
        old.state.clear()
        # A scheduler built on it checks whether it has stepped; the new optimizer steps instead.
        old._opt_called = True  # type: ignore[attr-defined]
        if not isinstance(old, Described):  # a Described raises by itself
            old.register_step_pre_hook(_refuse)
        old.register_state_dict_pre_hook(_refuse)
        old.register_load_state_dict_pre_hook(_refuse)
    return result


def _move_hooks(optimizer: torch.optim.Optimizer, result: LowBit) -> None:
    """Move the hooks of the old optimizer to the new one; their handles still remove them."""
    for name, hooks in vars(optimizer).items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            setattr(result, name, hooks)  # handles refer to this dictionary
            setattr(optimizer, name, OrderedDict())


def _refuse(optimizer: torch.optim.Optimizer, *_: Any) -> NoReturn:
    raise OptimizerError(
        f"this {type(optimizer).__name__} was handed to halfstep, and what came back has its state and its masters: "
        "step, save and load that one (model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe)). "
        "Schedulers may stay on this one"
    )
