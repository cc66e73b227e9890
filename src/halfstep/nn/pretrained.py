"""A quantized model as tensors in a layout, and as a Hugging Face folder that servers and transformers load."""

import copy
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import halfstep
from halfstep.errors import LayoutError, ModelError, RecipeError
from halfstep.layouts import Layout, fitting
from halfstep.layouts.folder import new_folder, size_of, total_bytes, write_weights
from halfstep.nn.adopt import applied_to, stock_class
from halfstep.nn.paths import adapters_of
from halfstep.nn.quantized_weights import Stored, Weight, matrices_of, quantized_weight
from halfstep.nn.scaling import states_of
from halfstep.nn.unit.scale import is_unit_scaled
from halfstep.ops.part import part_of, parts_of
from halfstep.quant.description import describe
from halfstep.recipe import to_data


KEY = "halfstep.exported"
"""The key, in a safetensors file's metadata, of the JSON that describes the model and its layers."""
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that servers fuse: all of them are stored as codes, or none."""


@dataclass(frozen=True)
class LaidOut:
    """The tensors of a quantized model in a layout, and the metadata to go with them."""

    layout: Layout
    codes: dict[str, Tensor]
    """The tensors of layers that are stored as codes."""
    plain: dict[str, Tensor]
    """All other tensors; tied ones once."""
    quantized: tuple[str, ...]
    """The layers that are stored as codes."""
    kept: dict[str, str]
    """The layers that are codes in the model but stored as decoded values, with the reason."""
    ignored: tuple[str, ...]
    """The linear layers that are not stored as codes."""
    notes: dict[str, dict[str, Any]]
    """For each layer stored as codes: its shape and dtype, the index of its quantizer, and what tensors do not show."""
    described: dict[str, Any]
    """For the whole model: the version of halfstep, the recipe, the quantizers."""

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of each of its safetensors files."""
        return {"format": "pt", KEY: json.dumps({**self.described, "layers": self.notes})}


Entries = list[tuple[str, nn.Module, Stored]]
"""Parameters stored as codes: the path of the module, the module, and how the parameter was quantized."""


def laid_out(model: nn.Module, layout: Layout | None = None, dtype: torch.dtype | None = None) -> LaidOut:
    """The tensors of a model that `quantize_model` was called on, in a layout.

    Args:
        layout: None: the one that is closest to the model's quantizers.
        dtype: the dtype of floating-point tensors that are not codes; None: their own.

    Raises:
        LayoutError: the layout cannot store the model's codes bit for bit, or none of its layers.
    """
    recipe, entries = applied_to(model).recipe, stored_weights(model)
    quantizers = tuple(dict.fromkeys(entry.quantizer for _, _, entry in entries))
    if is_unit_scaled(model):
        raise LayoutError(
            f"{type(model).__name__} is unit-scaled: its matmuls have factors, which neither a stock model nor a "
            "server applies. Export a model that was trained without unit_scale"
        )
    is_adapter = adapters_of(model)
    adapter = next((name for name, _ in model.named_parameters() if is_adapter(name)), None)
    if adapter is not None:
        raise LayoutError(
            f"{adapter} of {type(model).__name__} belongs to an adapter, which the layout cannot store: merge it "
            "(halfstep.dequantize_model, then merge_and_unload), and export the merged model"
        )
    layout = layout or _closest(recipe.name, quantizers)
    for quantizer in quantizers:
        if (why := layout.refusal(quantizer)) is not None:
            able = ", ".join(other.name for other in fitting(quantizers)) or "none"
            raise LayoutError(
                f"recipe {recipe.name!r} rounds weights to {quantizer.format.name} ({quantizer.scales}), which the "
                f"layout {layout.name!r} does not hold: {why}. Layouts that do: {able}"
            )
    kept = _kept(model, layout, entries)
    rest, codes = without_codes(model, entries), dict[str, Tensor]()
    notes: dict[str, dict[str, Any]] = {}
    for path, module, entry in entries:
        stem = f"{path}.{entry.weight.name}"
        factors = {name: float(state[0]).hex() for name, state in states_of(module).items()}
        if path in kept:
            rest[stem] = entry.values(module)
            continue
        (made,) = matrices_of(module, entry)
        try:
            found = layout.tensors(made)
        except LayoutError as error:
            raise LayoutError(f"{stem}: {error}") from error
        codes |= {f"{path}.{name}": tensor for name, tensor in found.items()}
        if layout.static:
            codes[f"{path}.input_scale"] = _input_scale(path, module, layout, recipe.name)
        told = {
            "quantizer": quantizers.index(entry.quantizer),
            "shape": list(entry.shape),
            "dtype": str(entry.dtype).removeprefix("torch."),
            "factors": factors,
            "scale": layout.scales.note(made),
        }
        notes[path] = {key: value for key, value in told.items() if value not in ({}, None)}
    for path, module in _convolutions(model):
        kept[path] = f"it is a {type(module).__name__}, and the layout is one of nn.Linear"
        whole: Any = quantized_weight(module, "weight", module.weight.new_empty(0, dtype=torch.float32))
        rest[f"{path}.weight"] = whole.scaled().to(module.weight.dtype)
    if not notes:
        why = next(iter(kept.values()), "no weight of it is in codes")
        raise LayoutError(f"layout {layout.name!r} has a place for no layer of this {type(model).__name__}: {why}")
    linear = (path for path, module in model.named_modules() if isinstance(module, nn.Linear))
    described = {
        "halfstep": halfstep.__version__,
        "layout": layout.name,
        "recipe": to_data(recipe),
        "quantizers": [describe(quantizer, (1, 1), torch.float32) for quantizer in quantizers],
    }
    ignored = tuple(dict.fromkeys(path for path in (*linear, *kept) if path not in notes))
    plain = {
        name: tensor.detach() if dtype is None or not tensor.is_floating_point() else tensor.detach().to(dtype)
        for name, tensor in rest.items()
    }
    return LaidOut(layout, codes, plain, tuple(notes), kept, ignored, notes, described)


