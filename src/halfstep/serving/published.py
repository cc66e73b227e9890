"""Weights that others published in 8 and 4 bits, with their codes as they lie in the file: FP8, MXFP8, MXFP4, NVFP4."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from halfstep import formats
from halfstep.errors import CheckpointError
from halfstep.grouping import grouped
from halfstep.inspection import Checkpoint, StoredTensor
from halfstep.inspection.schemes import tile_of
from halfstep.ops import Quantized
from halfstep.quant import Quantizer, Scales, Tile, get_quantizer, get_scaling
from halfstep.recipe import LinearSpec, Matmul, Recipe, Rule, get_recipe


TAKEN = (
    "FP8 of DeepSeek (weight_scale_inv), compressed-tensors and ModelOpt (weight_scale); MXFP8; MXFP4 of gpt-oss "
    "(_blocks, _scales) and compressed-tensors; NVFP4 of compressed-tensors and ModelOpt"
)
Parts = Mapping[str, StoredTensor]
Read = Callable[[StoredTensor], Tensor]


@dataclass(frozen=True)
class Published:
    """The weights of a folder that are codes."""

    recipe: Recipe
    """Weights alone in these codes; everything else in bfloat16."""
    codes: dict[str, list[Quantized]]
    """By parameter: of a linear layer one matrix (out, in), of a stack of experts one for each."""
    held: frozenset[str]
    """The names of their tensors in the file, and of what servers round activations by."""


def published(checkpoint: Checkpoint, read: Read) -> Published:
    """What a folder with a `quantization_config` holds in codes.

    Raises:
        CheckpointError: it holds none of `TAKEN`, or shapes do not fit together.
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
            f"{checkpoint.path}: no weights in codes that are known here (quantization_config: {method}); expected "
            f"{TAKEN}. Load the weights in 16 bits with transformers, and call "
            "halfstep.quantize_model(model, recipe, adapters=True)"
        )
    return Published(_recipe(codes), codes, frozenset(held))


Found = tuple[str, list[Quantized], set[str]]


def _fp8(name: str, tensors: Parts, read: Read) -> Found | None:
    """NAME in E4M3, with NAME_scale_inv or NAME_scale: numbers that codes are multiplied by, or exponents in bytes."""
    for suffix in ("_scale_inv", "_scale"):
        scale = tensors.get(name + suffix)
        if tensors[name].dtype != "float8_e4m3fn" or scale is None:
            continue
        shape = tensors[name].shape
        exact = scale.dtype in ("uint8", "float8_e8m0fnu")
        tile = tile_of(shape, scale.shape, (1, 32) if exact else (128, 128))
        if len(shape) != 2 or tile is None:
            raise _misfit(name, shape, scale)
        rule = get_scaling("rceil" if exact else "absmax")
        quantizer = Quantizer(formats.get("e4m3fn"), scales=Scales(Tile(*tile), rule))
        return _matrix(name, name, quantizer, shape, read(tensors[name]), {"scale": read(scale)}, {scale.name})
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
    """ModelOpt's NAME, two E2M1 codes a byte, with NAME_scale in E4M3 and NAME_scale_2, a factor of the tensor."""
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
    assert quantizer.scales is not None
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    if len(shape) != 2 or scale.shape != quantizer.scales.tile.grid(*shape):
        raise _misfit(name, shape, scale)
    return _matrix(name, parameter, quantizer, shape, read(codes), {"scale": read(scale), **more}, {scale.name, *used})


def _matrix(
    name: str, parameter: str, quantizer: Quantizer, shape: tuple[int, ...], codes: Tensor, parts: Mapping[str, Tensor],
    used: set[str],
) -> Found:  # fmt: skip
    return parameter, [_quantized(quantizer, shape, codes, parts)], {name, *used}


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
        _quantized(quantizer, (out, 32 * blocks), one, {"scale": its}) for one, its in zip(codes, scale, strict=True)
    ]
    return stem, made, {name, scales.name}


def _quantized(quantizer: Quantizer, shape: tuple[int, ...], codes: Tensor, parts: Mapping[str, Tensor]) -> Quantized:
    """The matrix with codes and scales as they lie: bytes stay bytes, and 16-bit scales become float32."""
    assert quantizer.scales is not None
    own = {"codes": codes.view(torch.uint8).view(shape[0], -1)}
    grid = quantizer.scales.tile.grid(shape[0], shape[1])
    held = quantizer.scales.rule.layout(grid)
    for part, tensor in parts.items():
        dtype, size = held[part]
        own[part] = (tensor.view(torch.uint8) if dtype == torch.uint8 else tensor.to(dtype)).reshape(size).contiguous()
    return Quantized(quantizer, shape, torch.bfloat16, own)


def _recipe(codes: Mapping[str, list[Quantized]]) -> Recipe:
    """Weights alone in those codes: a rule for each quantizer, the most frequent one's for all other layers."""
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


def says_quantized(config: Mapping[str, Any] | None) -> bool:
    """Whether config.json says that weights are quantised."""
    return isinstance((config or {}).get("quantization_config"), Mapping)
