"""apply + optimizer + loss scaler: in one line, or in two steps."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import ModelError, OptimizerError, RecipeError
from halfstep.nn import noise
from halfstep.nn.applied import applied_to
from halfstep.nn.codes import hold
from halfstep.nn.decision import decide, keep_grads
from halfstep.nn.dtypes import storable, wide_adapters
from halfstep.nn.following import root_of
from halfstep.nn.layers import ModuleFilter
from halfstep.nn.plan import Plan
from halfstep.nn.projections import projections
from halfstep.nn.ranks import check_ranks
from halfstep.nn.schedule import Schedule, check_total
from halfstep.nn.stages import Steps
from halfstep.nn.stock_steps import end_watch
from halfstep.optim import LossScaler, LowBit, check_moments, check_optimizer, convert
from halfstep.optim.present import Reference
from halfstep.optim.rules.base import UpdateRule
from halfstep.optim.seeds import are_several, first_ranks
from halfstep.quant import draw_seed
from halfstep.recipe import Recipe, get_recipe
from halfstep.recipe.origin import Origin, check_change


_LOGGER = logging.getLogger("halfstep")


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: str | Recipe,
    *,
    module_filter: ModuleFilter | None = None,
    generator: torch.Generator | int | None = None,
    process_group: Any = None,
    amax_group: Any = None,
    total_steps: int | None = None,
    recipe_change: str = "refuse",
) -> tuple[nn.Module, LowBit, LossScaler]:
    """Make a model, its optimizer and a loss scaler follow a recipe. The loop is torch.amp's:

        model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe="bf16-stochastic")
        loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()        # the identity unless the recipe scales its loss
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer); scaler.update(); optimizer.zero_grad()

    The model is changed in place and returned (see `halfstep.apply`). The optimizer that comes back continues the one
    given: it shares its parameter groups, so schedulers built before or after work, and takes over its moments and step
    counts. Master copies are taken before the weights are rounded. What each tensor then is, really:
    `print(halfstep.audit(model, optimizer, scaler))`.

    Where something has to happen to the model in between (fully_shard, accelerate, Lightning), take the two steps that
    this is: `halfstep.apply(model, recipe)`, and later `halfstep.optimize(model, optimizer)`.

    Args:
        model: any module with parameters, before DDP, FSDP or torch.compile. One that is quantised under this recipe
            (`quantize_model(..., adapters=True)`) trains what was put beside its codes.
        optimizer: torch.optim.AdamW, Adam, NAdam, RMSprop or SGD, or a subclass that overrides nothing, or a
            `halfstep.optim` one (Lion, Lamb), over parameters of the model.
        recipe: a name or a `Recipe`.
        module_filter: as in `halfstep.apply`.
        generator: where the seed of stochastic rounding comes from (a generator, or the seed itself).
        process_group: the ranks that agree on overflows, and so on steps that are skipped; None is all of them.
        amax_group: the ranks that agree on the amaxes of scaling states and on the seed of stochastic rounding: those
            that hold the same layers (of a pipeline, a stage's). None is `process_group`.
        total_steps: how often the run calls `scaler.update()`: for recipes that change after a fraction of it. Others
            take it and leave it.
        recipe_change: whether the states that are loaded later may be those of another recipe: `refuse`, which is an
            error that names both, or `allow`, which tells what of them is rounded, dropped or begun anew.

    Raises:
        OptimizerError: the optimizer cannot be expressed, or holds no parameter of the model. Nothing was changed.
        RecipeError, ModelError: as `halfstep.apply`; a recipe that changes after a fraction of the run, without
            `total_steps`. Nothing was changed.
    """
    recipe = get_recipe(recipe)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model is a {type(model).__name__}, expected a module: halfstep.prepare(model, optimizer, recipe)"
        )
    check_total(total_steps)
    check_change(recipe_change)
    groups = process_group, amax_group
    if adapts(model, recipe):
        return model, *_optimize(model, optimizer, generator, groups, total_steps, {}, recipe_change)
    if recipe.stages:
        Schedule(recipe).fix(total_steps)
    found = decide(model, recipe, module_filter)
    _check(model, optimizer, recipe)
    masters = _masters(model, optimizer, recipe)
    found.warn(model)
    found.lay(model)
    low_bit, scaler = _optimized(model, optimizer, masters, generator, groups, total_steps, recipe_change)
    return model, low_bit, scaler


def plan(
    model: nn.Module,
    recipe: str | Recipe,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    module_filter: ModuleFilter | None = None,
) -> Plan:
    """What `prepare` would do to a model and its optimizer, or `apply` to a model alone; nothing is changed.

        print(halfstep.plan(model, "nvfp4"))   # which layers round, to what, on which path; what is kept, and why

    `halfstep.plan_of(model)` gives the same of a model that follows a recipe. A model on the meta device will do.

    Args:
        model, recipe, optimizer, module_filter: as for `prepare`. Without an optimizer, bytes are those of Adam.

    Raises:
        RecipeError, ModelError, OptimizerError: as `prepare`.
    """
    recipe = get_recipe(recipe)
    made = decide(model, recipe, module_filter).plan(model)
    if optimizer is None:
        return made
    return _with_optimizer(made, optimizer, _check(model, optimizer, recipe, may_be_meta=True))


def optimize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    generator: torch.Generator | int | None = None,
    process_group: Any = None,
    amax_group: Any = None,
    total_steps: int | None = None,
    masters: Mapping[nn.Parameter, Tensor] | None = None,
    recipe_change: str = "refuse",
) -> tuple[LowBit, LossScaler]:
    """The optimizer and the loss scaler of the recipe that a model follows: the second half of `halfstep.prepare`.

        halfstep.apply(model, "bf16-master")
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer, scaler = halfstep.optimize(model, optimizer)

    Once for each optimizer, where a model has several. Master copies start from the weights as `apply` rounded them,
    unless `masters` has what they were before.

    Args:
        model: the model that `apply` was called on, or what wraps it (DDP, torch.compile, PEFT).
        optimizer, generator, process_group, amax_group, total_steps, recipe_change: as in `prepare`.
        masters: what `full_weights(model, recipe)` gave before `apply`, of parameters that are still the same objects.

    Raises:
        RecipeError: the model follows no recipe; `total_steps`, as in `prepare`.
        OptimizerError: as `prepare`; the optimizer trains an adapter that came in fewer than 32 bits after `apply`,
            under a recipe that keeps adapters in float32. Nothing was changed.
    """
    check_total(total_steps)
    check_change(recipe_change)
    groups = process_group, amax_group
    return _optimize(model, optimizer, generator, groups, total_steps, masters or {}, recipe_change)


def adapts(model: nn.Module, recipe: Recipe) -> bool:
    """Whether the model is quantised under the recipe already, and trains adapters beside its codes."""
    found = (vars(module).get("_halfstep") for module in model.modules())
    return any(applied is not None and applied.adapts and applied.recipe == recipe for applied in found)


def _optimize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator | int | None,
    groups: tuple[Any, Any],
    total_steps: int | None,
    masters: Mapping[nn.Parameter, Tensor],
    recipe_change: str,
) -> tuple[LowBit, LossScaler]:
    root = root_of(model)
    applied = applied_to(root)
    recipe = applied.recipe
    if applied.quantized and not applied.adapts:
        raise RecipeError(
            f"this {type(root).__name__} is quantised for inference; train the model it was made from, or adapters "
            "beside its codes: halfstep.quantize_model(model, recipe, adapters=True)"
        )
    if applied.quantized and not any(parameter.requires_grad for parameter in _trained(optimizer)):
        raise OptimizerError(
            f"this {type(root).__name__} is quantised under {recipe.name!r}, and the optimizer holds nothing to train "
            "beside its codes: add adapters first, as peft.get_peft_model(model, LoraConfig(...)) does, and build the "
            "optimizer over their parameters"
        )
    if applied.schedule is not None:
        applied.schedule.check(total_steps)
    _check(root, optimizer, recipe)
    _check_adapters(weakref.ref(root), _trained(optimizer))
    keep_grads(root)
    masters = _masters(root, optimizer, recipe, masters)
    return _optimized(root, optimizer, masters, generator, groups, total_steps, recipe_change)


def full_weights(model: nn.Module, recipe: Recipe) -> dict[nn.Parameter, Tensor]:
    """Copies of the weights that a recipe keeps masters of, in float32: what `apply` takes bits from. None for others.

    `prepare` takes them by itself. For the two steps: `masters = full_weights(model, recipe)`, then `apply`, then
    `optimize(..., masters=masters)`.
    """
    return {parameter: parameter.detach().float().clone() for parameter in _mastered(model, recipe)}


def _with_optimizer(made: Plan, optimizer: torch.optim.Optimizer, rule: UpdateRule) -> Plan:
    """The plan, with the bytes of that optimizer's states."""
    moments = dict.fromkeys(name for group in optimizer.param_groups for name in rule.moments(group))
    return replace(made, optimizer=type(optimizer).__name__, moments=tuple(moments))


def _check(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe, may_be_meta: bool = False) -> UpdateRule:
    """The rule that updates the model's parameters.

    Raises:
        OptimizerError, ModelError, RecipeError: it cannot be optimized as it is; nothing was touched.
    """
    if isinstance(optimizer, LowBit):
        kind = type(optimizer).__name__
        raise OptimizerError(
            f"{kind} is halfstep's own and keeps its states already. Hand torch.optim.AdamW, Adam or SGD to "
            f"halfstep.prepare, with a recipe that keeps moments so (halfstep recipes); or call halfstep.apply(model, "
            f"recipe) and step this {kind} in the loop, with a halfstep.LossScaler where the recipe scales its loss"
        )
    check_moments(recipe)
    parameters = dict(model.named_parameters())
    names = {parameter: name for name, parameter in parameters.items()}
    rule = check_optimizer(optimizer, names, projections(model, recipe))
    trained = _trained(optimizer)
    if parameters and not trained & {*parameters.values()}:
        raise OptimizerError(
            "the optimizer holds none of the model's parameters; build it over model.parameters() of this model, after "
            "whatever replaces them (fully_shard, to_empty)"
        )
    meta = next((name for name, p in parameters.items() if p.is_meta and p in trained), None)
    if meta is not None and not may_be_meta:
        raise ModelError(
            f"{type(model).__name__}: {meta} is on the meta device and has no values to train. halfstep.apply takes "
            "such a model; then call model.to_empty(device=...), load its weights, build the optimizer, and call "
            "halfstep.optimize(model, optimizer)"
        )
    shared = next((name for name, p in parameters.items() if p in trained and _lies_in_shared_memory(p)), None)
    if recipe.codes is not None and shared is not None:
        raise ModelError(
            f"{type(model).__name__}: {shared} lies in memory that processes share (share_memory, or the model came by "
            f"torch.multiprocessing), and {recipe.name!r} keeps it as codes in memory of this process alone: the "
            "others would not see it move. Take a recipe without codes, such as 'bf16-mixed', or train copies under DDP"
        )
    check_ranks(recipe, parameters.values())
    return rule


def _lies_in_shared_memory(parameter: Tensor) -> bool:
    plain = type(parameter) in (nn.Parameter, Tensor) and parameter.device.type == "cpu"
    return plain and bool(parameter.is_shared())  # type: ignore[no-untyped-call]


def _check_adapters(reference: Reference, trained: Collection[Tensor]) -> None:
    """Refuse to train what `apply` would have stored in float32, had it been there then."""
    model = reference()
    if model is None or "_halfstep" not in vars(model):
        return
    recipe, trained = applied_to(model).recipe, {*trained}
    for name, parameter in wide_adapters(model, recipe).items():
        if parameter in trained and parameter.itemsize < torch.float32.itemsize:
            raise OptimizerError(
                f"{name} is an adapter's and is stored in {parameter.dtype}; {recipe.name!r} keeps adapters in "
                "float32. PEFT gives one the dtype of what it adapts where autocast_adapter_dtype is False, and 0.18 "
                "does in add_adapter. Cast each of its parameters first: parameter.data = parameter.data.float()"
            )


def _trained(optimizer: torch.optim.Optimizer) -> set[nn.Parameter]:
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def _mastered(model: nn.Module, recipe: Recipe) -> list[nn.Parameter]:
    if recipe.master is None and (recipe.codes is None or recipe.codes.master is None):
        return []
    moves = storable(model, recipe.float32_modules, wide_adapters(model, recipe))[0]
    return [p for p in moves.values() if p.requires_grad]


def _masters(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    known: Mapping[nn.Parameter, Tensor] = MappingProxyType({}),
) -> dict[nn.Parameter, Tensor]:
    """The float32 values of the weights that the optimizer keeps masters of; those that are known are taken as such."""
    trained = _trained(optimizer)
    others = [p for p in _mastered(model, recipe) if p in trained and p not in known]
    return {p: full for p, full in known.items() if p in trained} | {p: p.detach().float().clone() for p in others}


def _optimized(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    masters: Mapping[nn.Parameter, Tensor],
    generator: torch.Generator | int | None,
    groups: tuple[Any, Any],
    total_steps: int | None,
    recipe_change: str,
) -> tuple[LowBit, LossScaler]:
    applied = applied_to(model)
    recipe = applied.recipe
    end_watch(model)
    scaler, steps = _scaler(model, recipe, *groups, recipe_change)
    if recipe.codes is not None:
        hold(model, applied.rounded, recipe.codes)
    same_layers = groups[0] if groups[1] is None else groups[1]
    projected = projections(model, recipe)
    low_bit = convert(optimizer, recipe, masters, generator, weakref.ref(model), same_layers, projected, recipe_change)
    _seed_noise(model, generator, same_layers)
    planned = _with_optimizer(applied.plan, optimizer, low_bit.rule)
    vars(model)["_halfstep"] = replace(applied, plan=planned)
    if _LOGGER.isEnabledFor(logging.INFO):
        _LOGGER.info("%s", planned if _LOGGER.isEnabledFor(logging.DEBUG) else planned.headline)
    low_bit.check_new = partial(_check_adapters, weakref.ref(model))
    steps.follow(low_bit)
    if applied.schedule is not None:
        applied.schedule.fix(total_steps)
    return low_bit, scaler


def _seed_noise(model: nn.Module, generator: torch.Generator | int | None, process_group: Any) -> None:
    """Seed what the model's layers draw: alike where several processes train together."""
    own = noise.seed(model)
    if own is not None:
        seed = own if generator is None else int(draw_seed(generator))
        noise.reseed(model, first_ranks(seed, process_group) if are_several(process_group) else seed)


def _scaler(
    model: nn.Module, recipe: Recipe, process_group: Any = None, amax_group: Any = None, recipe_change: str = "refuse"
) -> tuple[LossScaler, Steps]:
    same_layers = process_group if amax_group is None else amax_group
    scale, steps = recipe.loss_scale, Steps(model, same_layers, Origin(recipe, recipe_change))
    scaler = LossScaler(
        init_scale=scale.init if scale else 1.0,
        growth_interval=scale.growth_interval if scale else 2000,
        enabled=scale is not None,
        dynamic=scale is not None and scale.dynamic,
        hysteresis=scale.hysteresis if scale else 1,
        names={parameter: name for name, parameter in model.named_parameters()},
        follower=steps,
        process_group=process_group,
    )
    return scaler, steps
