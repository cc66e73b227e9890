"""Blocks of a row that share a scale, to packed codes and scales or to values: `quant.Quantizer`, bit for bit.

One pass, chunk by chunk: block maxima, scales, then every element over its scale, rounded. Only NVFP4 reads its tensor
twice, as the scale of the whole comes first (`two_level`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from halfstep.formats import Codebook, Format
from halfstep.kernels.cpu import element_codes, packing, powers, two_level
from halfstep.kernels.cpu.arrays import array, plain, separate
from halfstep.kernels.cpu.compiled import CHUNK, Kernel, inner
from halfstep.kernels.cpu.divided import divided, divided_apart
from halfstep.kernels.cpu.element_codes import cut_points
from halfstep.kernels.cpu.noise import chunk_keys, seed_keys
from halfstep.kernels.cpu.packing import pack, place
from halfstep.kernels.cpu.powers import FAR, TINY, note_scales, stepped
from halfstep.kernels.cpu.scales import (
    absmax_scales,
    block_maxima,
    knows_rule,
    largest_stored,
    narrow_scales,
    power_scalars,
    power_scales,
)
from halfstep.kernels.cpu.scales import knows as knows_element
from halfstep.kernels.cpu.two_level import note_codes, tile_scales
from halfstep.quant.quantizer import Quantizer
from halfstep.quant.scales import Scales
from halfstep.quant.scaling import Scaling
from halfstep.quant.tile import Tile


LEVELS = {16: 4, 32: 5, 64: 6, 128: 7, 256: 8}


def knows(quantizer: Quantizer, columns: int) -> bool:
    """Whether the kernels here do what this quantizer does to rows of that many columns."""
    if quantizer.scales is None or quantizer.outliers is not None:
        return False
    tile, rule = quantizer.scales.tile, quantizer.scales.rule
    return (
        tile.rows == 1
        and tile.columns in LEVELS
        and columns % tile.columns == 0
        and quantizer.rounding in ("nearest_even", "stochastic")
        and _knows(quantizer.format, quantizer.rounding, rule)
    )


def supports(x: Tensor, quantizer: Quantizer) -> bool:
    """Whether `run` can quantise `x`: a contiguous CPU tensor (fp32, bf16, fp16) whose rows are whole blocks."""
    return plain(x) and x.dim() > 0 and knows(quantizer, x.shape[-1])


def run(x: Tensor, format: Format, rounding: str, scales: Scales, tensors: dict[str, Tensor], seed: int | None) -> None:
    """Write what x is in these blocks to `tensors` (`codes`, `scale` ...), contiguous and of their layout."""
    scale = tensors["scale"]
    codes, stored = array(tensors["codes"]), array(scale) if scales.rule.narrow else scale.view(-1).numpy()
    numbers, code_numbers = _numbers(format, rounding)
    target = (codes, numbers, code_numbers, cut_points(format, False), packing.shifts(format))
    _quantise(x, format, scales, target, stored, tensors.get("tensor_scale"), seed)


def supports_values(x: Tensor, out: Tensor, quantizer: Quantizer) -> bool:
    """Whether `run_values` can round `x` into `out`: contiguous CPU tensors of one shape, apart in memory."""
    return supports(x, quantizer) and x.shape == out.shape and takes_values(x, out)


def takes_values(x: Tensor, out: Tensor) -> bool:
    """Whether values of `x` can be written to `out`: both plain, and apart in memory."""
    out_fits = plain(out, torch.float32, torch.bfloat16)
    return plain(x) and out_fits and x.data_ptr() != out.data_ptr() and separate(x, out)


def run_values(
    x: Tensor,
    out: Tensor,
    format: Format,
    rounding: str,
    scales: Scales,
    seed: int | None,
    tensor_scale: Tensor | None = None,
) -> bool:
    """Write what x, rounded in these blocks, stands for to `out`, without making its codes.

    Returns whether some may be below 2^-126, but not 0: True where that was not checked. Of two levels of scales, a
    `tensor_scale` (float32 scalar) becomes the tensor's, and is left out of the values.
    """
    tile, rule = scales.tile, scales.rule
    numbers, cuts = value_numbers(format, rounding)
    if rule.exact:
        powered = power_scalars(format, rule), powers.scalars(format)
        return power_values(array(x), array(out), levels(tile), powered, numbers, seed_keys(seed))
    if rule.two_level:
        ruled = two_level.rule_of(x, format, scales, tensor_scale)
        apart = two_level.apart(format, seed, out.dtype, tensor_scale is not None)
        two_level_values(array(x), array(out), levels(tile), ruled, apart, numbers, cuts, seed_keys(seed))
        return True
    stored: Any = np.empty(x.numel() // tile.columns, np.float32 if rule.quotient else np.uint16)
    _quantise(x, format, scales, (array(out), numbers, None, cuts, None), stored, None, seed)
    return True


def value_numbers(format: Format, rounding: str) -> tuple[Any, Any]:
    """What elements are rounded to values by: the numbers of a format, or a codebook's cuts."""
    return _numbers(format, rounding)[0], cut_points(format, True)


