"""Checks of parameters, gradients, options and saved states, which raise before any weight or state changes."""

import fnmatch
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import torch

from halfstep.errors import OptimizerError, unknown
from halfstep.optim.rules import UpdateRule, rule_of, stored_names
from halfstep.optim.states import projected
from halfstep.recipe import DTYPES, PROJECTOR, Projection, Recipe, Storage
from halfstep.text import some


_WHY = {
    torch.float64: "an update in float32 would round it at every step",
    torch.complex64: "its imaginary part would be lost",
    torch.complex128: "its imaginary part would be lost",
}

UNSCALED = (
    "this recipe scales its loss, and this step saw no loss scale: small fp16 gradients were zero before they came. "
    "Drive the loop with the scaler that halfstep.prepare returns: scaler.scale(loss).backward(), "
    "scaler.step(optimizer), scaler.update(); with accelerate or Trainer, set accelerator.scaler to it before "
    "accelerator.prepare. To train without a scale on purpose, use a recipe without ('fp16-mixed-unscaled')"
)

NO_GRADIENT = (
    "no parameter of this optimizer has a gradient, and this step moved none. Call backward() before it. If you did, "
    "the gradients went to parameters that it lacks: adapters and layers added after halfstep.prepare (add them before "
    "it, or by optimizer.add_param_group), or those of a model that fully_shard or a copy took over (under FSDP2 call "
    "halfstep.apply, shard, build torch's optimizer on what came out, and hand it to halfstep.optimize)"
)

params_of: Any = itemgetter("params")

Namer = Callable[[torch.Tensor, int], str]
"""namer(parameter, index): a parameter's name in error messages."""


def check_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Any, str] | None = None,
    projections: Mapping[Any, Projection] | None = None,
) -> UpdateRule:
    """The update rule of a torch optimizer, which `convert` can take. Nothing is changed.

    Args:
        names: the parameters' names, for errors.
        projections: the projections of parameters that will be updated in a subspace.

    Raises:
        OptimizerError: its class, an option, a parameter or a state has no counterpart here.
    """
    rule, known = rule_of(optimizer), names or {}
    check_parameters(optimizer.param_groups, lambda p, i: f"parameter {i}" + (f" ({known[p]})" if known.get(p) else ""))
    for number, group in enumerate(optimizer.param_groups):
        found = sorted({"rank", "update_proj_gap", "proj_type"} & group.keys())
        if found:
            raise OptimizerError(
                f"parameter group {number} of this {type(optimizer).__name__} has {', '.join(found)}, which only "
                "GaLore's optimizers read: hand the groups to halfstep.optim.GaLoreAdamW, which steps by itself, or "
                "leave the options out and take a recipe with a projection ('galore')"
            )
    own: dict[torch.Tensor, UpdateRule] = {}
    for group in optimizer.param_groups:
        own |= dict.fromkeys(group["params"], rule.of(group))
    for parameter, state in optimizer.state.items():
        check_state(state, own.get(parameter, rule))
    for parameter, projection in (projections or {}).items():
        one = own.get(parameter, rule)
        if projected(one, projection, tuple(parameter.shape)) is not one and optimizer.state.get(parameter):
            raise OptimizerError(
                f"{type(optimizer).__name__} has moments of {known.get(parameter, 'a parameter')}, which this recipe "
                "updates in a subspace with moments of another shape. Hand halfstep.prepare a new "
                f"{type(optimizer).__name__}, or take a recipe without a projection"
            )
    return rule


def check_moments(recipe: Recipe) -> None:
    """Check that every glob in a recipe's `moments` matches a moment of some update rule.

    Raises:
        OptimizerError: a glob matches none.
    """
    known = {*stored_names(), PROJECTOR}
    for stage in recipe.by_stage:
        for glob, kind in stage.moments if isinstance(stage.moments, tuple) else ():
            if not fnmatch.filter(known, glob):
                why = unknown("moment", glob, known)
                raise OptimizerError(f"recipe {recipe.name!r}: moments: {glob} = {kind} would keep nothing: {why}")


def check_parameters(groups: Iterable[Mapping[str, Any]], name: Namer) -> None:
    """Check that all parameters are of dtypes that recipes store.

    Raises:
        OptimizerError: a parameter is not.
    """
    for index, parameter in enumerate(chain.from_iterable(map(params_of, groups))):
        if parameter.dtype not in DTYPES.values():
            why = _WHY.get(parameter.dtype, "no recipe stores it")
            raise OptimizerError(
                f"{name(parameter, index)} is {parameter.dtype}: {why}. Expected "
                f"{', '.join(str(dtype) for dtype in DTYPES.values())}: convert it, or leave it to an optimizer of "
                "torch's own"
            )


