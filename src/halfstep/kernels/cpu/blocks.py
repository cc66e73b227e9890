"""Blocks of a row that share a scale, to packed codes and scales or to values: `quant.Quantizer`, bit for bit.

One pass, chunk by chunk: block maxima, scales, then every element over its scale, rounded. Only NVFP4 reads its tensor
twice, as the scale of the whole comes first.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from halfstep.formats import Codebook, Format
from halfstep.kernels.cpu import element_codes, packing, powers
from halfstep.kernels.cpu.arrays import array, plain, separate
from halfstep.kernels.cpu.compiled import CHUNK, Kernel, inner
from halfstep.kernels.cpu.divided import divided
from halfstep.kernels.cpu.element_codes import cut_points
from halfstep.kernels.cpu.noise import chunk_keys, seed_keys
from halfstep.kernels.cpu.packing import pack, place
from halfstep.kernels.cpu.powers import FAR, TINY, note_scales, stepped
from halfstep.kernels.cpu.scales import (
    TWO_LEVEL_ROOM,
    absmax_scales,
    block_maxima,
    block_scale_scalars,
    knows_rule,
    larger_finite,
    largest_stored,
    narrow_scales,
    note_block_maxima,
    power_scalars,
    power_scales,
    two_level_scales,
)
from halfstep.kernels.cpu.scales import knows as knows_element
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


def run_values(x: Tensor, out: Tensor, format: Format, rounding: str, scales: Scales, seed: int | None) -> bool:
    """Write what x, rounded in these blocks, stands for to `out`, without making its codes.

    Returns whether some may be below 2^-126, but not 0: True where nobody looked.
    """
    tile, rule = scales.tile, scales.rule
    numbers = _numbers(format, rounding)[0]
    if rounding == "nearest_even" and rule.exact:
        powered, steps = power_scalars(format, rule), powers.scalars(format)
        found = np.zeros(-(-x.numel() // CHUNK), np.uint32)
        _power_values(x.numel(), array(x), levels(tile), powered, steps, found, array(out), numbers)
        return bool((found & TINY).any())
    target = (array(out), numbers, None, cut_points(format, True), None)
    kind = np.float32 if rule.quotient else np.uint16 if rule.narrow else np.uint8
    stored: Any = np.empty(x.numel() // tile.columns, kind)
    _quantise(x, format, scales, target, stored, None, seed)
    return True


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
        amax = np.empty(x.numel() >> len(above), np.uint32)
        worst = np.zeros(-(-x.numel() // CHUNK), np.uint32)
        _maxima(x.numel(), array(x), amax, above, worst)
        whole = worst.max(initial=0).view(np.float32) / (TWO_LEVEL_ROOM * largest)
        whole = whole if whole > 0 else np.float32(1)
        if tensor_scale is not None:
            tensor_scale.fill_(float(whole))
        _two_level(x.numel(), array(x), stored, above, (largest, whole), amax, *_E4M3, *target, keys)


_E4M3 = block_scale_scalars()


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


@inner
def _note_largest(amax, worst):
    largest = np.uint32(0)
    for i in range(amax.size):
        largest = larger_finite(largest, amax[i])
    worst[0] = largest


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
def _power_values(x, levels, rule, steps, found, out, numbers):
    for chunk in numba.prange((x.size + CHUNK - 1) // CHUNK):
        a = chunk * CHUNK
        b = min(a + CHUNK, x.size)
        largest = largest_stored(x[a:b], len(levels))
        scale, shift = np.empty(largest.size, np.uint32), np.empty(largest.size, np.uint32)
        noted = note_scales(largest, rule, steps, scale, shift)
        found[chunk] = noted
        if noted & FAR:
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
def _maxima(x, amax, levels, worst):
    for chunk in numba.prange((x.size + CHUNK - 1) // CHUNK):
        a = chunk * CHUNK
        b = min(a + CHUNK, x.size)
        part = amax[a >> len(levels) : b >> len(levels)]
        note_block_maxima(x[a:b], len(levels), part)
        _note_largest(part, worst[chunk : chunk + 1])


@Kernel
def _two_level(
    x, stored, levels, whole, amax, block_numbers, block_codes, block_decoding,
    out, numbers, codes, cuts, shifts, seed,
):  # fmt: skip
    for chunk in numba.prange((x.size + CHUNK - 1) // CHUNK):
        a = chunk * CHUNK
        b = min(a + CHUNK, x.size)
        c, d = a >> len(levels), b >> len(levels)
        multiplier = np.empty(d - c, np.float32)
        two_level_scales(amax[c:d], stored[c:d], multiplier, whole, block_numbers, block_codes, block_decoding)
        part = place(out, a, b, shifts)
        divided(x[a:b], multiplier, levels, part, numbers, codes, cuts, chunk_keys(seed, chunk))
        pack(part, out, a, b, shifts)
