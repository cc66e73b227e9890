"""Make a model follow a recipe, in place, and undo it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import ModelError, RecipeError
from halfstep.kernels import carried
from halfstep.nn.adapters import bag, convolution, encoder, foreign, gated, lstm, norm, spectral, wide
from halfstep.nn.adopt import adopt, release
from halfstep.nn.applied import Applied, Clock, applied_to
from halfstep.nn.attention import ATTRIBUTE
from halfstep.nn.codes import is_held, let_go
from halfstep.nn.layers import ModuleFilter, match
from halfstep.nn.outputs import to_float32
from halfstep.nn.scaling import Scalings, attach, detach
from halfstep.nn.storage import check_trained, count, storable, store
from halfstep.recipe import STORABLE, LinearSpec, Recipe, get_recipe


@dataclass(frozen=True)
class Report:
    """What `apply` did to a model, and what it left alone. `print(report)` shows it."""

    recipe: str
    stored: dict[str, int]
    """How many parameters are now stored in each dtype."""
    quantized: tuple[str, ...]
    """The linear layers whose products round their operands."""
    kept: dict[str, str]
    """Parameters and layers that do not follow the recipe, with the reason."""
    attention: tuple[str, ...] = ()
    """The modules that round the operands of attention's two products."""
    smoothed: tuple[str, ...] = ()
    """The gated MLPs whose product is scaled before the down-projection rounds it."""

    def __str__(self) -> str:
        lines = [f"recipe {self.recipe}"]
        lines += [f"  {number:>14,} parameters in {dtype}" for dtype, number in self.stored.items()]
        lines += [f"  products quantised: {path}" for path in self.quantized]
        lines += [f"  attention quantised: {path}" for path in self.attention]
        lines += [f"  gated product smoothed: {path}" for path in self.smoothed]
        lines += [f"  kept as it was: {path}: {reason}" for path, reason in self.kept.items()]
        lines += ["  not seen: functional calls in the model's own code; they follow torch.autocast's lists"]
        return "\n".join(lines)


def apply(model: nn.Module, recipe: str | Recipe, module_filter: ModuleFilter | None = None) -> Report:
    """Make `model` follow `recipe`, in place; parameters, names, ties and state-dict keys stay.

    Parameters are stored in the recipe's dtype; the forward runs under torch.autocast where the recipe computes in
    16 bits, and autocast ends with the forward, also on an exception; floating outputs leave in float32, nested ones
    too. Linear layers that a rule matches round the operands of their products; on a CPU without 16-bit matrix units
    the 16-bit products of the others, and of convolutions, are carried in float32 (`kernels.carried`). Parameters of
    norms with running statistics stay as they are (apex's keep_batchnorm_fp32), and so do buffers.

    Args:
        model: any module with parameters; apply before wrapping it in DDP, FSDP or torch.compile.
        recipe: a name or a `Recipe`.
        module_filter: called with (module, path); linear layers for which it is false keep their stock products.

    Returns:
        What was done and what was not.

    Raises:
        RecipeError: unknown recipe; the model already follows one; a rule or the filter selects no layer.
        ModelError: no parameters, float64 parameters, or a model that is already wrapped or patched.
    """
    recipe = get_recipe(recipe)
    _check(model)
    matched = match(model, recipe, module_filter)
    widened = wide.find(model, recipe.float32_modules)
    specs = {path: spec for path, spec in matched.specs.items() if not _within(path, widened)}
    moves, kept = storable(model, recipe.float32_modules if recipe.weights != "fp32" else ())
    kept |= matched.kept
    before = {name: parameter.dtype for name, parameter in moves.items()}
    for parameter in moves.values():
        store(parameter, STORABLE[recipe.weights], STORABLE[recipe.grad_format])
    if recipe.weights != "fp32":
        for module in list(model.modules()):
            for adapter in (norm, bag, spectral, foreign):
                if adapter.fits(module):
                    adopt(module, adapter.forward)
            spectral.widen_hooked(module)
    for path, module in widened.items():
        adopt(module, wide.forward)
        kept[path] = "computes in float32"
    device = next(model.parameters()).device
    around = {path.rpartition(".")[0] for path in specs}  # an attention module forms the product of its out_proj
    for path, kind in matched.kinds.items():
        if path in widened:
            continue
        module = model.get_submodule(path)
        spec = specs.get(path)
        if path in specs.keys() | around | {*matched.attends} or carried.supports(STORABLE[recipe.compute], device):
            module._halfstep_linear = spec or LinearSpec()  # type: ignore[assignment]
            adopt(module, kind.forward)
    if specs:
        for module in model.modules():
            if encoder.fits(module):
                adopt(module, encoder.forward)
    for path in matched.attends:
        setattr(model.get_submodule(path), ATTRIBUTE, recipe.attention)
    for path in matched.smoothed:
        adopt(model.get_submodule(path), gated.FORWARDS[str(recipe.smooth_glu)])
    attach(model, specs, {path: matched.kinds[path].PRODUCTS for path in specs})
    if carried.supports(STORABLE[recipe.compute], device):
        for module in model.modules():
            for adapter in (convolution, lstm):
                if adapter.fits(module) and module not in widened.values():
                    adopt(module, adapter.forward)
    autocast = None if recipe.compute == "fp32" else STORABLE[recipe.compute]
    clock = Clock() if any(spec.states for spec in specs.values()) else None
    model._halfstep = Applied(recipe.name, autocast, before, STORABLE[recipe.grad_format], clock)  # type: ignore[assignment]
    adopt(model, _forward, _after_copy)
    return Report(recipe.name, count(model), tuple(specs), kept, matched.attends, matched.smoothed)


