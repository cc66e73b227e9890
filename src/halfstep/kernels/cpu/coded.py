"""Optimizer moments stored as codes in blocks: decoded to float32 and encoded again, one chunk at a time, in kernels.

The only float32 copy is that of one chunk, which stays in the cache. Codes and scales are those of `blocks` and
`dequantize`.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from halfstep.formats import Codebook, Float
from halfstep.kernels.cpu import blocks, element_codes, expansion
from halfstep.kernels.cpu.arrays import array
from halfstep.kernels.cpu.compiled import CHUNK, inner, specialized
from halfstep.kernels.cpu.dequantize import meaning, scales_from, values_piece
from halfstep.kernels.cpu.divided import divided, search
from halfstep.kernels.cpu.elements import Rounding
from halfstep.kernels.cpu.lanes import MAGNITUDE, NAN, SIGN, as_bits, as_floats
from halfstep.kernels.cpu.rules import note, room
from halfstep.kernels.cpu.runs import elementwise
from halfstep.kernels.cpu.scales import largest_of, power_scalars
from halfstep.quant.quantizer import Quantizer
from halfstep.quant.scaling.expansion import Expansion
from halfstep.quant.tile import TENSOR, Tile


class Coded(NamedTuple):
    """The codes and scales of a quantized tensor."""

    quantizer: Quantizer
    parts: Mapping[str, Tensor]
    """The tensors, by `Quantized`'s names."""
    shape: tuple[int, ...]
    """The shape in which it is quantized."""


class BlockCoding(NamedTuple):
    """How kernels read and write the codes of a quantizer."""

    quantizer: Quantizer
    """With tiles no longer than a row."""
    whole: bool
    """Whether one scale is for the whole tensor, so that its codes can be written only when its amax is known."""
    tile: tuple[np.uint32, ...] | None
    """`blocks.levels` of its tiles where kernels read and write it tile by tile (`optimizer_loops`): float or codebook
    codes whose scales are amax over the format's largest value."""
    scales: tuple[str, ...]
    """The names of the tensors besides the codes."""
    levels: Any
    decoding: Any
    scale_of: Any
    numbers: Any
    codes: Any


@lru_cache(maxsize=1024)
@_disable_current_modes()  # memory accounting calls this under a FakeTensor mode, where tensors have no values
def coding_of(quantizer: Quantizer, columns: int, dtype: torch.dtype) -> BlockCoding | None:
    """How kernels take codes of that dtype in rows of that many columns. None where they do not support it: codes must
    have 8 bits, be rounded to nearest, in whole blocks along rows, with scales that depend on their own block alone; or
    have one scale for the tensor (`whole`)."""
    quantizer = _with_tiles_in_rows(quantizer, columns)
    format, scales = quantizer.format, quantizer.scales
    if scales is None:
        return None
    if scales.tile == TENSOR:
        if not supports_whole(quantizer, dtype):
            return None
        if dtype == torch.float16:
            return BlockCoding(quantizer, True, None, ("scale",), None, None, None, None, None)
        code = element_codes.scalars(format, *_NEAREST)
        return BlockCoding(quantizer, True, None, ("scale",), None, meaning(format), None, *code)
    if scales.rule.two_level or scales.rule.narrow or quantizer.rounding != "nearest_even" or format.bits != 8:
        return None
    if isinstance(scales.rule, Expansion):
        if not expansion.supports(quantizer, columns):
            return None
        levels, decoding = blocks.levels(scales.tile), expansion.meaning(format)
        given = expansion.scalars(format, scales.rule), *element_codes.scalars(format, *_NEAREST)
        return BlockCoding(quantizer, False, None, ("scale", "exponent", "center"), levels, decoding, *given)
    if blocks.code_constants(quantizer, columns) is None:
        return None
    levels = blocks.levels(scales.tile)
    tile = levels if scales.rule.quotient and isinstance(format, Float | Codebook) else None
    if isinstance(format, Codebook):
        given = np.float32(format.max), None, search(format)
    else:
        scale_of = power_scalars(format, scales.rule) if scales.rule.exact else np.float32(format.max)
        given = scale_of, *element_codes.scalars(format, *_NEAREST)
    return BlockCoding(quantizer, False, tile, ("scale",), levels, meaning(format), *given)


