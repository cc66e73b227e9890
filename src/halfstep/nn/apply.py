"""Make a model follow a recipe, in place, and undo it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from halfstep.errors import ModelError, RecipeError
from halfstep.nn import noise
from halfstep.nn.adopt import is_covered
from halfstep.nn.applied import Applied, applied_to
from halfstep.nn.arrangement import Arrangement, arranged
from halfstep.nn.buffers import ANEW, rounded
from halfstep.nn.clock import Clock
from halfstep.nn.codes import let_go
from halfstep.nn.dtypes import check_grad_dtype, check_trained, count, storable, store, wide_adapters
from halfstep.nn.following import follow, part_of, root_of, unfollow
from halfstep.nn.layers import ModuleFilter, warn_of_missed
from halfstep.nn.ranks import check_ranks
from halfstep.nn.schedule import Schedule
from halfstep.nn.stages import Steps, autocast_of, check_alike, clear, lay_in_turn
from halfstep.nn.stock_steps import end_watch, watch
from halfstep.nn.tuners import same_parameters
from halfstep.nn.unit.scale import is_unit_scaled, revert_unit
from halfstep.ops.untraced import untraced
from halfstep.recipe import DTYPES, Recipe, get_recipe
from halfstep.unit import MULTIPLIERS


@dataclass(frozen=True)
class Report:
    """What `apply` did to a model, and what it left alone. `print(report)` shows it."""

    recipe: str
    stored: dict[str, int]
    """How many parameters are now stored in each dtype."""
    quantized: tuple[str, ...]
    """The layers whose products round their operands."""
    kept: dict[str, str]
    """Parameters and layers that do not follow the recipe, with the reason."""
    attention: tuple[str, ...] = ()
    """The modules that round the operands of attention's two products."""
    smoothed: tuple[str, ...] = ()
    """The gated MLPs whose product is scaled before the down-projection rounds it."""
    saved: tuple[str, ...] = ()
    """The modules of which autograd keeps what it saves in few bits, wholly or in part."""
    sought: dict[str, str] = field(default_factory=dict)
    """What optional rules that round mean by name and no layer is, such as attention: their globs. A layer of that kind
    with another name follows a later rule."""
    later: tuple[tuple[str, Report], ...] = ()
    """Of a recipe with stages: when each later one begins, and what it does."""

    def __str__(self) -> str:
        lines = [f"recipe {self.recipe}"]
        lines += [f"  {number:>14,} parameters in {dtype}" for dtype, number in self.stored.items()]
        lines += self._modules()
        for when, report in self.later:
            lines += [f"  from {when}: {report.recipe}", *(f"  {line}" for line in report._modules())]
        lines += ["  not seen: functional calls in the model's own code; they follow torch.autocast's lists"]
        return "\n".join(lines)

    def _modules(self) -> list[str]:
        lines = [f"  products quantised: {path}" for path in self.quantized]
        lines += [f"  attention quantised: {path}" for path in self.attention]
        lines += [f"  gated product smoothed: {path}" for path in self.smoothed]
        lines += [f"  saved in few bits: {path}" for path in self.saved]
        lines += [
            f"  no layer is matched as {what}, by {globs}: later rules apply" for what, globs in self.sought.items()
        ]
        return lines + [f"  kept as it was: {path}: {reason}" for path, reason in self.kept.items()]


