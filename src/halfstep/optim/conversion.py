"""From torch's optimizer to one in few bits, which goes on where that one stands."""

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
    """The optimizer that continues `optimizer` under a recipe: same groups, same moments, same step counts.

    The parameter groups are shared, not copied, so a scheduler built on the old optimizer before, or on the new one
    after, sets the learning rate of both. The old one's state and its hooks move over, and the old one refuses to be
    stepped, saved or loaded from then on.

    Args:
        masters: the float32 values of parameters that are stored in fewer bits, taken before they were rounded.
        generator: where the seed of stochastic rounding comes from. Where processes train together, all take the seed
            of the first one.
        model: a weak reference to the model: once parameters have left it, the others are not stepped on in silence.
        process_group: the processes that train together; None is the default group, where there is one.
        projections: of parameters that are updated in a subspace of their gradients, how.
        recipe_change: whether it loads states of other recipes, `refuse` or `allow`.
        rule: what `check_optimizer` said of it; None asks.

    Raises:
        OptimizerError: the class, an option, a parameter or a state cannot be expressed; the optimizer is left as it
            was.
    """
    rule = rule or check_optimizer(optimizer, projections=projections)
    # Drawn only where it is used: a recipe that rounds to nearest leaves the model's dropout masks as they were.
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
        # A scheduler built on it asks whether it has stepped; its steps are the new one's now.
        old._opt_called = True  # type: ignore[attr-defined]
        if not isinstance(old, Described):  # which never stepped and says so itself
            old.register_step_pre_hook(_refuse)
        old.register_state_dict_pre_hook(_refuse)
        old.register_load_state_dict_pre_hook(_refuse)
    return result


def _move_hooks(optimizer: torch.optim.Optimizer, result: LowBit) -> None:
    """Let what was registered on the old optimizer see the new one; a handle that removes a hook goes on to do so."""
    for name, hooks in vars(optimizer).items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            setattr(result, name, hooks)  # a handle refers to this very dictionary
            setattr(optimizer, name, OrderedDict())


def _refuse(optimizer: torch.optim.Optimizer, *_: Any) -> NoReturn:
    raise OptimizerError(
        f"this {type(optimizer).__name__} was handed to halfstep, and what came back has its state and its masters: "
        "step, save and load that one (model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe)). "
        "Schedulers may stay on this one"
    )