def _with_tiles_in_rows(quantizer: Quantizer, columns: int) -> Quantizer:
    """The quantizer with tiles cut to the length of a row, where they are longer."""
    scales = quantizer.scales
    if scales is None or scales.tile.rows != 1 or not columns < (scales.tile.columns or 0):
        return quantizer
    return replace(quantizer, scales=replace(scales, tile=Tile(1, columns)))


def has_safe_scale(coding: BlockCoding, parts: Mapping[str, Tensor]) -> bool:
    """Whether a kernel may read these codes with their current scale. For CUDA tensors this synchronizes."""
    return not coding.whole or (parts["scale"].numel() == 1 and is_safe_scale(parts["scale"]))


def arguments(coding: BlockCoding, parts: Mapping[str, Tensor], factor: float = 1.0) -> tuple[Any, ...]:
    """The arguments of a kernel for codes: the array of codes, and six more that are None for an array of floats.

    Args:
        factor: the factor on values before they are rounded, for codes with one scale per tensor.
    """
    codes, scale = parts["codes"], parts["scale"]
    if coding.whole:
        kind, scale_of = _CODES.get(codes.dtype, torch.uint8), np.float32(factor)
        return array(codes, kind), np.float32(scale.item()), None, coding.decoding, scale_of, *coding[-2:]
    if len(coding.scales) == 1:
        return array(codes), array(scale, scale.dtype), *coding[4:]
    return array(codes), tuple(map(array, map(parts.__getitem__, coding.scales), repeat(scale.dtype))), *coding[4:]


_NEAREST = "nearest_even", "saturate"
PLAIN = (None,) * 6
"""The six arguments after an array of floats."""


@specialized
def opened(kept, stored, levels, decoding, a, b):
    """In kernels: the values a to b in float32: a slice of an array of floats, or codes decoded."""
    if isinstance(stored, types.NoneType):
        return lambda kept, stored, levels, decoding, a, b: kept[a:b]
    if isinstance(levels, types.NoneType):
        return lambda kept, stored, levels, decoding, a, b: open_whole(kept[a:b], stored, decoding)
    if isinstance(stored, types.BaseTuple):
        return lambda kept, stored, levels, decoding, a, b: _opened_groups(kept, stored, levels, decoding, a, b)
    return lambda kept, stored, levels, decoding, a, b: _decoded(
        kept[a:b], stored[a >> len(levels) : b >> len(levels)], levels, decoding
    )


@specialized
def closed(kept, stored, levels, scale_of, numbers, codes, values, a, b):
    """In kernels: encode the values that `opened` returned, after an update; nothing to do for floats."""
    if isinstance(stored, types.NoneType):
        return lambda kept, stored, levels, scale_of, numbers, codes, values, a, b: None
    if isinstance(levels, types.NoneType):
        return lambda kept, stored, levels, scale_of, numbers, codes, values, a, b: close_whole(
            kept[a:b], values, scale_of, numbers, codes
        )
    if isinstance(stored, types.BaseTuple):
        return lambda kept, stored, levels, scale_of, numbers, codes, values, a, b: _closed_groups(
            kept, stored, levels, scale_of, numbers, codes, values, a, b
        )
    if isinstance(numbers, types.NoneType):
        return lambda kept, stored, levels, scale_of, numbers, codes, values, a, b: _encode(
            kept[a:b], stored[a >> len(levels) : b >> len(levels)], levels, None, scale_of, None, None, codes, values
        )
    if isinstance(scale_of, types.BaseTuple):
        return lambda kept, stored, levels, scale_of, numbers, codes, values, a, b: _encode(
            kept[a:b], stored[a >> len(levels) : b >> len(levels)], levels, scale_of, None, numbers, codes, None, values
        )
    return lambda kept, stored, levels, scale_of, numbers, codes, values, a, b: _encode(
        kept[a:b], stored[a >> len(levels) : b >> len(levels)], levels, None, scale_of, numbers, codes, None, values
    )