def power_values(x: Any, out: Any, levels: Any, powered: Any, numbers: Any, keys: Any = None) -> bool:
    """The same of `array`s, where scales are powers of two: by the `power_scalars` and `powers.scalars` of a format."""
    found = np.zeros(-(-x.size // CHUNK), np.uint32)
    _power_values(x.size, x, levels, *powered, found, out, numbers, keys)
    return bool((found & TINY).any())


def two_level_values(
    x: Any, out: Any, levels: Any, ruled: Any, apart: Any, numbers: Any, cuts: Any, keys: Any = None
) -> None:
    """The same of `array`s, where they are of two levels, by what `two_level` gives of the rule."""
    _two_level_values(x.size, x, levels, *ruled, *apart, out, numbers, cuts, keys)


def levels(tile: Tile) -> tuple[np.uint32, ...]:
    """The binary logarithm of a block's size, as the length of a tuple: kernels know it when they are compiled."""
    return (np.uint32(0),) * LEVELS[tile.columns]


def _quantise(
    x: Tensor, element: Format, scales: Scales, target: Any, stored: Any, tensor_scale: Tensor | None, seed: int | None
) -> None:
    rule = scales.rule
    above, largest, keys = levels(scales.tile), np.float32(element.max), seed_keys(seed)
    if rule.exact:
        _power(x.numel(), array(x), stored, above, power_scalars(element, rule), *target, keys)
    elif rule.quotient:
        _absmax(x.numel(), array(x), stored, above, largest, *target, keys)
    elif rule.narrow:
        _absmax_bf16(x.numel(), array(x), stored, above, largest, *target, keys)
    else:
        ruled = two_level.rule_of(x, element, scales, tensor_scale)
        _two_level(x.numel(), array(x), stored, above, *ruled, *two_level.scalars(), *target, keys)


@cache
def _knows(format: Format, rounding: str, rule: Scaling) -> bool:
    if isinstance(format, Codebook):
        nearest = format.bits == 4 and rounding == "nearest_even" and format.ties == "lower"
        return nearest and knows_rule(format, rule) and not rule.exact
    return knows_element(format) and (rule.narrow or knows_rule(format, rule))


@cache
def _numbers(format: Format, rounding: str) -> tuple[Any, Any]:
    if not isinstance(format, Codebook):
        return element_codes.scalars(format, rounding, "saturate")
    values = format.values()
    order = [min(c for c in format.codes() if format.decode(c) == value) for value in values]
    halves = [sum(code << 4 * i for i, code in enumerate(part)) for part in (order[:8], order[8:])]
    return None, None if order == list(range(16)) else (np.uint32(halves[0]), np.uint32(halves[1]))


# ---- a chunk -------------------------------------------------------------------------------------------------------


@Kernel
def _power(x, stored, levels, rule, out, numbers, codes, cuts, shifts, seed):
    for chunk in numba.prange((x.size + CHUNK - 1) // CHUNK):
        a = chunk * CHUNK
        b = min(a + CHUNK, x.size)
        amax = block_maxima(x[a:b], len(levels))
        bits = np.empty(amax.size, np.uint32)
        power_scales(amax, stored[a >> len(levels) : b >> len(levels)], bits, rule)
        part = place(out, a, b, shifts)
        divided(x[a:b], bits, levels, part, numbers, codes, cuts, chunk_keys(seed, chunk))
        pack(part, out, a, b, shifts)


@inner
def _stepped(x, shift, levels, out, steps):
    block = 1 << len(levels)
    for b in range(shift.size):
        s = shift[b]
        start = b * block
        for i in range(block):
            j = start + i
            out[j] = stepped(x[j], s, steps, out[j])


@Kernel
def _power_values(x, levels, rule, steps, found, out, numbers, seed):
    for chunk in numba.prange((x.size + CHUNK - 1) // CHUNK):
        a = chunk * CHUNK
        b = min(a + CHUNK, x.size)
        largest = largest_stored(x[a:b], len(levels))
        scale, shift = np.empty(largest.size, np.uint32), np.empty(largest.size, np.uint32)
        noted = note_scales(largest, rule, steps, scale, shift)
        found[chunk] = noted
        if seed is not None:
            divided(x[a:b], scale, levels, out[a:b], numbers, None, None, chunk_keys(seed, chunk))
        elif noted & FAR:
            divided(x[a:b], scale, levels, out[a:b], numbers, None, None, None)
        else:
            _stepped(x[a:b], shift, levels, out[a:b], steps)


@Kernel
def _absmax(x, stored, levels, largest, out, numbers, codes, cuts, shifts, seed):
    for chunk in numba.prange((x.size + CHUNK - 1) // CHUNK):
        a = chunk * CHUNK
        b = min(a + CHUNK, x.size)
        amax = block_maxima(x[a:b], len(levels))
        scale = stored[a >> len(levels) : b >> len(levels)]
        absmax_scales(amax, scale, largest)
        part = place(out, a, b, shifts)
        divided(x[a:b], scale, levels, part, numbers, codes, cuts, chunk_keys(seed, chunk))
        pack(part, out, a, b, shifts)


@Kernel
def _absmax_bf16(x, stored, levels, largest, out, numbers, codes, cuts, shifts, seed):
    for chunk in numba.prange((x.size + CHUNK - 1) // CHUNK):
        a = chunk * CHUNK
        b = min(a + CHUNK, x.size)
        amax = block_maxima(x[a:b], len(levels))
        scale = np.empty(amax.size, np.float32)
        narrow_scales(amax, stored[a >> len(levels) : b >> len(levels)], scale, largest)
        part = place(out, a, b, shifts)
        divided(x[a:b], scale, levels, part, numbers, codes, cuts, chunk_keys(seed, chunk))
        pack(part, out, a, b, shifts)


@Kernel
def _two_level(x, stored, levels, whole, rule, up, scale_numbers, scale_codes, out, numbers, codes, cuts, shifts, seed):
    for chunk in numba.prange((x.size + CHUNK - 1) // CHUNK):
        a = chunk * CHUNK
        b = min(a + CHUNK, x.size)
        amax = block_maxima(x[a:b], len(levels))
        divisor, scale = np.empty(amax.size, np.float32), np.empty(amax.size, np.float32)
        tile_scales(amax, divisor, scale, whole, rule, up)
        note_codes(scale, stored[a >> len(levels) : b >> len(levels)], scale_numbers, scale_codes)
        part = place(out, a, b, shifts)
        divided(x[a:b], divisor, levels, part, numbers, codes, cuts, chunk_keys(seed, chunk))
        pack(part, out, a, b, shifts)


@Kernel
def _two_level_values(x, levels, whole, rule, up, apart, steps, out, numbers, cuts, seed):
    for chunk in numba.prange((x.size + CHUNK - 1) // CHUNK):
        a = chunk * CHUNK
        b = min(a + CHUNK, x.size)
        amax = block_maxima(x[a:b], len(levels))
        divisor, scale = np.empty(amax.size, np.float32), np.empty(amax.size, np.float32)
        tile_scales(amax, divisor, scale, whole, rule, up)
        keys = chunk_keys(seed, chunk)
        if apart is None:
            divided(x[a:b], divisor, levels, out[a:b], numbers, None, cuts, keys)
        else:
            divided_apart(x[a:b], divisor, scale, levels, out[a:b], numbers, steps, cuts, keys)
