"""`quantize_model`: a model for inference, whose rounded weights are stored as codes and scales; and the way back."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import ModelError, RecipeError
from halfstep.nn.adapters.gated import merge_smooth_scales
from halfstep.nn.adopt import adopt, applied_to, extend
from halfstep.nn.apply import apply, revert
from halfstep.nn.codes import count
from halfstep.nn.following import root_of
from halfstep.nn.layers import ModuleFilter, match
from halfstep.nn.paths import adapters_of
from halfstep.nn.plan import Plan
from halfstep.nn.pretrained import is_pretrained, write_pretrained
from halfstep.nn.quantized_weights import Kind, Stored, Weight, check_before_loading, freeze, place_codes, store_weight
from halfstep.nn.scaling import detach, moved
from halfstep.nn.stages import clear
from halfstep.ops import Quantized
from halfstep.ops.part import own_part, part_of
from halfstep.ops.subclasses import check_initialized
from halfstep.recipe import Recipe, get_recipe, list_recipes
from halfstep.text import grouped


_Given = Mapping[str, Sequence[Quantized]]


def quantize_model(
    model: nn.Module,
    recipe: str | Recipe,
    module_filter: ModuleFilter | None = None,
    smooth: Mapping[str, Tensor] | None = None,
    adapters: bool = False,
) -> Plan:
    """Quantize `model` for inference under `recipe`, in place: each weight that a rule rounds is stored as codes and
    scales only, and outputs equal, bit for bit, those of evaluation under the recipe.

    Such a layer has the buffers `weight_codes` (a byte a weight in 8-bit formats), `weight_scale` if there are scales,
    and `weight_format`, which load_state_dict compares; `weight` returns the values. Weights are decoded in every
    matmul and not stored decoded. Activations are rounded as the recipe's forward matmul says. A stateful (delayed)
    scaling keeps the factors of a model that was trained under the recipe; operands that no step has seen are scaled by
    their own amax: weights now, activations in every call. Everything else is as `halfstep.apply` does it; afterwards
    the model is in evaluation mode and requires no gradients.

    Args:
        model: any module that `apply` takes, or one that follows this very recipe.
        recipe: a name or a `Recipe` with a rule that rounds weights.
        module_filter: as in `apply`.
        smooth: for recipes that smooth gated MLPs by channel: what `nn.measure_smooth_scales` returned, to be merged
            into the weights; {} if they are merged already, or if a state dict is loaded next.
        adapters: the model will train adapters beside its codes, which do not change (QLoRA): gradients pass through
            the quantized layers, computed as the recipe says. Existing adapters stay trainable.

    Returns:
        What was quantized, and what was not and why.

    Raises:
        RecipeError: the recipe rounds no weights, or rotates its forward matmuls; the model follows another recipe, or
            is quantized already; or as `apply`.
        ModelError: there are gradients that no step has used; or as `apply`.
    """
    recipe = get_recipe(recipe)
    _check(model, recipe, smooth, adapters)
    if smooth:
        merge_smooth_scales(model, smooth)
    factors: dict[str, dict[str, Tensor]] = {}
    if part_of(model).applied is not None:
        merged = {f"{path}.{part}.weight" for path in smooth or () for part in ("up_proj", "down_proj")}
        kept = [
            (*name.rpartition("."), state) for name, state in moved(model).items() if name.lstrip(".") not in merged
        ]
        by_path = grouped((path, (operand, state)) for path, _, operand, state in kept)
        factors = {path: dict(states) for path, states in by_path.items()}
        module_filter = _as_before(model, module_filter)
        revert(model)
    if recipe.smooth_glu == "channel":
        recipe = replace(recipe, smooth_glu=None)  # its scales are in the weights
    return _lay(model, recipe, module_filter, factors, adapters)


def load_codes(
    model: nn.Module,
    recipe: Recipe,
    codes: _Given,
    factors: Mapping[str, Mapping[str, Tensor]],
    adapters: bool = False,
) -> Plan:
    """Quantize `model` with the codes that `quantize_model` made of another model: the parameters named in `codes` are
    replaced by them, whatever their values (on the meta device too), and no other layer rounds.

    Args:
        recipe: the recipe of the other model.
        codes: by name of a parameter: one matrix (out, in) for a linear layer, one an expert for a stack of experts.
        factors: the factors of delayed scalings, by path and operand.
        adapters: as in `quantize_model`.

    Raises:
        RecipeError: adapters cannot be trained under the recipe.
        ModelError: no layer that rounds has such a parameter, or it has another shape or is shared with another layer.
    """
    _check(model, recipe, None, adapters)
    kinds = match(model, recipe, None).kinds
    known = {
        f"{path}.{weight.name}": weight for path in kinds for weight in kinds[path].weights(model.get_submodule(path))
    }
    for name, made in codes.items():
        found = None if name not in known else tuple(model.get_parameter(name).shape)
        shape = made[0].shape[::-1] if name in known and known[name].transposed else made[0].shape
        if found != ((len(made), *shape) if name in known and known[name].stacked else shape):
            there = "no weight of a layer that rounds" if found is None else found
            raise ModelError(f"{name}: codes of {len(made)} x {shape} for {there}; the file is of another model")
    paths = {name.rpartition(".")[0] for name in codes}
    return _lay(model, recipe, lambda _, path: path in paths, factors, adapters, codes)


def _lay(
    model: nn.Module,
    recipe: Recipe,
    module_filter: ModuleFilter | None,
    factors: Mapping[str, Mapping[str, Tensor]],
    adapters: bool,
    given: _Given | None = None,
) -> Plan:
    """Apply the recipe, replace the weights that rules round by the `given` codes or by their own, and set the model up
    for inference."""
    kinds = match(model, recipe, module_filter).kinds
    applied = apply(model, recipe, module_filter)
    detach(model)
    codes, kept = _store(model, {path: kinds[path] for path in applied.quantized}, factors, adapters, given)
    kept = {**applied.kept, **kept}
    quantized = replace(applied_to(model), dtypes={}, clock=None, quantized=True, adapts=adapters)
    own = own_part(model)
    own.applied = quantized
    own.following.follow(quantized)
    adopt(model, _forward, patchable=True)
    for module in model.modules():
        if is_pretrained(module):
            extend(module, _members)
    is_adapter = adapters_of(model)
    for name, parameter in model.eval().named_parameters(remove_duplicate=False):
        if not (adapters and is_adapter(name)):
            parameter.requires_grad_(False)
    layers = {path: layer for path, layer in applied.layers.items() if path not in kept}
    made = replace(applied, stored=dict(codes) | count(model), layers=layers, kept=kept, optimizer=None)
    own.applied = replace(quantized, plan=made)
    return made


def _store(
    model: nn.Module,
    kinds: Mapping[str, Kind],
    factors: Mapping[str, Mapping[str, Tensor]],
    adapters: bool,
    given: _Given | None,
) -> tuple[Counter[str], dict[str, str]]:
    """Replace the weights of these layers by codes. Returns the number of weights in each format, and the layers with a
    weight that is not replaced, with the reason."""
    owners = grouped((id(parameter), name) for name, parameter in model.named_parameters(remove_duplicate=False))
    codes, kept = Counter[str](), dict[str, str]()
    for path, kind in kinds.items():
        module: Any = model.get_submodule(path)
        own, weights, states = own_part(module), kind.weights(module), factors.get(path, {})
        whole = {w.name: why for w in weights if (why := _whole(module, w, path, owners)) is not None}
        if whole and given is not None:
            raise ModelError(f"{path}: codes for a weight that is another module's too; the file is of another model")
        kept |= dict.fromkeys([path] * bool(whole), next(iter(whole.values()), ""))
        own.stored = {weight.name: weight for weight in weights}
        for weight in (weight for weight in weights if weight.name not in whole):
            if given is None:
                numbers = store_weight(module, weight, states.get(f"{weight.product}__weight".removeprefix("__")))
            else:
                numbers = place_codes(module, weight, given[f"{path}.{weight.name}"])
            codes[own.stored[weight.name].quantizer.format.name] += numbers
        operands = ("input", "weight") if whole else ("input",)
        freeze(module, {name: state for name, state in states.items() if name.rpartition("__")[2] in operands})
        module.register_load_state_dict_pre_hook(check_before_loading)
        own.adapts = adapters and all(weight.layout is None for weight in weights)
    return codes, kept


def _whole(module: Any, weight: Weight, path: str, owners: Mapping[int, list[str]]) -> str | None:
    """Why a weight is not stored as codes; None if it is."""
    name = weight.name
    if part_of(module).spec.output.rhs is None:
        return "its forward product takes the weight as it is"
    if weight.whole:
        return weight.whole
    others = [owner for owner in owners[id(getattr(module, name))] if owner != f"{path}.{name}".lstrip(".")]
    return f"its {name} is also {others[0]}, so it stays whole and is rounded at every call" if others else None


def _as_before(model: nn.Module, module_filter: ModuleFilter | None) -> ModuleFilter:
    """A filter that selects the layers that round at present and that `module_filter` selects."""
    rounding = {id(m) for m in model.modules() if (s := part_of(m).linear) is not None and s.rounds}
    return lambda module, path: id(module) in rounding and (module_filter is None or module_filter(module, path))


def _members(stock: type[nn.Module]) -> dict[str, Any]:
    """Members of a Hugging Face model: `save_pretrained` writes codes, in the layout closest to its quantizers."""

    def save_pretrained(
        model: nn.Module,
        save_directory: str | Path,
        is_main_process: bool = True,
        max_shard_size: int | str = "5GB",
        **others: Any,
    ) -> None:
        if others:
            raise ModelError(
                f"save_pretrained of a {type(model).__name__} that is quantised takes save_directory, is_main_process "
                f"and max_shard_size, and was given {', '.join(others)} too; leave it out"
            )
        if is_main_process:
            write_pretrained(model, save_directory, max_shard_size=max_shard_size)

    return {"save_pretrained": save_pretrained}


def _forward(stock: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """The root's forward. It raises in training mode with gradients on, unless the model trains adapters."""
    if model.training and torch.is_grad_enabled() and not applied_to(model).adapts:
        raise ModelError(
            f"{type(model).__name__} is quantised for inference: its weights have no gradients. Call model.eval(), "
            "train the model first and quantise it then, or train adapters beside its codes: "
            "halfstep.quantize_model(model, recipe, adapters=True)"
        )
    return stock(model, *args, **kwargs)