@inner
def _decoded(kept, stored, levels, decoding):
    values = np.empty(CHUNK, np.uint32)[: kept.size]
    values_piece(kept, scales_from(stored), levels, values, decoding)
    return as_floats(values)


@inner
def _encode(kept, stored, levels, rule, whole, numbers, codes, cuts, values):
    x = as_bits(values)
    largest = largest_of(x, 0, levels)
    divisor, beside = room(largest.size, whole, stored)
    note(largest, rule, whole, None, None, None, stored, divisor, beside)
    divided(x, divisor, None, None, 0, levels, kept, numbers, codes, cuts, None, None)


@inner
def _opened_groups(kept, stored, levels, decoding, a, b):
    c, d = a >> len(levels), b >> len(levels)
    values = np.empty(CHUNK, np.float32)[: b - a]
    expansion.decode_groups(kept[a:b], stored[0][c:d], stored[1][c:d], stored[2][c:d], levels, values, decoding)
    return values


@inner
def _closed_groups(kept, stored, levels, rule, numbers, codes, values, a, b):
    c, d = a >> len(levels), b >> len(levels)
    x = as_bits(values)
    expansion.encode_groups(x, stored[0][c:d], stored[1][c:d], stored[2][c:d], levels, kept[a:b], rule, numbers, codes)


# ---- one scale a tensor ----------------------------------------------------------------------------------------------


_ROOM = 2.0**100  # the largest scale: a value times it stays finite
_CODES = {torch.float16: torch.int16}  # the numpy types of codes that are no bytes


@cache
def supports_whole(quantizer: Quantizer, codes: torch.dtype) -> bool:
    """Whether kernels support this quantizer with one scale per tensor and codes of that dtype."""
    scales, format = quantizer.scales, quantizer.format
    if (
        scales is None
        or quantizer.rounding != "nearest_even"
        or quantizer.outliers is not None
        or not scales.rule.reads
    ):
        return False
    if not scales.rule.linear or scales.rule.factor(torch.ones((), dtype=torch.float32, device="cpu"), format) is None:
        return False
    return codes == torch.float16 or (isinstance(format, Float) and _is_byte(format) and codes.itemsize == 1)


def _is_byte(format: Float) -> bool:
    known = format.bits == 8 and element_codes.scalars(format, "nearest_even", "saturate") is not None
    return known and element_codes.Decoding(*element_codes.decoding_scalars(format)).half > 0


def is_safe_scale(scale: Tensor) -> bool:
    """Whether a stored scale is small enough that values times it need no check for infinity."""
    return 0.0 <= float(scale) <= _ROOM


def whole_factor(quantizer: Quantizer, amax: Any) -> Tensor | None:
    """The factor for a tensor with that amax; None where kernels leave it to the reference."""
    assert quantizer.scales is not None
    found = quantizer.scales.rule.factor(torch.tensor(float(amax), dtype=torch.float32, device="cpu"), quantizer.format)
    return found if found is not None and bool(found.isfinite()) and is_safe_scale(found.reciprocal()) else None


# ---- lanes ---------------------------------------------------------------------------------------------------------


@elementwise
def _values(code, scale, decoding):
    if decoding is None:
        return code.half_to_float() * scale
    d = element_codes.Decoding(*decoding)
    magnitude = code & (d.sign_shift.constant(MAGNITUDE) >> d.sign_shift).to(8)
    value = (element_codes.half_of(code, d) * (d.offset + (15 << 23)).float()).bits()
    nan = value.constant(NAN) | (value & SIGN)
    return (magnitude.to(32) > d.half).pick(nan, value).float() * scale


@elementwise
def close_whole(value, factor, numbers, codes):
    """In kernels: the codes of value * factor."""
    product = value * factor
    if numbers is None:
        return product.float_to_half()
    return element_codes.encoded_number(product.bits(), Rounding(*numbers), element_codes.Coding(*codes)).to(8)


@inner
def open_whole(codes, scale, decoding):
    """In kernels: the values of codes with one scale."""
    values = np.empty(CHUNK, np.float32)[: codes.size]
    _values(values, codes, scale, decoding)
    return values