def stored_weights(model: nn.Module) -> Entries:
    """The parameters of a quantized model that are stored as codes.

    Raises:
        RecipeError: the model was not quantized.
    """
    if not applied_to(model).quantized:
        raise RecipeError(
            f"this {type(model).__name__} is in training; call halfstep.quantize_model on a copy of it first"
        )
    return [(path, m, e) for path, m, stored in _quantised(model) for e in stored.values() if isinstance(e, Stored)]


def _convolutions(model: nn.Module) -> list[tuple[str, Any]]:
    """(path, module) of the convolutions of a quantized model, whose weights stay unrounded and are rounded in each
    call."""
    having = [(path, m, stored.get("weight")) for path, m, stored in _quantised(model)]
    whole = [(path, m) for path, m, entry in having if isinstance(entry, Weight) and entry.layout is not None]
    return [(path, m) for path, m in whole if part_of(m).spec.output.rhs is not None]


def _quantised(model: nn.Module) -> list[tuple[str, Any, dict[str, Any]]]:
    return [(path, module, own.stored) for path, module, own in parts_of(model) if own.stored]


def _closest(recipe: str, quantizers: tuple[Any, ...]) -> Layout:
    able = fitting(quantizers)
    if not able:
        rules = "; ".join(f"{q.format.name}, {q.scales or 'no scales'}" for q in quantizers)
        raise LayoutError(
            f"recipe {recipe!r} rounds weights in a way that no layout holds ({rules}): save model.state_dict(), which "
            "holds it, or export a model of another recipe (docs/export.md has a table)"
        )
    return able[0]


def _kept(model: nn.Module, layout: Layout, entries: Entries) -> dict[str, str]:
    """The layers that are codes in the model and that the layout cannot store as codes, with the reason."""
    kept = {}
    for path, module, entry in entries:
        if not isinstance(module, nn.Linear):
            kept[path] = f"it is a {type(module).__name__}, and the layout is one of nn.Linear"
        elif (why := layout.misfit(entry.shape)) is not None:
            kept[path] = why
    for path, _, _ in entries:
        parent, _, name = path.rpartition(".")
        group = next((names for names in FUSED if name in names), ())
        fused = [other for n in group if (other := f"{parent}.{n}") != path and other in kept]
        if path not in kept and fused:
            kept[path] = f"servers put it together with {fused[0]}, which is not in codes"
    return kept


def _input_scale(path: str, module: Any, layout: Layout, recipe: str) -> Tensor:
    """The scale of a layer's input, from the factor of its scaling state at the end of training.

    Raises:
        LayoutError: there is no such factor.
    """
    factor, why = states_of(module).get("input"), layout.input_refusal(part_of(module).spec.output.lhs)
    if factor is None or not bool(factor[0].isfinite() & (factor[0] > 0)):
        why = why or "the model was not trained under it before it was quantised"
    if factor is None or why is not None:
        raise LayoutError(
            f"{path}: recipe {recipe!r} left no factor of its input for the layout {layout.name!r}: {why}. Choose a "
            "layout whose inputs are rounded at every call (fp8-tensor, fp8-channel), or train under fp8-delayed"
        )
    return factor[:1].reciprocal()


