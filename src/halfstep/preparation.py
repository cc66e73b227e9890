"""`prepare`: apply a recipe to a model and its optimizer and make a loss scaler; `optimize`: its second half."""

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
from halfstep.nn.codes import storable, store_as_codes, wide_adapters
from halfstep.nn.following import added_later, root_of
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
    """Make a model, its optimizer and a loss scaler follow a recipe. The training loop is that of torch.amp:

        model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe="bf16-stochastic")
        loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()        # the identity unless the recipe scales its loss
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer); scaler.update(); optimizer.zero_grad()

    The model is changed in place and returned (see `halfstep.apply`). The returned optimizer shares the parameter
    groups of the given one, so schedulers built before or after work, and takes over its moments and step counts.
    Master weights are copied before the weights are rounded. `halfstep.audit(model, optimizer, scaler)` shows each
    tensor. If fully_shard, accelerate or Lightning come in between, call `halfstep.apply`, then `halfstep.optimize`.

    Args:
        model: any module with parameters, before DDP, FSDP or torch.compile. A model that is quantized under this
            recipe (`quantize_model(..., adapters=True)`) trains its adapters.
        optimizer: torch.optim.AdamW, Adam, NAdam, RMSprop, Adagrad, SGD or Muon, or a subclass that overrides nothing;
            `halfstep.optim`'s Lion or Lamb; or several of these combined (`halfstep.optim.Combined`).
        recipe: a name or a `Recipe`.
        module_filter: as in `halfstep.apply`.
        generator: the source of the seed of stochastic rounding (a generator, or the seed itself).
        process_group: the ranks that agree on overflows, and so on skipped steps; None: all ranks.
        amax_group: the ranks that agree on the amaxes of scaling states and on the seed of stochastic rounding, which
            hold the same layers (in a pipeline, those of one stage). None: `process_group`.
        total_steps: how often the run calls `scaler.update()`, for recipes that change after a fraction of it; others
            ignore it.
        recipe_change: whether states of another recipe may be loaded later: "refuse" raises an error that names both
            recipes; "allow" warns and says what is rounded, dropped or started over.

    Raises:
        OptimizerError: the optimizer is not supported, or holds no parameter of the model. Nothing was changed.
        RecipeError, ModelError: as `halfstep.apply`; or the recipe changes after a fraction of the run, and
            `total_steps` is not given. Nothing was changed.
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
    masters = {p: p.detach().float().clone() for p in found.with_masters if p in trained.parameters}
    found.warn(model)
    found.carry_out(model)
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

    `halfstep.plan_of(model)` returns the plan of a model that follows a recipe. The model may be on the meta device.

    Args:
        model, recipe, optimizer, module_filter: as for `prepare`. Without an optimizer, bytes are counted for Adam.

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

    Call it once for each optimizer of a model. Master weights start from the weights as `apply` rounded them, unless
    `masters` has their values from before.

    Args:
        model: the model that `apply` was called on, or a wrapper of it (DDP, torch.compile, PEFT).
        optimizer, generator, process_group, amax_group, total_steps, recipe_change: as in `prepare`.
        masters: the result of `full_weights(model, recipe)` before `apply`, for parameters that are still the same
            objects.

    Raises:
        RecipeError: the model follows no recipe; or `total_steps` is wrong, as in `prepare`.
        OptimizerError: as `prepare`; or the optimizer trains an adapter that was added after `apply` in fewer than 32
            bits, under a recipe with float32 adapters. Nothing was changed.
    """
    run = _Run(generator, process_group, amax_group, total_steps, recipe_change)
    return _optimize(model, optimizer, run, masters or {})


def adapts(model: nn.Module, recipe: Recipe) -> bool:
    """Whether the model is quantized under this recipe and trains adapters beside its codes."""
    return any(
        own.applied is not None and own.applied.adapts and own.applied.recipe == recipe for _, _, own in parts_of(model)
    )


@dataclass(frozen=True)
class _Run:
    """The arguments of `prepare` with these names.

    Raises:
        RecipeError: an invalid `total_steps` or `recipe_change`.
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
        """The group of ranks that hold the same layers: `amax_group`, or `process_group`."""
        return self.process_group if self.amax_group is None else self.amax_group


@dataclass(frozen=True)
class _Trained:
    """The parameters that an optimizer trains, and how."""

    rule: UpdateRule
    names: dict[nn.Parameter, str]
    """The names of all parameters of the model."""
    parameters: set[nn.Parameter]
    """The parameters of the optimizer."""
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
    """Float32 copies of the weights that will have masters, to be taken before `apply` rounds them.

    `prepare` does that itself. With two steps: `masters = full_weights(model, recipe)`, then `apply`, then
    `optimize(..., masters=masters)`.

    Args:
        among: the parameters to copy; None: all that will have masters.
    """
    if recipe.master is None and (recipe.codes is None or recipe.codes.master is None):
        return {}
    moves = storable(model, recipe.float32_modules, wide_adapters(model, recipe))[0].values()
    return {p: p.detach().float().clone() for p in moves if p.requires_grad and (among is None or p in among)}


def _with_optimizer(made: Plan, optimizer: torch.optim.Optimizer, rule: UpdateRule) -> Plan:
    """The plan with bytes counted for this optimizer; if it combines several, for the one with most parameters."""
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
    """The parameters of the model that the optimizer trains, after checks.

    Raises:
        OptimizerError, ModelError, RecipeError: the optimizer cannot train the model. Nothing was changed.
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
    """Raise for adapters added after `apply` that are not float32 but should be; warn of other layers added since."""
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
    later, is_adapter = set(added_later(model)), adapters_of(model)
    found = [
        name
        for name, parameter in model.named_parameters()
        if parameter in trained and not is_adapter(name) and model.get_submodule(name.rpartition(".")[0]) in later
    ]
    if found:
        warnings.warn(
            f"{some(found)} came to the model after recipe {recipe.name!r} was applied, and do not "
            "follow it: they stay in the dtype that they have, and their matmuls are not rounded. Build "
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
        store_as_codes(model, applied.rounded, recipe.codes)
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
    """Set the seed of the layers' noise, equal on all ranks that hold the same layers."""
    own = noise.seed(model)
    if own is not None:
        seed = own if run.generator is None else int(draw_seed(run.generator))
        noise.reseed(model, first_ranks(seed, run.same_layers) if are_several(run.same_layers) else seed)
