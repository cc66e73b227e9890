"""Load a folder that was exported, or that others published quantised, into a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import formats
from halfstep.errors import CheckpointError, HalfstepError, MissingLibraryError
from halfstep.inspection import Checkpoint, StoredTensor, open_checkpoint
from halfstep.inspection.files import parse_object
from halfstep.inspection.schemes import tile_of
from halfstep.layouts import Layout, get_layout
from halfstep.nn.pretrained import KEY, loaded_names
from halfstep.nn.quantized import load_codes
from halfstep.ops import Quantized
from halfstep.ops.part import part_of
from halfstep.quant import Quantizer, Scales, Tile, get_quantizer, get_scaling
from halfstep.quant.description import DTYPES, MALFORMED, restore
from halfstep.recipe import LinearSpec, Matmul, Recipe, Rule, from_data, get_recipe
from halfstep.text import grouped


TAKEN = (
    "FP8 of DeepSeek (weight_scale_inv), compressed-tensors and ModelOpt (weight_scale); MXFP8; MXFP4 of gpt-oss "
    "(_blocks, _scales) and compressed-tensors; NVFP4 of compressed-tensors and ModelOpt"
)
Parts = Mapping[str, StoredTensor]
Read = Callable[[StoredTensor], Tensor]


@dataclass(frozen=True)
class Published:
    """The weights of a folder that are stored as codes."""

    recipe: Recipe
    """A recipe that rounds only weights, to these codes; everything else is in bfloat16."""
    codes: dict[str, list[Quantized]]
    """By parameter: for a linear layer one matrix (out, in), for a stack of experts one each."""
    held: frozenset[str]
    """The names of their tensors in the file, and of the activation scales of servers."""


def published(checkpoint: Checkpoint, read: Read) -> Published:
    """The codes in a folder with a `quantization_config`.

    Raises:
        CheckpointError: it contains none of `TAKEN`, or shapes do not fit together.
    """
    tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
    codes: dict[str, list[Quantized]] = {}
    held: set[str] = set()
    for name in tensors:
        for find in (_fp8, _packed, _modelopt_nvfp4, _stacked):
            if (found := find(name, tensors, read)) is not None:
                parameter, matrices, used = found
                codes[parameter] = matrices
                held |= used
    held |= {name for name in tensors if name.endswith((".input_scale", ".input_global_scale", ".k_scale", ".v_scale"))}
    if not codes:
        method = (checkpoint.config or {}).get("quantization_config")
        raise CheckpointError(
            f"{checkpoint.path}: no weights in known codes (quantization_config: {method}); expected "
            f"{TAKEN}. Load the weights in 16 bits with transformers, and call "
            "halfstep.quantize_model(model, recipe, adapters=True)"
        )
    return Published(_recipe_of(codes), codes, frozenset(held))


Found = tuple[str, list[Quantized], set[str]]


def _fp8(name: str, tensors: Parts, read: Read) -> Found | None:
    """NAME in E4M3, with NAME_scale_inv or NAME_scale: multipliers of the codes, or exponents in bytes."""
    for suffix in ("_scale_inv", "_scale"):
        scale = tensors.get(name + suffix)
        if tensors[name].dtype != "float8_e4m3fn" or scale is None:
            continue
        shape = tensors[name].shape
        exact = scale.dtype in ("uint8", "float8_e8m0fnu")
        tile = tile_of(shape, scale.shape, (1, 32) if exact else (128, 128))
        if len(shape) != 2 or tile is None:
            raise _misfit(name, shape, scale)
        scales = Scales(Tile(*tile), get_scaling("rceil" if exact else "absmax"))
        quantizer = Quantizer(formats.get("e4m3fn"), scales=scales)
        return name, [_stored_as(quantizer, shape, read(tensors[name]), {"scale": read(scale)})], {name, scale.name}
    return None


def _packed(name: str, tensors: Parts, read: Read) -> Found | None:
    """compressed-tensors' NAME_packed, two codes a byte, with NAME_scale: E8M0, or E4M3 over NAME_global_scale."""
    stem = name.removesuffix("_packed")
    scale, whole = tensors.get(f"{stem}_scale"), tensors.get(f"{stem}_global_scale")
    if stem == name or tensors[name].dtype != "uint8" or scale is None:
        return None
    if whole is None:
        return _fp4(name, stem, "mxfp4", tensors[name], scale, read, {})
    reciprocal = read(whole).float().view(()).reciprocal()
    return _fp4(name, stem, "nvfp4", tensors[name], scale, read, {"tensor_scale": reciprocal}, {whole.name})