def without_codes(model: Any, entries: Entries) -> dict[str, Tensor]:
    """The tensors of the model's state dict that do not belong to codes; tied ones once, under the name that
    transformers does not tie to another."""
    parts = {f"{path}.{e.weight.name}_{part}" for path, _, e in entries for part in (*e.parts, "format")}
    quantized = tuple(f"{path}._halfstep_" for path, _, _ in entries)
    state: dict[str, Tensor] = model.state_dict()
    tensors = {n: t for n, t in state.items() if n not in parts and not (quantized and n.startswith(quantized))}
    filled = {*(getattr(model, "all_tied_weights_keys", None) or ())}
    unsaved = {*(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    seen: set[tuple[int, int]] = set()
    found = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: item[0] in filled):
        place = (tensor.data_ptr(), tensor.nbytes)
        if name not in unsaved and not (tensor.numel() and place in seen and name in filled):
            found[name] = tensor
        seen.add(place)
    return {name: found[name] for name in tensors if name in found}


def write_pretrained(
    model: nn.Module,
    folder: str | Path,
    layout: Layout | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    beside: Sequence[Path] = (),
) -> LaidOut:
    """Write a quantized model as a Hugging Face folder: config.json, generation_config.json, safetensors files, and
    copies of the files `beside`.

    Raises:
        ModelError: it is not a Hugging Face model, or only a part of one.
        LayoutError: as `laid_out`; or published files concatenate or split the weight of a layer stored as codes.
        CheckpointError: the folder exists and is not empty, has no room, or cannot be written.
    """
    path, most, name = Path(folder).expanduser(), size_of(max_shard_size), stock_class(model).__name__
    config: Any = copy.deepcopy(getattr(model, "config", None))
    if part_of(model).applied is None or not is_pretrained(model):
        raise ModelError(
            f"this {name} is not a whole Hugging Face model that is quantised, so no config.json could say how it is "
            "read: save model.state_dict() (torch.save, safetensors), and load it into a model that "
            "halfstep.quantize_model was called on with the same recipe"
        )
    made = laid_out(model, layout, dtype)
    tensors = published(model, made.plain | made.codes)
    codes = {layer: made.codes[f"{layer}.{made.layout.codes}"] for layer in made.quantized}
    left: dict[str, Any] = {layer: model.get_submodule(layer) for layer in made.ignored}
    whole = {layer: module.weight for layer, module in left.items() if hasattr(module, "weight")}
    names = published_layers(model, codes | whole)
    lost = next((layer for layer in codes if f"{names.get(layer)}.{made.layout.codes}" not in tensors), None)
    if lost is not None:
        raise LayoutError(
            f"{lost} of {type(model).__name__}: published files concatenate its weight with another, or split it, so "
            "they cannot store its codes. Call halfstep.quantize_model(model, recipe), save its state_dict(), and load "
            "that into a model quantised alike; for servers write values (save_pretrained of the stock model)"
        )
    # Servers look up names as in the files, transformers names of modules: list both.
    ignored = tuple(dict.fromkeys(name for layer in made.ignored for name in (layer, names.get(layer, layer))))
    made = replace(made, notes={names[layer]: note for layer, note in made.notes.items()})
    stored = next((t.dtype for t in made.plain.values() if t.is_floating_point()), torch.float32)
    config.architectures, config.dtype = [name], str(stored).removeprefix("torch.")
    with new_folder(path, total_bytes(tensors)) as partial:
        config.save_pretrained(partial)
        file = partial / "config.json"
        said = json.loads(file.read_text()) | {"quantization_config": made.layout.config(ignored)}
        file.write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")
        generation: Any = getattr(model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(partial)
        for source in beside:
            shutil.copyfile(source, partial / source.name)
        write_weights(partial, tensors, most, made.metadata)
    return made


def is_pretrained(module: nn.Module) -> bool:
    """Whether it is a transformers model, described by its config.json, and no wrapper that saves itself, such as
    PEFT's."""
    kind = type(module)
    return hasattr(kind, "save_pretrained") and hasattr(kind, "base_model_prefix")


def published(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's tensors with the names and shapes of its published files: renamed as transformers does, with stacked
    experts split."""
    revert = import_module("transformers.core_model_loading").revert_weight_conversion
    found: dict[str, Tensor] = revert(model, dict(tensors))
    return found


def published_layers(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Each layer's path in published files, by its path in the model; without layers whose weight is not a tensor of
    its own there."""
    named = published(model, {f"{path}.weight": tensor for path, tensor in weights.items()})
    found = {id(tensor): name for name, tensor in named.items()}
    return {path: found[id(t)].removesuffix(".weight") for path, t in weights.items() if id(t) in found}


def loaded_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """The name in the model of each tensor of a published file, without those that transformers concatenates or
    splits."""
    loading: Any = import_module("transformers.core_model_loading")
    mapping: Any = import_module("transformers.conversion_mapping")
    conversions = mapping.get_model_conversion_mapping(model, add_legacy=False)
    kinds = (loading.WeightRenaming, loading.WeightConverter)
    both = [[one for one in conversions if isinstance(one, kind)] for kind in kinds]
    found = {name: loading.rename_source_key(name, *both) for name in names}
    return {name: renamed for name, (renamed, converter) in found.items() if converter is None}