def check_step(groups: Iterable[Mapping[str, Any]], rule: UpdateRule, name: Namer) -> None:
    """Check gradients and options before a step.

    Raises:
        OptimizerError: a gradient is sparse, or an option is set that has no counterpart.
    """
    for group in groups:
        rule.check(group)
    for index, parameter in enumerate(chain.from_iterable(map(params_of, groups))):
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise OptimizerError(
                f"{name(parameter, index)} has a {parameter.grad.layout} gradient; expected a dense one. "
                "Build its embedding with sparse=False. No parameter was moved"
            )


def check_new_group(
    new: Mapping[str, Any], groups: Iterable[Mapping[str, Any]], rule: UpdateRule, defaults: Collection[str]
) -> None:
    """Check a new group of an optimizer with several rules: it must give all options, since there are no defaults.

    Raises:
        OptimizerError: the group names none of the rules, or lacks options that other groups of its rule have.
    """
    own = rule.of(new)
    like: Mapping[str, Any] = next((group for group in groups if rule.of(group) is own), new)
    absent = [name for name in like if name not in new and name not in defaults]
    if absent:
        raise OptimizerError(
            f"a new parameter group of {own.name} lacks {', '.join(absent)}: an optimizer that combines several has no "
            "defaults, so give all of its options"
        )
    own.check(new)


def check_state(state: Mapping[str, Any], rule: UpdateRule, foreign: Iterable[str] = ()) -> None:
    """Check that a saved state holds no entry that the rule would ignore, and none of the names in `foreign`.

    Raises:
        OptimizerError: it does.
    """
    for name, why in rule.refused_states.items():
        if state.get(name) is not None:
            raise OptimizerError(
                f"the state holds {name}: {why}. Train on with torch's own optimizer, or start this one without it"
            )
    for name in foreign:
        if state.get(name) is not None:
            raise OptimizerError(
                f"the state holds {name!r}, which this recipe keeps nothing in: it was saved under another recipe. "
                "Resume under that one, or load the weights alone and start the optimizer from zero"
            )


def check_subspace(
    saved: Mapping[str, Any],
    kinds: Mapping[str, Storage],
    shapes: Mapping[str, tuple[int, ...]],
    parameter: torch.Tensor,
    number: object,
) -> None:
    """Check that a saved state fits the parameter's projection: moments of a subspace are only valid with their
    projector, and moments of the whole gradient cannot be used in a subspace.

    Args:
        kinds, shapes: the storage and the shape of the parameter's moments, by name.

    Raises:
        OptimizerError: it does not fit.
    """
    found, remedy = saved.get(PROJECTOR), "Resume as it was saved, or load the weights alone and start from zero"
    if found is not None and PROJECTOR not in kinds:
        raise OptimizerError(
            f"the state of parameter {number} holds moments in a subspace and its projector (GaLore), and here a "
            f"parameter of shape {tuple(parameter.shape)} is not projected. {remedy}"
        )
    if PROJECTOR not in kinds or not any(name in saved for name in kinds):
        return
    if not isinstance(found, torch.Tensor):
        what = "none" if found is None else f"a {type(found).__name__}"
        raise OptimizerError(
            f"the state of parameter {number} holds moments of the whole gradient, and here a parameter of shape "
            f"{tuple(parameter.shape)} is projected (GaLore): expected a projector of shape {shapes[PROJECTOR]}, found "
            f"{what}. {remedy}"
        )
    if tuple(found.shape) != shapes[PROJECTOR]:
        raise OptimizerError(
            f"the state of parameter {number} holds a projector of shape {tuple(found.shape)}, expected "
            f"{shapes[PROJECTOR]}: it was saved with another rank or side. {remedy}"
        )


def warn_of_late(parameters: Sequence[str]) -> None:
    """Warn that the masters of these parameters start from weights that are rounded already."""
    warnings.warn(
        f"the masters of {some(parameters)} start from weights that are rounded already: they were "
        "frozen, or not in the optimizer, when halfstep.prepare took the others' float32 values. To keep all bits, "
        "hand prepare an optimizer that has them, before they are frozen (requires_grad_(False))",
        stacklevel=6,
    )