def revert(model: nn.Module) -> None:
    """Undo `apply`: every class, attribute and dtype is what it was. Bits that storing rounded away stay lost.

    (`halfstep.prepare` keeps the full weights in the optimizer's state, as `master`.)

    Raises:
        RecipeError: the model follows no recipe, or is quantised for inference.
    """
    applied = applied_to(model)
    if applied.quantized:
        raise RecipeError(
            f"this {type(model).__name__} is quantised for inference, and its full weights are gone: build it anew and "
            "load them, or quantise a copy (copy.deepcopy) next time"
        )
    for module in model.modules():
        if is_held(module):
            let_go(module)
        release(module)
        vars(module).pop("_halfstep_linear", None)
        vars(module).pop(ATTRIBUTE, None)
    detach(model)
    del model._halfstep
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, dtype in applied.dtypes.items():
        if name in parameters:
            store(parameters[name], dtype)


def advance(model: nn.Module) -> None:
    """End an optimizer step: scaling states move on, once, the same on every rank. `scaler.update()` calls it.

    Only recipes whose scales depend on earlier steps have such states; for the others there is nothing to move.

    Raises:
        RecipeError: the model follows no recipe.
    """
    Scalings(model).advance()


def _forward(stock: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """The root's forward: under the recipe's autocast, leaving in float32."""
    dtype, clock = model._halfstep.autocast, model._halfstep.clock
    if clock is not None and model.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        clock.check(model)
    if dtype is None:
        return to_float32(stock(model, *args, **kwargs))
    anything: Tensor = next(chain(model.parameters(), model.buffers()))
    with torch.autocast(anything.device.type, dtype=dtype):
        output = stock(model, *args, **kwargs)
    return to_float32(output)


def _after_copy(model: nn.Module) -> None:
    """torch copies a parameter without the dtype that its gradients accumulate in."""
    applied = applied_to(model)
    held = {id(module.weight) for module in model.modules() if is_held(module)}
    named = model.named_parameters(remove_duplicate=False)
    parameters = {name: parameter for name, parameter in named if id(parameter) not in held}
    for name in applied.dtypes.keys() & parameters.keys():
        store(parameters[name], parameters[name].dtype, applied.grads)


def _within(path: str, places: Iterable[str]) -> bool:
    """Whether a path is one of those, or inside of one."""
    return any(path == place or path.startswith(f"{place}.") for place in places)


def _check(model: nn.Module) -> None:
    """Refuse, before anything is touched, a model that cannot follow a recipe as it is."""
    name = type(model).__name__
    for path, module in model.named_modules():
        if (applied := vars(module).get("_halfstep")) is not None:
            where = f"its part {path!r}" if path else "it"
            raise RecipeError(f"{name}: {where} already follows {applied.recipe!r}; halfstep.revert it first")
    if isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        raise ModelError(f"{name} wraps a model; apply the recipe to the model first, then wrap it")
    if "forward" in vars(model):
        raise ModelError(f"{name}.forward is patched on the instance; apply the recipe before it is patched")
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ModelError(f"{name} has no parameters; there is nothing to store or train")
    for path, parameter in parameters.items():
        if parameter.dtype == torch.float64:
            raise ModelError(f"{name}: {path} is float64, which no recipe stores; call model.float() first")
        if hasattr(parameter, "device_mesh"):
            raise ModelError(f"{name}: {path} is sharded; apply the recipe before fully_shard")
    check_trained(model)