def _modelopt_nvfp4(name: str, tensors: Parts, read: Read) -> Found | None:
    """ModelOpt's NAME, two E2M1 codes a byte, with NAME_scale in E4M3 and NAME_scale_2, a factor for the tensor."""
    scale, whole = tensors.get(f"{name}_scale"), tensors.get(f"{name}_scale_2")
    if tensors[name].dtype != "uint8" or scale is None or whole is None:
        return None
    return _fp4(
        name, name, "nvfp4", tensors[name], scale, read, {"tensor_scale": read(whole).float().view(())}, {whole.name}
    )


def _fp4(
    name: str, parameter: str, kind: str, codes: StoredTensor, scale: StoredTensor, read: Read,
    more: Mapping[str, Tensor], used: set[str] = frozenset(),  # type: ignore[assignment]
) -> Found:  # fmt: skip
    quantizer = get_quantizer(kind)
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    if len(shape) != 2 or scale.shape != quantizer.tiling.tile.grid(*shape):
        raise _misfit(name, shape, scale)
    parts = {"scale": read(scale), **more}
    return parameter, [_stored_as(quantizer, shape, read(codes), parts)], {name, scale.name, *used}


def _stacked(name: str, tensors: Parts, read: Read) -> Found | None:
    """gpt-oss's NAME_blocks (experts, out, in / 32, 16), two codes a byte, with NAME_scales (experts, out, in / 32)."""
    stem = name.removesuffix("_blocks")
    scales = tensors.get(f"{stem}_scales")
    if stem == name or tensors[name].dtype != "uint8" or scales is None:
        return None
    experts, out, blocks, half = tensors[name].shape if len(tensors[name].shape) == 4 else (0, 0, 0, 0)
    if half != 16 or scales.shape != (experts, out, blocks):
        raise _misfit(name, tensors[name].shape, scales)
    quantizer, codes, scale = get_quantizer("mxfp4"), read(tensors[name]).view(experts, out, -1), read(scales)
    made = [
        _stored_as(quantizer, (out, 32 * blocks), one, {"scale": its}) for one, its in zip(codes, scale, strict=True)
    ]
    return stem, made, {name, scales.name}


def _stored_as(quantizer: Quantizer, shape: tuple[int, ...], codes: Tensor, parts: Mapping[str, Tensor]) -> Quantized:
    """The matrix with the file's codes and scales: bytes stay bytes, and 16-bit scales become float32."""
    own = {"codes": codes.view(torch.uint8).view(shape[0], -1)}
    held = quantizer.tiling.rule.layout(quantizer.tiling.tile.grid(shape[0], shape[1]))
    for part, tensor in parts.items():
        dtype, size = held[part]
        own[part] = (tensor.view(torch.uint8) if dtype == torch.uint8 else tensor.to(dtype)).reshape(size).contiguous()
    return Quantized(quantizer, shape, torch.bfloat16, own)


def _recipe_of(codes: Mapping[str, list[Quantized]]) -> Recipe:
    """A recipe that rounds only weights to those codes: a rule for each quantizer, the most frequent one's for all
    other layers."""
    layers = grouped((matrices[0].quantizer, name.rpartition(".")[0]) for name, matrices in codes.items())
    usual, *others = sorted(layers, key=lambda quantizer: -len(layers[quantizer]))
    rules = tuple(Rule("|".join(dict.fromkeys(layers[quantizer])), _weights_alone(quantizer)) for quantizer in others)
    kinds = " and ".join(f"{quantizer.format.name} ({quantizer.scales})" for quantizer in (usual, *others))
    return replace(
        get_recipe("nf4"),
        name="published",
        summary=f"Weights as they were published, in {kinds}; all else in bf16.",
        source="the folder's own quantization_config",
        rules=(*rules, Rule("*", _weights_alone(usual))),
        notes=(),
    )


def _weights_alone(quantizer: Quantizer) -> LinearSpec:
    return LinearSpec(output=Matmul(rhs=quantizer), grad_input=Matmul(rhs=quantizer.down))


def _misfit(name: str, shape: tuple[int, ...], scale: StoredTensor) -> CheckpointError:
    return CheckpointError(
        f"{name}: codes of a weight of shape {shape} and scales {scale.name} of shape {scale.shape} do not fit together"
    )