def _check(model: nn.Module, recipe: Recipe, smooth: Mapping[str, Tensor] | None, adapters: bool) -> None:
    """Raise, before anything is changed, if the model cannot be quantized under the recipe."""
    check_initialized(model)
    name = type(model).__name__
    if recipe.stages:
        raise RecipeError(
            f"recipe {recipe.name!r} has stages, and inference has none: halfstep.revert the model where it follows "
            f"it, and quantise it under one of them, such as {recipe.by_stage[-1].name!r}"
        )
    if not _rounds_weights(recipe):
        able = ", ".join(other for other in list_recipes() if _rounds_weights(get_recipe(other)))
        raise RecipeError(
            f"recipe {recipe.name!r} rounds no weights in its forward matmuls, so there is nothing to store in fewer "
            f"bits; these do: {able}"
        )
    if any(rule.linear.output.hadamard for rule in recipe.rules):
        raise RecipeError(
            f"recipe {recipe.name!r} rotates its forward matmuls (hadamard), and codes of rotated weights would decode "
            "to values that are not the model's: quantise it under a recipe whose `output` has no hadamard"
        )
    if adapters and any(rule.linear.grad_input.hadamard for rule in recipe.rules):
        raise RecipeError(
            f"recipe {recipe.name!r} rotates the matmul of the input's gradient (hadamard), but the weights are codes: "
            "train adapters under a recipe whose `grad_input` has no hadamard"
        )
    found = part_of(model).applied
    if found is not None and found.quantized:
        raise RecipeError(
            f"{name} is quantised already, under {found.recipe.name!r}; quantise a model with its full weights"
        )
    if found is not None and found.recipe != recipe:
        raise RecipeError(
            f"{name} follows {found.recipe.name!r}; quantise it under that recipe, or halfstep.revert it first"
        )
    if any(parameter.grad is not None for parameter in model.parameters()):
        raise ModelError(
            f"{name} carries gradients that no step has used: it is in training. Step and optimizer.zero_grad() first, "
            "or quantise a copy (copy.deepcopy)"
        )
    if recipe.smooth_glu == "channel" and smooth is None:
        raise RecipeError(
            f"recipe {recipe.name!r} smooths gated MLPs by channel, which for inference goes into the weights: give "
            "smooth=halfstep.nn.measure_smooth_scales(model, lambda: model(batch)), or smooth={} where it was merged, "
            "or where a state dict is loaded next"
        )
    if recipe.smooth_glu != "channel" and smooth is not None:
        raise RecipeError(f"smooth is given, and recipe {recipe.name!r} does not smooth by channel; leave it out")


