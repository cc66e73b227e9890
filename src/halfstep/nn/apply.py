"""`apply`: make a model follow a recipe, in place; `revert` and `advance`."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from halfstep.errors import ModelError, RecipeError
from halfstep.nn import noise
from halfstep.nn.adopt import Applied, applied_to, is_covered
from halfstep.nn.arrangement import Arrangement, arranged
from halfstep.nn.codes import (
    RECOMPUTE,
    check_float32,
    count,
    decode_parameters,
    rounded,
    storable,
    store,
    unstorable,
    wide_adapters,
)
from halfstep.nn.following import follow, root_of
from halfstep.nn.layers import ModuleFilter, warn_of_missed
from halfstep.nn.paths import same_parameters
from halfstep.nn.plan import Plan, PlannedLayer
from halfstep.nn.ranks import check_unwrapped
from halfstep.nn.schedule import Clock, Schedule
from halfstep.nn.stages import Steps, carry_out_stages, check_alike, clear
from halfstep.nn.unit.scale import is_unit_scaled, revert_unit
from halfstep.nn.watched import end_watch, watch, watch_copy
from halfstep.ops.part import part_of, parts_of
from halfstep.ops.subclasses import check_initialized
from halfstep.quant.tracing import untraced
from halfstep.recipe import DTYPES, Recipe, get_recipe
from halfstep.unit.roles import unit_part


def apply(model: nn.Module, recipe: str | Recipe, module_filter: ModuleFilter | None = None) -> Plan:
    """Make `model` follow `recipe`, in place; parameters, names, ties and state-dict keys stay.

    Parameters are stored in the recipe's dtype. The forward runs under torch.autocast if the recipe computes in 16
    bits, and autocast ends with the forward, also on an exception. Floating outputs are returned in float32, nested
    ones too, and so are those of a part that is called outside the model's forward (see `halfstep.following`). Linear,
    convolutional and recurrent layers that a rule matches round the operands of their matmuls. On a CPU without 16-bit
    matrix units the 16-bit matmuls of the other layers are emulated in float32 (`kernels.carried`). Parameters of norms
    with running statistics keep their dtype (apex's keep_batchnorm_fp32), and so do buffers: a warning names those
    whose values are rounded to 16 bits already under a recipe with float32 weights or masters.

    Args:
        model: any module with parameters; apply before wrapping it in DDP, FSDP or torch.compile.
        recipe: a name or a `Recipe`.
        module_filter: called with (module, path); layers for which it is false keep their stock matmuls.

    Returns:
        What was done and what was not (`halfstep.plan` computes it without changing the model).

    Raises:
        RecipeError: unknown recipe; the model already follows one; a rule or the filter selects no layer.
        ModelError: no parameters, float64 or complex ones, or a model that is already wrapped. Nothing was changed.
    """
    found = decide(model, recipe, module_filter)
    found.warn(model)
    made = found.carry_out(model)
    watch(model, found.recipe)
    return made


def plan_of(model: nn.Module) -> Plan:
    """The plan that `apply`, `prepare` or `quantize_model` carried out on a model.

    Args:
        model: the model, or a wrapper of it (DDP, torch.compile, PEFT).

    Raises:
        RecipeError: the model follows no recipe.
    """
    return applied_to(root_of(model)).plan


def revert(model: nn.Module) -> None:
    """Undo `apply`: every class, attribute and dtype is restored. Bits that storage rounded away stay lost.

    (`halfstep.prepare` keeps the full weights in the optimizer's state, as `master`.) If the model is unit-scaled and
    follows no recipe, or no longer, it undoes `unit_scale` instead; weights are restored within one rounding.

    Args:
        model: the model that `apply` was called on, or a wrapper of it (DDP, torch.compile, PEFT).

    Raises:
        RecipeError: the model follows no recipe, is quantized for inference, or has a part that was parametrized since.
    """
    model = root_of(model)
    if part_of(model).applied is None and is_unit_scaled(model):
        return revert_unit(model)
    applied = applied_to(model)
    if applied.quantized:
        raise RecipeError(
            f"this {type(model).__name__} is quantised for inference, and its full weights are gone: build it "
            "again and load them, or quantise a copy (copy.deepcopy) next time; halfstep.dequantize_model gives it the "
            "values of its codes"
        )
    for path, module in model.named_modules():
        if is_covered(module):
            raise RecipeError(
                f"{path or type(model).__name__} was given another class after the recipe was applied, such as by a "
                "parametrization: take that away first (torch.nn.utils.parametrize.remove_parametrizations), then "
                "revert"
            )
    decode_parameters(model)
    undo(model)
    before = applied.dtypes | applied.adapters
    for parameter, name in same_parameters(model, before):
        store(parameter, before[name])
    return None


@untraced
def advance(model: nn.Module, *, skipped: bool = False, process_group: Any = None) -> None:
    """End an optimizer step: update the scaling states, once, equally on every rank. `scaler.update()` calls it.

    It has an effect only for recipes whose scales depend on earlier steps, that draw noise, or that have stages.

    Args:
        model: as for `revert`.
        skipped: no optimizer stepped on this batch; its recorded amaxes are dropped. If one rank says so, all do.
        process_group: the ranks that agree on the largest amaxes, which hold the same layers (in a pipeline, those of
            one stage). None: the default group, if there is one.

    Raises:
        RecipeError: the model follows no recipe; it ran in eval(), which records no amaxes; or stages begin at
            fractions of a run whose length is not known (`halfstep.optimize`, `total_steps`).
    """
    Steps(root_of(model), process_group).advance(skipped)


@dataclass(frozen=True)
class Decision:
    """All changes that `apply` will make to a model, by name and by path; decided and checked before the first one."""

    recipe: Recipe
    stages: tuple[Arrangement, ...]
    """The changes to the modules in each stage of the recipe."""
    moves: dict[str, nn.Parameter]
    """The parameters that will be stored in the recipe's dtype."""
    adapters: dict[str, nn.Parameter]
    """The parameters of adapters, which will be stored in float32."""
    kept: dict[str, str]
    """The other parameters, with the reason why they keep their dtype."""
    rounded: tuple[str, ...]
    """The parameters that matmuls round; if the recipe stores weights as codes, those that will be codes."""

    @property
    def with_masters(self) -> list[nn.Parameter]:
        """The parameters that will have masters."""
        codes = self.recipe.codes
        if self.recipe.master is None and (codes is None or codes.master is None):
            return []
        return [parameter for parameter in self.moves.values() if parameter.requires_grad]

    def warn(self, model: nn.Module) -> None:
        """Warn of parameters and buffers that are rounded to 16 bits already, and of layers that rules cannot reach."""
        _warn_of_narrow(model, self.recipe, self.moves)
        for each in self.stages:
            if each.matched.missed:
                warn_of_missed(model, each.recipe, each.matched)

    def plan(self, model: nn.Module) -> Plan:
        """The decision as a `Plan`."""
        first, *others = (self._stage(model, each) for each in self.stages)
        later = tuple(zip((stage.when for stage in self.recipe.stages), others, strict=True))
        return replace(first, recipe=self.recipe, later=later)

    def carry_out(self, model: nn.Module) -> Plan:
        """Carry it out; returns the plan, which is also stored on the model."""
        recipe, first, made = self.recipe, self.stages[0], self.plan(model)
        schedule = Schedule(recipe) if recipe.stages else None
        clock = Clock() if any(each.keeps_states for each in self.stages) else None
        if schedule is not None:
            clock = Clock("scaling states and the stage of its recipe have" if clock else "recipe's stage has")
        applied = Applied(
            recipe,
            first.recipe.autocast,
            {name: parameter.dtype for name, parameter in self.moves.items()},
            DTYPES[recipe.grad_format],
            clock,
            made,
            self.rounded,
            {name: parameter.dtype for name, parameter in self.adapters.items()},
            schedule=schedule,
        )
        try:
            if schedule is None:
                first.carry_out(model)
            else:
                carry_out_stages(model, self.stages)
            if drawing := set().union(*[each.draws for each in self.stages]):
                noise.attach(model, sorted(drawing), torch.initial_seed())
            follow(model, applied, _after_copy, first.widened.values())
        except BaseException:
            undo(model)
            raise
        for parameter in self.moves.values():  # last, since `undo` cannot restore bits that rounding takes
            store(parameter, DTYPES[recipe.weights], DTYPES[recipe.grad_format])
        for parameter in self.adapters.values():
            store(parameter, torch.float32)
        if clock is not None:
            clock.begin(model)
        return made

    def _stage(self, model: nn.Module, found: Arrangement) -> Plan:
        """The plan of one stage."""
        recipe, matched = found.recipe, found.matched
        dtype, device = recipe.autocast or DTYPES[recipe.weights], next(model.parameters()).device
        if device.type == "meta":
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        layers = {}
        for path, spec in found.specs.items():
            module: Any = model.get_submodule(path)
            experts = module.num_experts if found.weights[path][0].stacked else 0
            layers[path] = PlannedLayer(type(module).__name__, spec, dtype, device, experts)
        kept = {**self.kept, **matched.kept, **dict.fromkeys(found.widened, "computes in float32")}
        if recipe.saved is not None and not found.savers:
            kept[type(model).__name__] = (
                "no norm, activation function, gated MLP or rounded product to save in few bits"
            )
        stored = dict.fromkeys(map(id, self.moves.values()), DTYPES[self.recipe.weights])
        stored |= dict.fromkeys(map(id, self.adapters.values()), torch.float32)
        return Plan(
            recipe=recipe,
            model=type(model).__name__,
            stored=count(model, stored),
            layers=layers,
            kept=kept,
            matmuls=len(matched.kinds),
            attention=matched.attends,
            smoothed=matched.smoothed,
            saved=tuple(found.savers),
            sought=matched.sought,
            states=sum([len(spec.states) * len(found.weights[path]) for path, spec in found.specs.items()]),
        )


def decide(model: nn.Module, recipe: str | Recipe, module_filter: ModuleFilter | None = None) -> Decision:
    """What `apply` would do to the model, which is not changed.

    Raises:
        RecipeError, ModelError: as `apply`.
    """
    recipe = get_recipe(recipe)
    _check_model(model)
    for stage in recipe.by_stage:
        _check_recipe(model, stage)
    found = tuple([arranged(model, stage, module_filter) for stage in recipe.by_stage])
    if len(found) > 1:
        check_alike(found)
    adapters = {} if recipe.weights == "fp32" else wide_adapters(model, recipe)
    moves, kept = storable(model, recipe.float32_modules if recipe.weights != "fp32" else (), adapters)
    rounded = found[0].rounded
    if recipe.codes is not None:
        stacks = {name for name, weight in rounded.items() if weight.stacked}
        kept |= dict.fromkeys(stacks, "its weights and gradients stay as they are: one scale would serve all experts")
        rounded = {name: weight for name, weight in rounded.items() if name not in stacks}
    return Decision(recipe, found, moves, adapters, kept, tuple(rounded))


def undo(model: nn.Module) -> None:
    """Remove all that `apply` added to the model; parameters keep their dtype."""
    end_watch(model)
    noise.detach(model)
    clear(model)


def keep_grads(model: nn.Module) -> None:
    """Set the dtype in which gradients accumulate again: torch's copies and replacements of parameters lack it."""
    applied = applied_to(model)
    for parameter, _ in same_parameters(model, applied.dtypes):
        store(parameter, parameter.dtype, applied.grads)


def _after_copy(model: nn.Module) -> None:
    """Set up a copied model: its `Following` record refers to the copy, and gradients keep their dtype."""
    part = part_of(model).following
    part.bind(model)
    keep_grads(model)
    watch_copy(part.copied, model, applied_to(model).recipe.name)


def _check_model(model: nn.Module) -> None:
    """Raise for a model that no recipe can be applied to."""
    name = type(model).__name__
    if isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        raise ModelError(f"{name} wraps a model; apply the recipe to the model first, then wrap it")
    check_initialized(model)
    for path, _, own in parts_of(model):
        if own.applied is not None:
            raise _following(name, path, own.applied)
        raise RecipeError(
            f"{name}: its part {path!r} follows the recipe of another model that it belongs to; halfstep.revert "
            "that one first, or apply one recipe to a module that holds both"
        )
    parameters = dict(model.named_parameters())
    for path, parameter in parameters.items():
        if (why := unstorable(parameter)) is not None:
            raise ModelError(f"{name}: {path} {why}")
    if not parameters:
        raise ModelError(f"{name} has no parameters; there is nothing to store or train")


def _following(name: str, path: str, applied: Applied) -> RecipeError:
    """The error for a model that follows a recipe already, or has a part that does."""
    where, recipe = f"its part {path!r}" if path else "it", applied.recipe.name
    if not applied.quantized:
        return RecipeError(f"{name}: {where} already follows {recipe!r}; halfstep.revert it first")
    return RecipeError(
        f"{name}: {where} is quantised under {recipe!r}. Adapters train beside its codes under that recipe: give "
        f"recipe={recipe!r}, and quantise with adapters=True; for another recipe take another copy of the model"
    )


def _check_recipe(model: nn.Module, recipe: Recipe) -> None:
    """Raise for a recipe that this model, these ranks or this torch version cannot follow."""
    name = type(model).__name__
    if recipe.unit_scaled and all(unit_part(module).multipliers is None for module in model.modules()):
        raise ModelError(
            f"recipe {recipe.name!r} casts with scales of 1, for models whose tensors are of unit size, and {name} is "
            "not unit-scaled: call halfstep.unit_scale(model, *inputs) first, or write it with halfstep.unit's modules"
        )
    if recipe.float32_functions and is_unit_scaled(model):
        raise RecipeError(
            f"recipe {recipe.name!r} widens functions in the model's own code, which unit_scale has taken over in "
            f"{name}; take a recipe without float32_functions, such as fp16-mixed"
        )
    for path, module in model.named_modules() if recipe.weights != "fp32" else ():
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
            raise ModelError(
                f"{name}: {path or 'the model'} is scripted (torch.jit.script), and its code computes with weights as "
                f"they are stored, which is in {recipe.weights} under {recipe.name!r}. Put the plain module in its "
                "place, and take torch.compile; or take a recipe of float32 weights, such as 'bf16-mixed'"
            )
    check_float32(model, recipe.float32_buffers, recipe.name)
    check_unwrapped(model, recipe)


def _warn_of_narrow(model: nn.Module, recipe: Recipe, parameters: Mapping[str, nn.Parameter]) -> None:
    """Warn if parameters or buffers were rounded to 16 bits before, and the recipe keeps float32 weights or masters."""
    if (recipe.master or recipe.weights) not in ("fp32", "split"):
        return
    narrow = {path: p.dtype for path, p in parameters.items() if p.dtype != torch.float32 and not p.is_meta}
    if narrow:
        path, dtype = next(iter(narrow.items()))
        warnings.warn(
            f"{type(model).__name__}: {len(narrow)} of {len(parameters)} parameters arrive in 16 bits ({path} in "
            f"{dtype}); "
            f"{recipe.name!r} keeps float32 weights or masters, which can only start from those rounded values. "
            "Load the model in float32 where its file holds more (transformers 5 takes the file's dtype unless told: "
            "from_pretrained(..., dtype=torch.float32))",
            stacklevel=4,
        )
    if cast := rounded(model):
        name, buffer = next(iter(cast.items()))
        warnings.warn(
            f"{type(model).__name__}: {len(cast)} of {len([*model.buffers()])} buffers arrive rounded to 16 bits "
            f"({name} in {buffer.dtype}), and stay so under {recipe.name!r}, which keeps float32: rotary frequencies "
            "in bfloat16 put angles at position 4000 off by more than a radian. After the cast "
            f"{RECOMPUTE}; or cast parameters alone: for p in model.parameters(): p.data = p.data.bfloat16()",
            stacklevel=4,
        )