def apply(model: nn.Module, recipe: str | Recipe, module_filter: ModuleFilter | None = None) -> Report:
    """Make `model` follow `recipe`, in place; parameters, names, ties and state-dict keys stay.

    Parameters are stored in the recipe's dtype. The forward runs under torch.autocast where the recipe computes in 16
    bits, and autocast ends with the forward, also on an exception. Floating outputs leave in float32, nested ones too,
    and so do those of a part that is called outside the model's forward (see `halfstep.following`). Linear,
    convolutional and recurrent layers that a rule matches round the operands of their products. On a CPU without 16-bit
    matrix units the 16-bit products of the others are carried in float32 (`kernels.carried`). Parameters of norms with
    running statistics stay as they are (apex's keep_batchnorm_fp32), and so do buffers: a warning names those that
    arrive rounded to 16 bits where the recipe keeps float32.

    Args:
        model: any module with parameters; apply before wrapping it in DDP, FSDP or torch.compile.
        recipe: a name or a `Recipe`.
        module_filter: called with (module, path); layers for which it is false keep their stock products.

    Returns:
        What was done and what was not.

    Raises:
        RecipeError: unknown recipe; the model already follows one; a rule or the filter selects no layer.
        ModelError: no parameters, float64 or complex ones, or a model that is already wrapped. Nothing was changed.
    """
    recipe = get_recipe(recipe)
    for stage in recipe.by_stage:
        check_model(model, stage)
    found = [arranged(model, stage, module_filter) for stage in recipe.by_stage]
    first = found[0]
    check_alike(found)
    adapters = wide_adapters(model, recipe)
    moves, kept = storable(model, recipe.float32_modules if recipe.weights != "fp32" else (), adapters)
    _warn_of_narrow(model, recipe, moves)
    for each in found:
        if each.matched.missed:
            warn_of_missed(model, each.recipe, each.matched)
    schedule = Schedule(recipe) if recipe.stages else None
    clock = Clock() if any(each.keeps_states for each in found) else None
    if schedule is not None:
        clock = Clock("scaling states and the stage of its recipe have" if clock else "recipe's stage has")
    rounded = first.rounded
    if recipe.codes is not None:
        stacks = {name for name, weight in rounded.items() if weight.stacked}
        kept |= dict.fromkeys(stacks, "its weights and gradients stay as they are: one scale would serve all experts")
        rounded = {name: weight for name, weight in rounded.items() if name not in stacks}
    applied = Applied(
        recipe,
        autocast_of(first.recipe),
        {name: parameter.dtype for name, parameter in moves.items()},
        DTYPES[recipe.grad_format],
        clock,
        tuple(rounded),
        {name: parameter.dtype for name, parameter in adapters.items()},
        schedule=schedule,
    )
    try:
        if schedule is None:
            first.lay(model)
        else:
            lay_in_turn(model, found)
        noise.attach(model, sorted(set.union(*(each.draws for each in found))), torch.initial_seed())
        follow(model, applied, _after_copy, first.widened.values())
    except BaseException:
        _undo(model)
        raise
    for parameter in moves.values():  # last: bits that rounding takes do not come back
        store(parameter, DTYPES[recipe.weights], DTYPES[recipe.grad_format])
    for parameter in adapters.values():
        store(parameter, torch.float32)
    if clock is not None:
        clock.begin(model)
    watch(model, recipe)
    reports = [_report(model, each, kept) for each in found]
    later = tuple(zip((stage.when for stage in recipe.stages), reports[1:], strict=True))
    return replace(reports[0], recipe=recipe.name, later=later)


def _report(model: nn.Module, found: Arrangement, kept: Mapping[str, str]) -> Report:
    """What one stage does to a model."""
    recipe, matched = found.recipe, found.matched
    kept = {**kept, **matched.kept, **dict.fromkeys(found.widened, "computes in float32")}
    if recipe.saved is not None and not found.savers:
        kept[type(model).__name__] = "no norm, activation function, gated MLP or rounded product to save in few bits"
    return Report(
        recipe.name,
        count(model),
        tuple(found.specs),
        kept,
        matched.attends,
        matched.smoothed,
        tuple(found.savers),
        matched.sought,
    )


def revert(model: nn.Module) -> None:
    """Undo `apply`: every class, attribute and dtype is what it was. Bits that storing rounded away stay lost.

    (`halfstep.prepare` keeps the full weights in the optimizer's state, as `master`.) Of a model that is unit-scaled
    and follows no recipe, or no longer, it undoes `unit_scale`, whose weights come back within one rounding.

    Args:
        model: the model that `apply` was called on, or what wraps it (DDP, torch.compile, PEFT).

    Raises:
        RecipeError: the model follows no recipe, is quantised for inference, or has a part that was parametrized since.
    """
    model = root_of(model)
    if "_halfstep" not in vars(model) and is_unit_scaled(model):
        return revert_unit(model)
    applied = applied_to(model)
    if applied.quantized:
        raise RecipeError(
            f"this {type(model).__name__} is quantised for inference, and its full weights are gone: build it anew and "
            "load them, or quantise a copy (copy.deepcopy) next time; halfstep.dequantize_model gives it the values of "
            "its codes"
        )
    for path, module in model.named_modules():
        if is_covered(module):
            raise RecipeError(
                f"{path or type(model).__name__} was given another class after the recipe was applied, such as by a "
                "parametrization: take that away first (torch.nn.utils.parametrize.remove_parametrizations), then "
                "revert"
            )
    let_go(model)
    _undo(model)
    before = applied.dtypes | applied.adapters
    for parameter, name in same_parameters(model, before):
        store(parameter, before[name])
    return None