def _rounds_weights(recipe: Recipe) -> bool:
    return any(rule.linear.output.rhs is not None for rule in recipe.rules)


@torch.no_grad()
def dequantize_model(model: nn.Module) -> None:
    """Make a quantized model a stock one again, in place: each weight gets the values of its codes, in its dtype before
    quantization, and requires no gradient. The precision lost stays lost; nothing is rounded any more.

    To merge adapters into weights in full precision, call it before PEFT's `model.merge_and_unload()`.

    Args:
        model: the model that `halfstep.quantize_model` was called on, or a wrapper of it (PEFT).

    Raises:
        RecipeError: the model is not quantized.
    """
    root = root_of(model)
    if not applied_to(root).quantized:
        raise RecipeError(
            f"this {type(root).__name__} follows {applied_to(root).recipe.name!r} and is not quantised, its weights "
            "are values; halfstep.revert(model) takes the recipe away"
        )
    values: list[tuple[Any, dict[str, nn.Parameter]]] = []
    for module in root.modules():
        stored = part_of(module).stored
        if not stored:
            continue
        hooks = module._load_state_dict_pre_hooks
        for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook) is check_before_loading]:
            del hooks[key]
        found = {}
        for name, entry in stored.items():
            if isinstance(entry, Stored):
                found[name] = nn.Parameter(entry.values(module), requires_grad=False)
                for part in (*entry.parts, "format"):
                    delattr(module, f"{name}_{part}")
        values.append((module, found))
    clear(root)
    for module, found in values:
        module._parameters = {**found, **module._parameters}
