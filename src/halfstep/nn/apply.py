"""Make a model follow a recipe, in place, and undo it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halfstep.errors import ModelError, RecipeError
from halfstep.kernels import carried
from halfstep.nn.adapters import bag, encoder, foreign, gated, lstm, norm, spectral, wide
from halfstep.nn.adopt import adopt, is_covered, release
from halfstep.nn.applied import Applied, applied_to
from halfstep.nn.clock import Clock
from halfstep.nn.codes import let_go
from halfstep.nn.dtypes import check_grad_dtype, check_trained, count, storable, store
from halfstep.nn.following import follow, part_of, unfollow
from halfstep.nn.keeping import KEEPING
from halfstep.nn.layers import Matched, ModuleFilter, match
from halfstep.nn.ranks import check_ranks
from halfstep.nn.savers import adopt_savers, find
from halfstep.nn.scaling import Scalings, attach, detach
from halfstep.nn.unit.scale import is_unit_scaled, revert_unit
from halfstep.ops.attention import ATTRIBUTE
from halfstep.recipe import DTYPES, LinearSpec, Recipe, get_recipe
from halfstep.unit import MULTIPLIERS, multipliers_of


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

    def __str__(self) -> str:
        lines = [f"recipe {self.recipe}"]
        lines += [f"  {number:>14,} parameters in {dtype}" for dtype, number in self.stored.items()]
        lines += [f"  products quantised: {path}" for path in self.quantized]
        lines += [f"  attention quantised: {path}" for path in self.attention]
        lines += [f"  gated product smoothed: {path}" for path in self.smoothed]
        lines += [f"  saved in few bits: {path}" for path in self.saved]
        lines += [f"  kept as it was: {path}: {reason}" for path, reason in self.kept.items()]
        lines += ["  not seen: functional calls in the model's own code; they follow torch.autocast's lists"]
        return "\n".join(lines)


def apply(model: nn.Module, recipe: str | Recipe, module_filter: ModuleFilter | None = None) -> Report:
    """Make `model` follow `recipe`, in place; parameters, names, ties and state-dict keys stay.

    Parameters are stored in the recipe's dtype. The forward runs under torch.autocast where the recipe computes in 16
    bits, and autocast ends with the forward, also on an exception. Floating outputs leave in float32, nested ones too,
    and so do those of a part that is called outside the model's forward (see `halfstep.following`). Linear,
    convolutional and recurrent layers that a rule matches round the operands of their products. On a CPU without 16-bit
    matrix units the 16-bit products of the others are carried in float32 (`kernels.carried`). Parameters of norms with
    running statistics stay as they are (apex's keep_batchnorm_fp32), and so do buffers.

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
    check_model(model, recipe)
    matched = match(model, recipe, module_filter)
    widened = wide.find(model, recipe.float32_modules)
    specs = {path: spec for path, spec in matched.specs.items() if not _within(path, widened)}
    moves, kept = storable(model, recipe.float32_modules if recipe.weights != "fp32" else ())
    kept |= matched.kept | dict.fromkeys(widened, "computes in float32")
    _warn_of_narrow(model, recipe, moves)
    before = {name: parameter.dtype for name, parameter in moves.items()}
    autocast = None if recipe.compute == "fp32" else DTYPES[recipe.compute]
    clock = Clock() if any(spec.states for spec in specs.values()) else None
    weights = {path: matched.kinds[path].weights(model.get_submodule(path)) for path in specs}
    rounded = {f"{path}.{weight.name}".lstrip("."): weight for path in specs for weight in weights[path]}
    if recipe.codes is not None:
        stacks = {name for name, weight in rounded.items() if weight.stacked}
        kept |= dict.fromkeys(stacks, "its weights and gradients stay as they are: one scale would serve all experts")
        rounded = {name: weight for name, weight in rounded.items() if name not in stacks}
    applied = Applied(recipe, autocast, before, DTYPES[recipe.grad_format], clock, tuple(rounded))
    savers = {} if recipe.saved is None else find(model, recipe.saved, specs, matched.smoothed)
    if recipe.saved is not None and not savers:
        kept[type(model).__name__] = "no norm, activation function, gated MLP or rounded product to save in few bits"
    try:
        _adopt_layers(model, recipe, matched, specs, widened)
        if recipe.saved is not None:
            adopt_savers(model, recipe.saved, savers)
        attach(model, specs, {path: [weight.product for weight in weights[path]] for path in specs})
        follow(model, applied, _after_copy, widened.values())
    except BaseException:
        _undo(model)
        raise
    for parameter in moves.values():  # last: bits that rounding takes do not come back
        store(parameter, DTYPES[recipe.weights], DTYPES[recipe.grad_format])
    if clock is not None:
        clock.begin(model)
    return Report(recipe.name, count(model), tuple(specs), kept, matched.attends, matched.smoothed, tuple(savers))


def revert(model: nn.Module) -> None:
    """Undo `apply`: every class, attribute and dtype is what it was. Bits that storing rounded away stay lost.

    (`halfstep.prepare` keeps the full weights in the optimizer's state, as `master`.) Of a model that is unit-scaled
    and follows no recipe, or no longer, it undoes `unit_scale`, whose weights come back within one rounding.

    Raises:
        RecipeError: the model follows no recipe, is quantised for inference, or has a part that was parametrized since.
    """
    if "_halfstep" not in vars(model) and is_unit_scaled(model):
        return revert_unit(model)
    applied = applied_to(model)
    if applied.quantized:
        raise RecipeError(
            f"this {type(model).__name__} is quantised for inference, and its full weights are gone: build it anew and "
            "load them, or quantise a copy (copy.deepcopy) next time"
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
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, dtype in applied.dtypes.items():
        if name in parameters:
            store(parameters[name], dtype)
    return None


def advance(model: nn.Module, *, skipped: bool = False, process_group: Any = None) -> None:
    """End an optimizer step: scaling states move on, once, the same on every rank. `scaler.update()` calls it.

    Only recipes whose scales depend on earlier steps have such states; for the others there is nothing to move.

    Args:
        skipped: the batch was abandoned: no optimizer stepped, and what was recorded of it is forgotten. Where one
            rank says so, it is so on all.
        process_group: over which ranks agree on the largest amaxes: those that hold the same layers (of a pipeline, a
            stage's). None is the default group where there is one.

    Raises:
        RecipeError: the model follows no recipe; or it ran in eval(), which records nothing.
    """
    Scalings(model, process_group).advance(skipped)


def _adopt_layers(
    model: nn.Module,
    recipe: Recipe,
    matched: Matched,
    specs: Mapping[str, LinearSpec],
    widened: Mapping[str, nn.Module],
) -> None:
    """Give every layer that computes otherwise than torch's the forward that does."""
    carries = carried.supports(DTYPES[recipe.compute], next(model.parameters()).device)
    if recipe.weights != "fp32":
        for module in model.modules():
            for adapter in (norm, bag, spectral, foreign):
                if adapter.fits(module):
                    adopt(module, adapter.forward)
            spectral.widen_hooked(module)
    for module in widened.values():
        adopt(module, wide.forward)
    around = {path.rpartition(".")[0] for path in specs}  # an attention module forms the product of its out_proj
    for path, kind in matched.kinds.items():
        if path not in widened and (carries or path in specs.keys() | around | {*matched.attends}):
            module = model.get_submodule(path)
            spec = specs.get(path) or LinearSpec()
            module._halfstep_linear = spec.times(multipliers_of(module))  # type: ignore[assignment]
            adopt(module, kind.forward)
    for module in model.modules():
        if specs and encoder.fits(module):
            adopt(module, encoder.forward)
        if recipe.compute != "fp32" and lstm.fits(module) and module not in widened.values():
            adopt(module, lstm.forward)
    for path in matched.attends:
        setattr(model.get_submodule(path), ATTRIBUTE, recipe.attention)
    for path in matched.smoothed:
        adopt(model.get_submodule(path), gated.FORWARDS[str(recipe.smooth_glu)])


def _undo(model: nn.Module) -> None:
    """Take away all that `apply` left beside the parameters."""
    for module in model.modules():
        release(module)
        vars(module).pop("_halfstep_linear", None)
        vars(module).pop(ATTRIBUTE, None)
        vars(module).pop(KEEPING, None)
    detach(model)
    unfollow(model)


def keep_grads(model: nn.Module) -> None:
    """Give parameters back the dtype that their gradients accumulate in: torch's copies and replacements lack it."""
    applied = applied_to(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in applied.dtypes.keys() & parameters.keys():
        store(parameters[name], parameters[name].dtype, applied.grads)


def _after_copy(model: nn.Module) -> None:
    """A copied root is the root of its copied parts."""
    part = part_of(model)
    assert part is not None
    part.bind(model)
    keep_grads(model)


def _within(path: str, places: Iterable[str]) -> bool:
    """Whether a path is one of those, or inside of one."""
    return any(path == place or path.startswith(f"{place}.") for place in places)


def check_model(model: nn.Module, recipe: Recipe) -> None:
    """Refuse, before anything is touched, a model that cannot follow a recipe as it is."""
    name = type(model).__name__
    for path, module in model.named_modules():
        if (applied := vars(module).get("_halfstep")) is not None:
            where = f"its part {path!r}" if path else "it"
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
    if recipe.grad_format != recipe.weights:
        check_grad_dtype(recipe.grad_format)
    check_ranks(recipe, parameters.values())


def _warn_of_narrow(model: nn.Module, recipe: Recipe, parameters: Mapping[str, nn.Parameter]) -> None:
    """Say what a model that was loaded in 16 bits lacks, where the recipe keeps more."""
    wide_ones = recipe.master or (recipe.weights if recipe.compute != "fp32" else None)
    narrow = {path: p.dtype for path, p in parameters.items() if p.dtype != torch.float32 and not p.is_meta}
    if narrow and wide_ones in ("fp32", "split") and (recipe.weights == "fp32" or recipe.master is not None):
        path, dtype = next(iter(narrow.items()))
        warnings.warn(
            f"{type(model).__name__}: {len(narrow)} of {len(parameters)} parameters arrive in 16 bits ({path} in "
            f"{dtype}); "
            f"{recipe.name!r} keeps float32 weights or masters, which can only start from those rounded values. "
            "Load the model in float32 where its file holds more (transformers 5 takes the file's dtype unless told: "
            "from_pretrained(..., dtype=torch.float32))",
            stacklevel=4,
        )