def advance(model: nn.Module, *, skipped: bool = False, process_group: Any = None) -> None:
    """End an optimizer step: scaling states move on, once, the same on every rank. `scaler.update()` calls it.

    Only recipes whose scales depend on earlier steps have such states, and only those with stages count the steps; for
    the others there is nothing to move.

    Args:
        model: as for `revert`.
        skipped: the batch was abandoned: no optimizer stepped, and what was recorded of it is forgotten. Where one
            rank says so, it is so on all.
        process_group: over which ranks agree on the largest amaxes: those that hold the same layers (of a pipeline, a
            stage's). None is the default group where there is one.

    Raises:
        RecipeError: the model follows no recipe; it ran in eval(), which records nothing; or stages begin at fractions
            of a run whose length is not known (`halfstep.optimize`, `total_steps`).
    """
    steps = Steps(root_of(model), process_group)
    if torch.compiler.is_compiling():
        untraced(steps.advance, skipped)
    else:
        steps.advance(skipped)


def _undo(model: nn.Module) -> None:
    """Take away all that `apply` left beside the parameters."""
    end_watch(model)
    noise.detach(model)
    clear(model)
    unfollow(model)


def keep_grads(model: nn.Module) -> None:
    """Give parameters back the dtype that their gradients accumulate in: torch's copies and replacements lack it."""
    applied = applied_to(model)
    for parameter, _ in same_parameters(model, applied.dtypes):
        store(parameter, parameter.dtype, applied.grads)


def _after_copy(model: nn.Module) -> None:
    """A copied root is the root of its copied parts."""
    part = part_of(model)
    assert part is not None
    part.bind(model)
    keep_grads(model)


def check_model(model: nn.Module, recipe: Recipe) -> None:
    """Refuse, before anything is touched, a model that cannot follow a recipe as it is."""
    name = type(model).__name__
    for path, module in model.named_modules():
        if (applied := vars(module).get("_halfstep")) is not None:
            where = f"its part {path!r}" if path else "it"
            if applied.quantized:
                raise RecipeError(
                    f"{name}: {where} is quantised under {applied.recipe.name!r}. Adapters train beside its codes "
                    f"under that recipe: give recipe={applied.recipe.name!r}, and quantise with adapters=True; for "
                    "another recipe take another copy of the model"
                )
            raise RecipeError(f"{name}: {where} already follows {applied.recipe.name!r}; halfstep.revert it first")
    shared = next((path for path, module in model.named_modules() if part_of(module) is not None), None)
    if shared is not None:
        raise RecipeError(
            f"{name}: its part {shared!r} follows the recipe of another model that it belongs to; halfstep.revert that "
            "one first, or apply one recipe to a module that holds both"
        )
    scaled = any(MULTIPLIERS in vars(module) for module in model.modules())
    if recipe.unit_scaled and not scaled:
        raise ModelError(
            f"recipe {recipe.name!r} casts with scales of 1, for models whose tensors are of unit size, and {name} is "
            "not unit-scaled: call halfstep.unit_scale(model, *inputs) first, or write it with halfstep.unit's modules"
        )
    if is_unit_scaled(model) and recipe.float32_functions:
        raise RecipeError(
            f"recipe {recipe.name!r} widens functions in the model's own code, which unit_scale has taken over in "
            f"{name}; take a recipe without float32_functions, such as fp16-mixed"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        raise ModelError(f"{name} wraps a model; apply the recipe to the model first, then wrap it")
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ModelError(f"{name} has no parameters; there is nothing to store or train")
    for path, parameter in parameters.items():
        if parameter.dtype == torch.float64:
            raise ModelError(f"{name}: {path} is float64, which no recipe stores; call model.float() first")
        if parameter.is_complex():
            raise ModelError(
                f"{name}: {path} is {parameter.dtype}, and recipes store and step on real numbers; keep its real and "
                "imaginary parts as two parameters (torch.view_as_complex joins them)"
            )
        if hasattr(parameter, "device_mesh"):
            raise ModelError(f"{name}: {path} is sharded; apply the recipe before fully_shard")
    check_trained(model)
    check_ranks(recipe, parameters.values())
    if recipe.grad_format != recipe.weights:
        check_grad_dtype(recipe.grad_format)


def _warn_of_narrow(model: nn.Module, recipe: Recipe, parameters: Mapping[str, nn.Parameter]) -> None:
    """Say what a model that was loaded in, or cast to, 16 bits lacks, where the recipe keeps more."""
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
            f"{ANEW}; or cast parameters alone: for p in model.parameters(): p.data = p.data.bfloat16()",
            stacklevel=4,
        )
