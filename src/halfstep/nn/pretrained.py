"""A quantised model of Hugging Face's as a folder that servers and transformers load."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import LayoutError, ModelError
from halfstep.layouts import Layout
from halfstep.layouts.folder import new_folder, size_of, total_bytes, write_weights
from halfstep.nn.adopt import stock_class
from halfstep.nn.laid_out import LaidOut, laid_out
from halfstep.ops.part import part_of


def write_pretrained(
    model: nn.Module,
    folder: str | Path,
    layout: Layout | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    beside: Sequence[Path] = (),
) -> LaidOut:
    """Write a quantised model as a Hugging Face folder: config.json, generation_config.json, safetensors files; and
    copies of the files `beside` them.

    Raises:
        ModelError: it is not Hugging Face's, or not a whole model.
        LayoutError: as `laid_out`; published files join the weight of a layer in codes to another, or cut it.
        CheckpointError: the folder is there and not empty, has no room, or cannot be written.
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
            f"{lost} of {type(model).__name__}: published files join its weight to another, or cut it, and its codes "
            "have no place there. Call halfstep.quantize_model(model, recipe), save its state_dict(), and load that "
            "into a model quantised alike; for servers write values (save_pretrained of the stock model)"
        )
    # Servers mean the names in files, and transformers those of modules: both are named.
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
    """Whether it is a model of transformers', which its config.json describes, and no wrapper with a way to save of its
    own, such as PEFT's."""
    kind = type(module)
    return hasattr(kind, "save_pretrained") and hasattr(kind, "base_model_prefix")


def published(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's tensors as its published files have them: under other names where transformers renames them, and
    experts apart that the model has in one parameter."""
    revert = import_module("transformers.core_model_loading").revert_weight_conversion
    found: dict[str, Tensor] = revert(model, dict(tensors))
    return found


def published_layers(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Each layer's path in published files, by its path in the model; without those whose weight is no whole tensor
    there."""
    named = published(model, {f"{path}.weight": tensor for path, tensor in weights.items()})
    found = {id(tensor): name for name, tensor in named.items()}
    return {path: found[id(t)].removesuffix(".weight") for path, t in weights.items() if id(t) in found}


def loaded_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """The name in the model of each tensor of a published file; without those that transformers joins or cuts."""
    loading: Any = import_module("transformers.core_model_loading")
    mapping: Any = import_module("transformers.conversion_mapping")
    conversions = mapping.get_model_conversion_mapping(model, add_legacy=False)
    kinds = (loading.WeightRenaming, loading.WeightConverter)
    both = [[one for one in conversions if isinstance(one, kind)] for kind in kinds]
    found = {name: loading.rename_source_key(name, *both) for name in names}
    return {name: renamed for name, (renamed, converter) in found.items() if converter is None}
