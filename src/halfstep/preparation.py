"""apply + optimizer + loss scaler: in one line, or in two steps."""

import logging
import warnings
import weakref
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import ModelError, OptimizerError, RecipeError
from halfstep.nn import noise
from halfstep.nn.adopt import applied_to
from halfstep.nn.apply import decide, keep_grads
from halfstep.nn.codes import hold, storable, wide_adapters
from halfstep.nn.following import came_later, root_of
from halfstep.nn.layers import ModuleFilter, projections
from halfstep.nn.paths import adapters_of, same_parameters
from halfstep.nn.plan import Plan
from halfstep.nn.ranks import Reduced, check_ranks
from halfstep.nn.schedule import Schedule, check_total
from halfstep.nn.stages import Steps
from halfstep.nn.watched import end_watch, watch_clones
from halfstep.ops.part import own_part, part_of, parts_of
from halfstep.optim import LossScaler, LowBit, check_moments, check_optimizer, convert
from halfstep.optim.present import Reference
from halfstep.optim.rules import UpdateRule
from halfstep.optim.shards import are_several, first_ranks
from halfstep.quant import draw_seed
from halfstep.recipe import DTYPES, Origin, Projection, Recipe, check_change, get_recipe
from halfstep.text import some


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

    The model is changed in place and returned (see `halfstep.apply`). The optimizer that comes back shares the
    parameter groups of the one given, so schedulers built before or after work, and takes over its moments and step
    counts. Masters are taken before the weights are rounded. `halfstep.audit(model, optimizer, scaler)` shows each
    tensor. Where fully_shard, accelerate or Lightning comes in between: `halfstep.apply`, then `halfstep.optimize`.

    Args:
        model: any module with parameters, before DDP, FSDP or torch.compile. One that is quantised under this recipe
            (`quantize_model(..., adapters=True)`) trains what was put beside its codes.
        optimizer: torch.optim.AdamW, Adam, NAdam, RMSprop, Adagrad, SGD or Muon, or a subclass that overrides nothing;
            `halfstep.optim`'s Lion or Lamb; or several of these as one (`halfstep.optim.Combined`).
        recipe: a name or a `Recipe`.
        module_filter: as in `halfstep.apply`.
        generator: where the seed of stochastic rounding comes from (a generator, or the seed itself).
        process_group: the ranks that agree on overflows, and so on steps that are skipped; None is all of them.
        amax_group: the ranks that agree on the amaxes of scaling states and on the seed of stochastic rounding: those
            that hold the same layers (of a pipeline, a stage's). None is `process_group`.
        total_steps: how often the run calls `scaler.update()`: for recipes that change after a fraction of it. Others
            take it and leave it.
        recipe_change: whether the states that are loaded later may be those of another recipe: `refuse`, which is an
            error that names both, or `allow`, which tells what of them is rounded, dropped or started over.

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
    run = _Run(generator, process_group, amax_group, total_steps, recipe_change)
    if adapts(model, recipe):
        return model, *_optimize(model, optimizer, run, {})
    if recipe.stages:
        Schedule(recipe).fix(total_steps)
    found = decide(model, recipe, module_filter)
    trained = _check(model, optimizer, recipe)
    masters = {p: p.detach().float().clone() for p in found.mastered if p in trained.parameters}
    found.warn(model)
    found.lay(model)
    return model, *_optimized(model, optimizer, trained, masters, run)


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
    return _with_optimizer(made, optimizer, _check(model, optimizer, recipe, may_be_meta=True).rule)


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
    run = _Run(generator, process_group, amax_group, total_steps, recipe_change)
    return _optimize(model, optimizer, run, masters or {})


def adapts(model: nn.Module, recipe: Recipe) -> bool:
    """Whether the model is quantised under the recipe already, and trains adapters beside its codes."""
    return any(
        own.applied is not None and own.applied.adapts and own.applied.recipe == recipe for _, _, own in parts_of(model)
    )


@dataclass(frozen=True)
class _Run:
    """How a model is trained, beside its recipe: the arguments of `prepare` of these names.

    Raises:
        RecipeError: as `prepare`, of `total_steps` and `recipe_change`.
    """

    generator: torch.Generator | int | None
    process_group: Any
    amax_group: Any
    total_steps: int | None
    recipe_change: str

    def __post_init__(self) -> None:
        check_total(self.total_steps)
        check_change(self.recipe_change)

    @property
    def same_layers(self) -> Any:
        """The ranks that hold the same layers."""
        return self.process_group if self.amax_group is None else self.amax_group


@dataclass(frozen=True)
class _Trained:
    """What an optimizer trains of a model, and how."""

    rule: UpdateRule
    names: dict[nn.Parameter, str]
    """Of the model's parameters."""
    parameters: set[nn.Parameter]
    """Of the optimizer."""
    projections: dict[nn.Parameter, Projection]


def _optimize(
    model: nn.Module, optimizer: torch.optim.Optimizer, run: _Run, known: Mapping[nn.Parameter, Tensor]
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
        applied.schedule.check(run.total_steps)
    trained = _check(root, optimizer, recipe)
    for parameter, name in same_parameters(root, applied.dtypes):
        if parameter.dtype != DTYPES[recipe.weights]:
            raise ModelError(
                f"{name} is {parameter.dtype}, and was stored in {DTYPES[recipe.weights]} when {recipe.name!r} was "
                "applied: load_state_dict(assign=True), or a cast since, put another tensor there. Call halfstep.apply "
                "after it, on the model with its weights; or load without assign, after model.to_empty(device=...)"
            )
    _check_new(weakref.ref(root), trained.parameters, stacklevel=5)
    keep_grads(root)
    masters = full_weights(root, recipe, trained.parameters - known.keys())
    masters |= {p: full for p, full in known.items() if p in trained.parameters}
    return _optimized(root, optimizer, trained, masters, run)


def full_weights(
    model: nn.Module, recipe: Recipe, among: Collection[nn.Parameter] | None = None
) -> dict[nn.Parameter, Tensor]:
    """Float32 copies of the weights that a recipe keeps masters of, before `apply` rounds them; of those `among` some.

    `prepare` takes them by itself. For the two steps: `masters = full_weights(model, recipe)`, then `apply`, then
    `optimize(..., masters=masters)`.
    """
    if recipe.master is None and (recipe.codes is None or recipe.codes.master is None):
        return {}
    moves = storable(model, recipe.float32_modules, wide_adapters(model, recipe))[0].values()
    return {p: p.detach().float().clone() for p in moves if p.requires_grad and (among is None or p in among)}


def _with_optimizer(made: Plan, optimizer: torch.optim.Optimizer, rule: UpdateRule) -> Plan:
    """The plan, with the bytes of that optimizer's states; of several rules, of the one with the most parameters."""
    name, own = type(optimizer).__name__, rule
    if rule.parts:
        held = Counter({rule.of(group): 0 for group in optimizer.param_groups})
        for group in optimizer.param_groups:
            held[rule.of(group)] += sum(parameter.numel() for parameter in group["params"])
        own = max(held, key=held.__getitem__)
        name = f"{own.torch_class.__name__}, one of those combined"
    moments: dict[str, None] = {}
    for group in optimizer.param_groups:
        if own is rule or rule.of(group) is own:
            moments |= dict.fromkeys(own.moments(group))
    return replace(made, optimizer=name, moments=tuple(moments))


def _check(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe, may_be_meta: bool = False) -> _Trained:
    """What the optimizer trains of the model.

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
    names = {parameter: name for name, parameter in model.named_parameters()}
    projected = {} if recipe.projection is None else projections(model, recipe)
    rule = check_optimizer(optimizer, names, projected)
    trained = _trained(optimizer)
    if names and not trained & names.keys():
        raise OptimizerError(
            "the optimizer holds none of the model's parameters; build it over model.parameters() of this model, after "
            "whatever replaces them (fully_shard, to_empty)"
        )
    for parameter, name in names.items():
        if parameter not in trained:
            continue
        if not may_be_meta and (parameter.is_inference() or torch.is_inference_mode_enabled()):
            raise ModelError(
                f"{type(model).__name__}: {name} would be, or is, a tensor of torch.inference_mode(), which no "
                "backward pass and no step takes: build the model, and call halfstep, outside of it"
            )
        if parameter.is_meta and not may_be_meta:
            raise ModelError(
                f"{type(model).__name__}: {name} is on the meta device and has no values to train. halfstep.apply "
                "takes such a model; then call model.to_empty(device=...), load its weights, build the optimizer, and "
                "call halfstep.optimize(model, optimizer)"
            )
        if recipe.codes is not None and _is_in_shared_memory(parameter):
            raise ModelError(
                f"{type(model).__name__}: {name} lies in memory that processes share (share_memory, or the model came "
                f"by torch.multiprocessing), and {recipe.name!r} keeps it as codes in memory of this process alone: "
                "the others would not see it move. Take a recipe without codes, such as 'bf16-mixed', or train copies "
                "under DDP"
            )
    if recipe.grads is not None:
        check_ranks(recipe, names)
    return _Trained(rule, names, trained, projected)


def _is_in_shared_memory(parameter: Tensor) -> bool:
    plain = type(parameter) in (nn.Parameter, Tensor) and parameter.device.type == "cpu"
    return plain and bool(parameter.is_shared())  # type: ignore[no-untyped-call]


def _check_new(reference: Reference, trained: Collection[Tensor], stacklevel: int = 4) -> None:
    """Refuse to train what `apply` would have stored in float32, had it been there then, and say which layers were not
    there then."""
    model = reference()
    if model is None or part_of(model).applied is None:
        return
    recipe, trained = applied_to(model).recipe, {*trained}
    for name, parameter in wide_adapters(model, recipe).items():
        if parameter in trained and parameter.itemsize < torch.float32.itemsize:
            raise OptimizerError(
                f"{name} is an adapter's and is stored in {parameter.dtype}; {recipe.name!r} keeps adapters in "
                "float32. PEFT gives one the dtype of what it adapts where autocast_adapter_dtype is False, and 0.18 "
                "does in add_adapter. Cast each of its parameters first: parameter.data = parameter.data.float()"
            )
    _warn_of_later(model, recipe, trained, stacklevel)


def _warn_of_later(model: nn.Module, recipe: Recipe, trained: Collection[Tensor], stacklevel: int) -> None:
    if recipe.weights == "fp32" and not any(rule.linear.rounds for stage in recipe.by_stage for rule in stage.rules):
        return
    later, is_adapter = set(came_later(model)), adapters_of(model)
    found = [
        name
        for name, parameter in model.named_parameters()
        if parameter in trained and not is_adapter(name) and model.get_submodule(name.rpartition(".")[0]) in later
    ]
    if found:
        warnings.warn(
            f"{some(found)} came to the model after recipe {recipe.name!r} was applied, and do not "
            "follow it: they stay in the dtype that they have, and the products of their layers round nothing. Build "
            "the whole model first, then call halfstep.prepare",
            stacklevel=stacklevel,
        )


def _trained(optimizer: torch.optim.Optimizer) -> set[nn.Parameter]:
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def _optimized(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    trained: _Trained,
    masters: Mapping[nn.Parameter, Tensor],
    run: _Run,
) -> tuple[LowBit, LossScaler]:
    applied, reference = applied_to(model), weakref.ref(model)
    recipe, scale = applied.recipe, applied.recipe.loss_scale
    end_watch(model)
    steps = Steps(model, run.same_layers, Origin(recipe, run.recipe_change))
    scaler = LossScaler(
        init_scale=scale.init if scale else 1.0,
        growth_interval=scale.growth_interval if scale else 2000,
        enabled=scale is not None,
        dynamic=scale is not None and scale.dynamic,
        hysteresis=scale.hysteresis if scale else 1,
        names=trained.names,
        follower=steps,
        process_group=run.process_group,
    )
    if recipe.codes is not None:
        hold(model, applied.rounded, recipe.codes)
    low_bit = convert(
        optimizer, recipe, masters, run.generator, reference, run.same_layers, trained.projections, run.recipe_change,
        trained.rule,
    )  # fmt: skip
    for parameter in trained.parameters:
        if hasattr(parameter, "device_mesh"):
            noise.localize(model)
            break
    _seed_noise(model, run)
    planned = _with_optimizer(applied.plan, optimizer, low_bit.rule)
    own_part(model).applied = replace(applied, plan=planned)
    if _LOGGER.isEnabledFor(logging.INFO):
        _LOGGER.info("%s", planned if _LOGGER.isEnabledFor(logging.DEBUG) else planned.headline)
    low_bit.check_new = partial(_check_new, reference)
    if recipe.communication is not None or recipe.grads is not None:
        low_bit.check_reduced = Reduced(recipe, reference)
    steps.follow(low_bit)
    if recipe.weights != "fp32":
        watch_clones(model, low_bit, recipe.name)
    if applied.schedule is not None:
        applied.schedule.fix(run.total_steps)
    return low_bit, scaler


def _seed_noise(model: nn.Module, run: _Run) -> None:
    """Seed what the model's layers draw: alike where several processes train together."""
    own = noise.seed(model)
    if own is not None:
        seed = own if run.generator is None else int(draw_seed(run.generator))
        noise.reseed(model, first_ranks(seed, run.same_layers) if are_several(run.same_layers) else seed)
