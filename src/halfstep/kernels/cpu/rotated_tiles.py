"""Rotated, scaled and rounded in one pass: `rotated`, and then `blocks` or `panels`, bit for bit.

A piece is rotated while it is near, and its tiles are rounded from where they lie: nothing is written in float32. With
two levels of scales everything is rotated twice, since the largest number of all comes first.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from torch import Tensor

from halfstep.formats import Codebook
from halfstep.kernels.cpu import element_codes, powers, rotated, two_level
from halfstep.kernels.cpu.arrays import array, plain
from halfstep.kernels.cpu.blocks import LEVELS
from halfstep.kernels.cpu.columns import transpose
from halfstep.kernels.cpu.compiled import CHUNK, Kernel, inner, inner_optimised
from halfstep.kernels.cpu.divided import divided, element, element_apart
from halfstep.kernels.cpu.lanes import MAGNITUDE, bits_of, lanes
from halfstep.kernels.cpu.noise import chunk_keys, seed_keys
from halfstep.kernels.cpu.powers import FAR, TINY, note_scales, stepped
from halfstep.kernels.cpu.rotated import LANES, WIDTH, signed_panel, signed_piece, transform, transform_down
from halfstep.kernels.cpu.scales import knows, knows_rule, larger, largest_stored, power_scalars
from halfstep.kernels.cpu.two_level import tile_scales
from halfstep.quant.quantizer import Quantizer
from halfstep.quant.scaling.two_level import TwoLevel


_PIECE = 512


def supports(x: Tensor, signs: Tensor, dim: int, quantizer: Quantizer, dtype: torch.dtype) -> bool:
    """Whether the functions here rotate the matrix `x` along `dim` and round it to values of that dtype: by tiles of a
    row, or of a column, that lie along the rotation and are no longer than its blocks."""
    if quantizer.scales is None or quantizer.outliers is not None or isinstance(quantizer.format, Codebook):
        return False
    tile, rule = quantizer.scales.tile, quantizer.scales.rule
    along, across = (tile.columns, tile.rows) if dim == 1 else (tile.rows, tile.columns)
    return (
        x.dim() == 2
        and rotated.supports(x, signs, dim)
        and across == 1
        and along in LEVELS
        and along <= len(signs)
        and quantizer.rounding in ("nearest_even", "stochastic")
        and knows(quantizer.format)
        and (rule.exact or (rule.two_level and dim == 0))
        and knows_rule(quantizer.format, rule)
        and dtype in (torch.float32, torch.bfloat16)
        and plain(signs, torch.float32)
    )


def run_powers(
    x: Tensor, signs: Tensor, dim: int, quantizer: Quantizer, seed: int | None, part: float, dtype: torch.dtype
) -> tuple[Tensor, bool]:
    """That `part` of the rotated matrix, rounded by scales that are powers of two; along dim 0 the transposed view of
    what is written row by row. And whether some values may be below 2^-126, but not 0."""
    (rows, columns), size, scales = x.shape, len(signs), quantizer.scales
    assert scales is not None
    shape = [columns, -(-rows // size) * size] if dim == 0 else [rows, -(-columns // size) * size]
    out = torch.empty(shape, dtype=dtype, device="cpu")
    pieces = -(-rows // size) * -(-columns // WIDTH) if dim == 0 else -(-rows // LANES)
    found = np.zeros(pieces, np.uint32)
    ruled = power_scalars(quantizer.format, scales.rule), powers.scalars(quantizer.format)
    numbers: Any = element_codes.scalars(quantizer.format, quantizer.rounding, "saturate")[0]
    tiles = (np.uint32(0),) * LEVELS[max(scales.tile.rows, scales.tile.columns)]
    kernel = _down if dim == 0 else _along
    kernel(x.numel(), *_given(x, signs), np.float32(part), tiles, *ruled, found, array(out), numbers, seed_keys(seed))
    return out.t() if dim == 0 else out, bool((found & TINY).any())


def tensor_scale(x: Tensor, signs: Tensor, quantizer: Quantizer) -> Tensor | None:
    """The tensor's scale, of two levels, for the matrix rotated along dim 0. None where some number is not finite:
    then it is that of the tiles that are."""
    assert quantizer.scales is not None
    rule = quantizer.scales.rule
    assert isinstance(rule, TwoLevel)
    found = torch.empty(-(-x.shape[0] // len(signs)) * -(-x.shape[1] // WIDTH), dtype=torch.float32, device="cpu")
    _down_amax(x.numel(), *_given(x, signs), array(found))
    largest = found.max()
    return rule.tensor_scale(largest, quantizer.format) if bool(largest.isfinite()) else None


def run_two_levels(
    x: Tensor, signs: Tensor, quantizer: Quantizer, seed: int | None, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """The matrix rotated along dim 0 and rounded, over the tensor's scale, which is a float32 scalar."""
    (rows, columns), scales = x.shape, quantizer.scales
    assert scales is not None
    assert isinstance(scales.rule, TwoLevel)
    out = torch.empty(-(-rows // len(signs)) * len(signs), columns, dtype=dtype, device="cpu")
    numbers: Any = element_codes.scalars(quantizer.format, quantizer.rounding, "saturate")[0]
    ruled = scales.tile.rows, *two_level.given(quantizer.format, scales.rule, scale)
    steps = two_level.apart(quantizer.format, seed, out.dtype, True)[1]
    _down_two(x.numel(), *_given(x, signs), *ruled, steps, array(out), numbers, seed_keys(seed))
    return out


def _given(x: Tensor, signs: Tensor) -> Any:
    size = len(signs)
    levels = (np.uint32(0),) * rotated.LEVELS[size]
    return array(x), *x.shape, array(signs), np.float32(math.sqrt(1 / size)), levels


# ---- a run of whole tiles, which lie one after another -------------------------------------------------------------


@lanes(types.float32)
def _share(value, part):
    return value * part


@inner
def _multiply(x, part):
    for i in range(x.size):
        x[i] = _share(x[i], part)


@inner_optimised
def _noisy(x, scale, tiles, out, numbers, keys, place):
    block = 1 << len(tiles)
    for b in range(scale.size):
        s = scale[b]
        start = b * block
        for i in range(block):
            j = start + i
            out[j] = element(x[j], s, numbers, None, None, keys, place + j, out[j])


@inner
def _stepped_tiles(x, shift, tiles, out, steps):
    block = 1 << len(tiles)
    for b in range(shift.size):
        s = shift[b]
        start = b * block
        for i in range(block):
            j = start + i
            out[j] = stepped(x[j], s, steps, out[j])


@inner
def _round(x, scale, shift, far, tiles, steps, out, to, numbers, seed):
    """Write tiles to `out` from `to` on, which counts for their noise: that has other keys from the next chunk on."""
    if seed is None:
        if far:
            divided(x, scale, tiles, out[to : to + x.size], numbers, None, None, None)
        else:
            _stepped_tiles(x, shift, tiles, out[to : to + x.size], steps)
    else:
        chunk = to // CHUNK
        cut = min(x.size, (chunk + 1) * CHUNK - to)
        few = cut >> len(tiles)
        place = to - chunk * CHUNK
        _noisy(x[:cut], scale[:few], tiles, out[to : to + cut], numbers, chunk_keys(seed, chunk), place)
        if cut < x.size:
            keys = chunk_keys(seed, chunk + 1)
            _noisy(x[cut:], scale[few:], tiles, out[to + cut : to + x.size], numbers, keys, 0)


@Kernel
def _along(x, rows, columns, signs, scale, levels, part, tiles, rule, steps, found, out, numbers, seed):
    size = 1 << len(levels)
    wide = (columns + size - 1) // size * size
    for panel in numba.prange(found.size):
        held = np.empty(_PIECE, np.float32)
        powered, shift = np.empty(_PIECE >> len(tiles), np.uint32), np.empty(_PIECE >> len(tiles), np.uint32)
        for row in range(panel * LANES, min(panel * LANES + LANES, rows)):
            for start in range(0, columns, _PIECE):
                count = min(columns - start, _PIECE)
                filled = signed_piece(x, row * columns + start, count, signs, levels, held)
                for block in range(0, filled, size):
                    transform(held, block, scale, held, block, levels)
                _multiply(held[:filled], part)
                bits, few = held[:filled].view(np.uint32), filled >> len(tiles)
                largest = largest_stored(bits, len(tiles))
                noted = note_scales(largest, rule, steps, powered[:few], shift[:few])
                found[panel] |= noted
                to, far = row * wide + start, (noted & FAR) > 0
                _round(bits, powered[:few], shift[:few], far, tiles, steps, out, to, numbers, seed)


# ---- down the columns ----------------------------------------------------------------------------------------------


@inner
def _panel(x, rows, columns, row, a, width, signs, scale, levels):
    """`size` rows of a rotated piece from `row` and column `a` on, each `WIDTH` numbers from the next."""
    size = 1 << len(levels)
    held = np.zeros(size * WIDTH, np.float32)
    signed_panel(x, row * columns + a, columns, min(size, rows - row), size, width, signs, held)
    for i in range(0, width, LANES):
        transform_down(held, i, WIDTH, scale, held, i, WIDTH, levels)
    return held


# A column of a piece is `size` numbers one after another, a whole number of tiles, and a chunk of noise whole columns:
# indices are unsigned, and no slices are made of what is so short.


@inner
def _stepped_columns(x, shift, tiles, levels, steps, out, to, tall):
    """Round the columns of a piece to `out` from `to` on, where each is `tall` numbers from the next."""
    block, each = 1 << len(tiles), 1 << len(levels) - len(tiles)
    for c in range(shift.size >> len(levels) - len(tiles)):
        for b in range(each):
            s = shift[c * each + b]
            start, place = np.uintp((c * each + b) * block), np.uintp(to + c * tall + b * block)
            for i in range(np.uintp(block)):
                out[place + i] = stepped(x[start + i], s, steps, out[place + i])


@inner
def _divided_columns(x, scale, tiles, levels, out, to, tall, numbers, seed):
    """The same by a scale's own arithmetic, with noise where there is a seed."""
    block, each = 1 << len(tiles), 1 << len(levels) - len(tiles)
    for c in range(scale.size >> len(levels) - len(tiles)):
        first = to + c * tall
        keys, within = chunk_keys(seed, first // CHUNK), first % CHUNK
        for b in range(each):
            s = scale[c * each + b]
            start, place = np.uintp((c * each + b) * block), np.uintp(first + b * block)
            index = np.uintp(within + b * block)
            for i in range(np.uintp(block)):
                out[place + i] = element(x[start + i], s, numbers, None, None, keys, index + i, out[place + i])


@Kernel
def _down(x, rows, columns, signs, scale, levels, part, tiles, rule, steps, found, out, numbers, seed):
    size = 1 << len(levels)
    tall, each = (rows + size - 1) // size * size, size >> len(tiles)
    across = (columns + WIDTH - 1) // WIDTH
    for piece in numba.prange(found.size):
        row, a = piece // across * size, piece % across * WIDTH
        width = min(WIDTH, columns - a)
        held = _panel(x, rows, columns, row, a, width, signs, scale, levels)
        _multiply(held, part)
        turned = np.empty(held.size, np.float32)
        transpose(held, levels, turned, 0, size)
        bits = turned[: width * size].view(np.uint32)
        powered, shift = np.empty(width * each, np.uint32), np.empty(width * each, np.uint32)
        noted = note_scales(largest_stored(bits, len(tiles)), rule, steps, powered, shift)
        found[piece] = noted
        to = a * tall + row
        if seed is None and not noted & FAR:
            _stepped_columns(bits, shift, tiles, levels, steps, out, to, tall)
        else:
            _divided_columns(bits, powered, tiles, levels, out, to, tall, numbers, seed)


@lanes(types.uint32)
def _magnitude(most, value):
    return most.max(bits_of(value) & MAGNITUDE)


@inner
def _largest_of(x):
    most = np.uint32(0)
    for i in range(x.size):
        most = _magnitude(most, x[i])
    return most


@Kernel
def _down_amax(x, rows, columns, signs, scale, levels, found):
    across = (columns + WIDTH - 1) // WIDTH
    for piece in numba.prange(found.size):
        row, a = piece // across << len(levels), piece % across * WIDTH
        held = _panel(x, rows, columns, row, a, min(WIDTH, columns - a), signs, scale, levels)
        found[piece] = _largest_of(held)


@inner
def _raise(most, x):
    for i in range(most.size):
        most[i] = larger(most[i], x[i])


@inner
def _apart(x, divisor, scale, steps, out, numbers, keys, place):
    for i in range(x.size):
        out[i] = element_apart(x[i], divisor[i], scale[i], numbers, steps, None, keys, place + i, out[i])


@inner
def _apart_row(x, divisor, scale, steps, out, to, numbers, seed):
    if seed is None:
        _apart(x, divisor, scale, steps, out[to : to + x.size], numbers, None, 0)
    else:
        chunk = to // CHUNK
        cut = min(x.size, (chunk + 1) * CHUNK - to)
        place = to - chunk * CHUNK
        _apart(x[:cut], divisor, scale, steps, out[to : to + cut], numbers, chunk_keys(seed, chunk), place)
        if cut < x.size:
            keys = chunk_keys(seed, chunk + 1)
            _apart(x[cut:], divisor[cut:], scale[cut:], steps, out[to + cut : to + x.size], numbers, keys, 0)


@Kernel
def _down_two(x, rows, columns, signs, scale, levels, high, whole, rule, up, steps, out, numbers, seed):
    size, across = 1 << len(levels), (columns + WIDTH - 1) // WIDTH
    for piece in numba.prange((rows + size - 1) // size * across):
        row, a = piece // across * size, piece % across * WIDTH
        width = min(WIDTH, columns - a)
        bits = _panel(x, rows, columns, row, a, width, signs, scale, levels).view(np.uint32)
        divisor, stored = np.empty(width, np.float32), np.empty(width, np.float32)
        for first in range(0, size, high):
            amax = np.zeros(width, np.uint32)
            for r in range(first, first + high):
                _raise(amax, bits[r * WIDTH : r * WIDTH + width])
            tile_scales(amax, divisor, stored, whole, rule, up)
            for r in range(first, first + high):
                own, to = bits[r * WIDTH : r * WIDTH + width], (row + r) * columns + a
                _apart_row(own, divisor, stored, steps, out, to, numbers, seed)
