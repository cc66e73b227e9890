"""Read a folder of quantised weights into a model, our own or what others published: codes stay codes."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import CheckpointError, HalfstepError, MissingLibraryError
from halfstep.inspection import Checkpoint, StoredTensor, open_checkpoint
from halfstep.inspection.files import parse_object
from halfstep.layouts import Layout, get_layout
from halfstep.nn.pretrained import KEY, loaded_names
from halfstep.nn.quantized import load_codes
from halfstep.ops import Quantized
from halfstep.ops.part import part_of
from halfstep.quant.description import DTYPES, MALFORMED, restore
from halfstep.recipe import Recipe, from_data
from halfstep.serving.published import published, says_quantized


_FACTORS = ("input", "weight")


def from_pretrained(folder: str | Path, adapters: bool = False) -> nn.Module:
    """The model of a folder whose weights are quantised, with the codes and scales that lie there.

    What `halfstep.export`, or its `save_pretrained`, wrote computes what the model computed that was written, bit for
    bit where `kept` named no layer and `dtype` was not given. What others published in FP8, MXFP8, MXFP4 or NVFP4
    (`serving.published.TAKEN`) rounds no activations, and everything that is not in codes is in bfloat16; its weights
    are never held in 16 bits.

    Nothing in the folder is run: config.json names a class of transformers, weights are read as safetensors.

    Args:
        folder: where it lies.
        adapters: the model is to train adapters beside its codes (QLoRA), as in `halfstep.quantize_model`.

    Raises:
        CheckpointError: there is no such folder; its weights are in no codes that are known; it is broken, or of
            another model; adapters cannot be trained under its recipe.
        MissingLibraryError: transformers is not installed, or accelerate for what others published.
    """
    checkpoint = open_checkpoint(folder)
    if KEY not in checkpoint.metadata and says_quantized(checkpoint.config):
        return _published(Path(folder).expanduser(), checkpoint, adapters)
    said = _said(checkpoint)
    try:
        layout, recipe = get_layout(said["layout"]), _recipe(said["recipe"])
        tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
        codes = {path: _quantized(path, note, said, layout, tensors) for path, note in said["layers"].items()}
        factors = {path: _factors(note.get("factors", {})) for path, note in said["layers"].items()}
    except CheckpointError:
        raise
    except (*MALFORMED, LookupError, OverflowError) as error:
        why = str(error)[:300] or type(error).__name__
        raise CheckpointError(
            f"{folder}: what its metadata say of the layers cannot be read: {why}. The file was edited, or is of a "
            "newer version"
        ) from error
    model = _stock(Path(folder).expanduser(), checkpoint)
    names = loaded_names(model, [f"{path}.weight" for path in codes])
    paths = {path: names.get(f"{path}.weight", path).removesuffix(".weight") for path in codes}
    placed = {f"{paths[path]}.weight": [made] for path, made in codes.items()}
    try:
        load_codes(model, recipe, placed, {paths[path]: found for path, found in factors.items()}, adapters)
    except HalfstepError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    held = {f"{path}.{name}" for path in codes for name in (*layout.parts, "input_scale")}
    _load(model, {name: tensor for name, tensor in tensors.items() if name not in held}, str(folder))
    return model


def _published(folder: Path, checkpoint: Checkpoint, adapters: bool) -> nn.Module:
    """The model of weights that others quantised; those in codes never have memory for values."""
    found = published(checkpoint, _read)
    tensors = {tensor.name: tensor for tensor in checkpoint.tensors if tensor.name not in found.held}
    try:
        empty = import_module("accelerate").init_empty_weights
    except ModuleNotFoundError as error:
        raise MissingLibraryError.of(error, "accelerate") from None
    with empty(include_buffers=False):
        model: Any = _stock(folder, checkpoint)
    names = loaded_names(model, found.codes)
    if joined := sorted(found.codes.keys() - names.keys()):
        raise CheckpointError(
            f"{folder}: transformers joins {joined[0]} with others as it loads them (experts, one by one in the file), "
            "and codes cannot be joined here. Load the weights in 16 bits with transformers, and call "
            "halfstep.quantize_model(model, recipe, adapters=True)"
        )
    for module_path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and f"{module_path}.{name}".lstrip(".") not in names.values():
                module._parameters[name] = nn.Parameter(
                    torch.empty_like(parameter, dtype=torch.bfloat16, device="cpu"), parameter.requires_grad
                )
    model.tie_weights()
    try:
        load_codes(model, found.recipe, {names[name]: made for name, made in found.codes.items()}, {}, adapters)
    except HalfstepError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    _load(model, tensors, str(folder))
    return model  # type: ignore[no-any-return]


def _said(checkpoint: Checkpoint) -> dict[str, Any]:
    text = checkpoint.metadata.get(KEY)
    if text is None or checkpoint.config is None:
        raise CheckpointError(
            f"{checkpoint.path} has no config.json, or weights without {KEY!r} metadata and no quantization_config: "
            "they are not quantised. Load it with transformers"
        )
    return parse_object(text.encode(), f"{checkpoint.path}: the metadata {KEY!r}")


def _recipe(data: Any) -> Recipe:
    def named(name: str) -> Recipe:
        raise CheckpointError(f"the recipe has a base, {name!r}; expected all of its fields")

    return from_data(data, named)


def _quantized(
    path: str, note: Mapping[str, Any], said: Mapping[str, Any], layout: Layout, tensors: Mapping[str, StoredTensor]
) -> Quantized:
    quantizer, _, _ = restore(said["quantizers"][note["quantizer"]])
    rows, columns = note["shape"]
    if note["dtype"] not in DTYPES:
        raise CheckpointError(f"{path}: dtype {note['dtype']!r} found; expected one of {', '.join(DTYPES)}")
    found = {name: _read(tensors[f"{path}.{name}"]) for name in layout.parts if f"{path}.{name}" in tensors}
    return layout.quantized(found, quantizer, (rows, columns), DTYPES[note["dtype"]], note.get("scale"))


def _factors(data: Mapping[str, str]) -> dict[str, Tensor]:
    return {
        name: torch.tensor([float.fromhex(data[name])], dtype=torch.float32, device="cpu")
        for name in _FACTORS
        if name in data
    }


def _stock(folder: Path, checkpoint: Checkpoint) -> nn.Module:
    """The model of config.json, with weights to be replaced."""
    try:
        transformers = import_module("transformers")
    except ModuleNotFoundError as error:
        raise MissingLibraryError.of(error, "export") from None
    names = (checkpoint.config or {}).get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise CheckpointError(
            f"{folder}: config.json names the architecture {name!r}, which transformers does not have"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.random.fork_rng(devices=[]):  # initial weights, which are replaced, draw no number of the user's
            model: nn.Module = kind._from_config(config, dtype=torch.float32)  # type: ignore[attr-defined]
        if (folder / "generation_config.json").is_file():
            generation = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
            model.generation_config = generation
    except Exception as error:
        why = " ".join(str(error).split())
        raise CheckpointError(f"{folder}: no model can be built ({type(error).__name__}: {why[:300]})") from error
    return model


def _load(model: nn.Module, tensors: Mapping[str, StoredTensor], what: str) -> None:
    """Copy what is not in codes, name by name."""
    own = {name: tensor for name, tensor in model.state_dict().items() if not _in_codes(model, name)}
    names = loaded_names(model, tensors)
    apart = next((name for name in tensors if name not in names), None)
    if apart is not None:
        raise CheckpointError(
            f"{what}: the model's tensor for {apart} is put together from parts of the file, or the other way round: "
            "load it with transformers"
        )
    found = {names[name]: stored for name, stored in tensors.items()}
    filled = {own[name].data_ptr() for name in found if name in own}
    missing = [name for name, tensor in own.items() if name not in found and tensor.data_ptr() not in filled]
    extra = sorted(
        name for name, tensor in tensors.items() if names[name] not in own or found[names[name]] is not tensor
    )
    if missing or extra:
        raise CheckpointError(
            f"{what}: {', '.join(missing[:3]) or 'nothing'} missing, {', '.join(extra[:3]) or 'nothing'} unexpected; "
            "expected the tensors of the model that config.json describes"
        )
    for name, stored in found.items():
        if stored.shape != tuple(own[name].shape):
            raise CheckpointError(f"{what}: {name} is of shape {stored.shape}; expected {tuple(own[name].shape)}")
        own[name].copy_(_read(stored))


def _in_codes(model: nn.Module, name: str) -> bool:
    """Whether a buffer holds codes, or what belongs to them."""
    path, _, last = name.rpartition(".")
    stored = part_of(model.get_submodule(path)).stored
    held = {f"{weight}_{part}" for weight, entry in stored.items() for part in (*entry.parts, "format")}
    return last in held or (bool(stored) and last.startswith("_halfstep_"))


def _read(stored: StoredTensor) -> Tensor:
    """A tensor of a file, in memory of its own."""
    dtype = getattr(torch, stored.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{stored.name} is of type {stored.dtype}, which is none of torch's")
    whole, place = torch.empty(stored.nbytes, dtype=torch.uint8, device="cpu"), 0
    for chunk in stored.chunks():
        part = torch.from_numpy(chunk.view("u1").copy())
        whole[place : place + len(part)] = part
        place += len(part)
    return whole.view(dtype).view(stored.shape)
