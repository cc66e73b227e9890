"""Tensors as codes and scales: under one power of two, as a quantizer lays them out, and as a storage names them."""

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from halfstep import formats
from halfstep.kernels import operators
from halfstep.kernels.cpu.arrays import plain
from halfstep.kernels.largest import amax_of
from halfstep.kernels.watched import times
from halfstep.ops.casts import Quantized, quantize_parts
from halfstep.quant import Quantizer, get_scaling
from halfstep.quant.memory import has_memory
from halfstep.quant.quantizer import matrix_shape
from halfstep.recipe import Storage
from halfstep.recipe.storage import scaled_dtype


_FEW = 8  # numbers, whose codes fill whole bytes


def encode_scaled(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes in `dtype`, each rounded to nearest-even once, and their scale: x ~ codes * scale.

    scale, a float32 scalar, is the smallest power of two with amax / scale <= max, so amax / scale lies in
    (max / 2, max]. An infinity or NaN makes everything NaN.

    Source: MS-AMP, ScalingMeta.compute_scaling_factor, whose factor is 1 / scale.
    """
    factor = get_scaling("rceil").factor(amax_of(x), formats.get(dtype))
    assert factor is not None
    return (x.float() * factor).to(dtype), factor.reciprocal()


def decode_scaled(codes: Tensor, scale: Tensor) -> Tensor:
    """codes * scale, in float32, exactly."""
    if codes.itemsize == 1 and has_memory(codes) and plain(codes, codes.dtype):
        values = torch.empty(
            codes.shape, dtype=torch.float32, device="cpu"
        )  # torch's own conversion goes number by number
        operators.decode_into(codes.view(torch.uint8), values, formats.get(codes.dtype))
        return times(values, scale)
    return times(codes.to(torch.float32, copy=True), scale)


def encode_parts(x: Tensor, quantizer: Quantizer) -> dict[str, Tensor]:
    """Codes and scales of x, by name: in torch's dtype under one scale where there is one (`scaled_dtype`), else as
    `quantize` lays them out."""
    dtype = scaled_dtype(quantizer)
    if dtype is None:
        return quantize_parts(x.detach().contiguous(), quantizer)
    codes, scale = encode_scaled(x, dtype)
    return {"codes": codes, "scale": scale}


def decode_parts(
    parts: Mapping[str, Tensor], quantizer: Quantizer, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """The values, of that shape and dtype, of what `encode_parts` made."""
    if scaled_dtype(quantizer) is not None:
        return decode_scaled(parts["codes"], parts["scale"]).to(dtype)
    return Quantized(quantizer, shape, dtype, dict(parts)).dequantize()


# ---- tensors by name, as a storage keeps them ------------------------------------------------------------------------


def store(storage: Storage, name: str, values: Tensor) -> dict[str, Tensor]:
    """The tensors that float32 values are kept in, by name."""
    if storage.dtype is not None:
        parts = {number: torch.empty_like(values, dtype=storage.dtype) for number in storage.numbers(name)}
    else:
        layout = storage.layout(name, tuple(values.shape)).items()
        parts = {part: torch.empty(shape, dtype=dtype, device=values.device) for part, (dtype, shape) in layout}
    write(storage, name, parts, values)
    return parts


def store_zeros(storage: Storage, name: str, shape: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
    """As `store`, of zeros of that shape, which have one code and one scale: those of a few of them."""
    known = _zeros_of(storage, name, shape)
    if known is None:
        return store(storage, name, torch.zeros(shape, dtype=torch.float32, device=device))
    return {part: torch.full(size, zero, dtype=dtype, device=device) for part, dtype, size, zero in known}


@lru_cache(maxsize=4096)
def _zeros_of(
    storage: Storage, name: str, shape: tuple[int, ...]
) -> Sequence[tuple[str, torch.dtype, Any, Any]] | None:
    """Name, dtype, shape and the one number of each tensor that zeros are kept in; None where they are rounded as any
    numbers are: few ones, and rows whose last byte has bits left over."""
    rows, columns = matrix_shape(storage.matrix(shape))
    if rows * columns <= _FEW or columns * storage.quantizer.format.bits % 8:
        return None
    parts = storage.layout(name, shape).items()
    return [(part, *kind, zero) for (part, kind), zero in zip(parts, _zero(storage), strict=True)]


@cache
def _zero(storage: Storage) -> Sequence[Any]:
    """What is in each of the tensors that zeros are kept in."""
    with _disable_current_modes(), torch.no_grad():  # a FakeTensor has no numbers
        few = store(storage, "", torch.zeros(_FEW, dtype=torch.float32, device="cpu"))
        return [part.view(-1)[0].item() for part in few.values()]


def read(storage: Storage, name: str, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """The float32 values of a tensor of that shape: in its own memory where it is stored so."""
    first, *others = (_number(storage, number, tensors, shape) for number in storage.numbers(name))
    return first + others[0] if others else first


def write(storage: Storage, name: str, tensors: Mapping[str, Tensor], values: Tensor) -> None:
    """Round float32 values into the tensors that one is kept in."""
    for number in storage.numbers(name):
        if number != name:
            values = values - _number(storage, name, tensors, tuple(values.shape))  # what the first left over
        if storage.dtype is not None:
            tensors[number].copy_(values)
        else:
            parts = encode_parts(values.reshape(storage.matrix(tuple(values.shape))), storage.quantizer)
            for part, own in storage.names(number).items():
                tensors[own].copy_(parts[part])


def _number(storage: Storage, number: str, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    if storage.dtype is not None:
        return tensors[number].float()
    parts = {part: tensors[own] for part, own in storage.names(number).items()}
    return decode_parts(parts, storage.quantizer, storage.matrix(shape), torch.float32).view(shape)