def from_pretrained(folder: str | Path, adapters: bool = False) -> nn.Module:
    """The model of a folder whose weights are quantised, with the folder's codes and scales.

    A folder written by `halfstep.export`, or by its `save_pretrained`, gives a model whose outputs equal the written
    model's, bit for bit if `kept` named no layer and `dtype` was not given. A folder that others published in FP8,
    MXFP8, MXFP4 or NVFP4 (`TAKEN`) gives a model that rounds no activations; everything that is not codes is in
    bfloat16, and its weights are never decoded to 16 bits when it is loaded.

    Nothing in the folder is executed: config.json names a class of transformers, weights are read as safetensors.

    Args:
        folder: its path.
        adapters: whether the model is to train adapters on its codes (QLoRA), as in `halfstep.quantize_model`.

    Raises:
        CheckpointError: there is no such folder; its weights are in no known codes; it is broken, or of
            another model; adapters cannot be trained under its recipe.
        MissingLibraryError: transformers is not installed, or accelerate for folders that others published.
    """
    checkpoint = open_checkpoint(folder)
    if KEY not in checkpoint.metadata and isinstance((checkpoint.config or {}).get("quantization_config"), Mapping):
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
    model = _built(Path(folder).expanduser(), checkpoint)
    names = loaded_names(model, [f"{path}.weight" for path in codes])
    paths = {path: names.get(f"{path}.weight", path).removesuffix(".weight") for path in codes}
    placed = {f"{paths[path]}.weight": [made] for path, made in codes.items()}
    held = {f"{path}.{name}" for path in codes for name in (*layout.parts, "input_scale")}
    others = {name: tensor for name, tensor in tensors.items() if name not in held}
    own = {paths[path]: found for path, found in factors.items()}
    return _with_codes(model, recipe, placed, own, adapters, others, str(folder))


def _published(folder: Path, checkpoint: Checkpoint, adapters: bool) -> nn.Module:
    """The model of weights that others quantised; no storage is ever allocated for the values of codes."""
    found = published(checkpoint, _read)
    tensors = {tensor.name: tensor for tensor in checkpoint.tensors if tensor.name not in found.held}
    with MissingLibraryError.of("accelerate"):
        empty = import_module("accelerate").init_empty_weights
    with empty(include_buffers=False):
        model: Any = _built(folder, checkpoint)
    names = loaded_names(model, found.codes)
    if joined := sorted(found.codes.keys() - names.keys()):
        raise CheckpointError(
            f"{folder}: transformers joins {joined[0]} with others when it loads them (experts, separate in the file), "
            "but codes cannot be joined. Load the weights in 16 bits with transformers, and call "
            "halfstep.quantize_model(model, recipe, adapters=True)"
        )
    for module_path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and f"{module_path}.{name}".lstrip(".") not in names.values():
                module._parameters[name] = nn.Parameter(
                    torch.empty_like(parameter, dtype=torch.bfloat16, device="cpu"), parameter.requires_grad
                )
    model.tie_weights()
    codes = {names[name]: made for name, made in found.codes.items()}
    return _with_codes(model, found.recipe, codes, {}, adapters, tensors, str(folder))


def _with_codes(
    model: nn.Module, recipe: Recipe, codes: dict[str, list[Quantized]], factors: dict[str, dict[str, Tensor]],
    adapters: bool, others: Mapping[str, StoredTensor], what: str,
) -> nn.Module:  # fmt: skip
    """The model with these codes, and the other tensors."""
    try:
        load_codes(model, recipe, codes, factors, adapters)
    except HalfstepError as error:
        raise CheckpointError(f"{what}: {error}") from error
    _load(model, others, what)
    return model


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
        for name in ("input", "weight")
        if name in data
    }


def _built(folder: Path, checkpoint: Checkpoint) -> nn.Module:
    """The model of config.json, with weights that are to be replaced."""
    with MissingLibraryError.of("export"):
        transformers = import_module("transformers")
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
        with torch.random.fork_rng(devices=[]):  # the weights made here are replaced: keep the user's generator
            model: nn.Module = kind._from_config(config, dtype=torch.float32)  # type: ignore[attr-defined]
        if (folder / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        why = " ".join(str(error).split())
        raise CheckpointError(f"{folder}: no model can be built ({type(error).__name__}: {why[:300]})") from error
    return model


def _load(model: nn.Module, tensors: Mapping[str, StoredTensor], what: str) -> None:
    """Copy the tensors that are not codes, by name."""
    own = {name: tensor for name, tensor in model.state_dict().items() if not _is_code_buffer(model, name)}
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


def _is_code_buffer(model: nn.Module, name: str) -> bool:
    """Whether a buffer stores codes, or their scales and format."""
    path, _, last = name.rpartition(".")
    stored = part_of(model.get_submodule(path)).stored
    held = {f"{weight}_{part}" for weight, entry in stored.items() for part in (*entry.parts, "format")}
    return last in held or (bool(stored) and last.startswith("_halfstep_"))


def _read(stored: StoredTensor) -> Tensor:
    """A tensor of a file, copied to a separate storage."""
    dtype = getattr(torch, stored.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{stored.name} is of type {stored.dtype}, which is none of torch's")
    whole, place = torch.empty(stored.nbytes, dtype=torch.uint8, device="cpu"), 0
    for chunk in stored.chunks():
        part = torch.from_numpy(chunk.view("u1").copy())
        whole[place : place + len(part)] = part
        place += len(part)
    return whole.view(dtype).view(stored.shape)
