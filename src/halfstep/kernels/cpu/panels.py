"""Tiles of several rows, squares and pieces of columns, rounded to values where they lie: lanes run along the rows.

A panel is the rows of a tile. Its maxima are taken down the columns, where no register has to be turned, and those of a
tile across them; then each column has its scale beside it. The last tiles may be short. Noise is that of the matrix as
it lies, row by row.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from torch import Tensor

from halfstep.formats import Codebook, Format
from halfstep.kernels.cpu import element_codes, powers, two_level
from halfstep.kernels.cpu.arrays import array
from halfstep.kernels.cpu.blocks import takes_values
from halfstep.kernels.cpu.compiled import CHUNK, Kernel, inner
from halfstep.kernels.cpu.divided import element, element_apart
from halfstep.kernels.cpu.noise import chunk_keys, seed_keys
from halfstep.kernels.cpu.powers import FAR, TINY, note_scales, stepped
from halfstep.kernels.cpu.scales import knows, knows_rule, larger_stored, largest_stored, power_scalars, stored_bits
from halfstep.kernels.cpu.two_level import tile_scales
from halfstep.quant.quantizer import Quantizer, matrix_shape
from halfstep.quant.scales import Scales


_WIDTH = 512  # columns of a panel that a thread takes at a time: 16 rows of them lie in the nearest cache
_WIDE = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_TALLEST = 256


def supports_values(x: Tensor, out: Tensor, quantizer: Quantizer) -> bool:
    """Whether `run_values` can round `x` into `out`: contiguous CPU tensors of one shape, apart in memory."""
    if quantizer.scales is None or quantizer.outliers is not None or isinstance(quantizer.format, Codebook):
        return False
    tile, rule = quantizer.scales.tile, quantizer.scales.rule
    return (
        1 <= tile.rows <= _TALLEST
        and tile.columns in _WIDE
        and tile.rows * tile.columns > 1
        and quantizer.rounding in ("nearest_even", "stochastic")
        and knows(quantizer.format)
        and (rule.exact or rule.two_level)
        and knows_rule(quantizer.format, rule)
        and x.dim() > 0
        and x.numel() > 0
        and x.shape == out.shape
        and takes_values(x, out)
    )


def run_values(
    x: Tensor,
    out: Tensor,
    format: Format,
    rounding: str,
    scales: Scales,
    seed: int | None,
    tensor_scale: Tensor | None = None,
) -> bool:
    """Write what x, rounded in these tiles, stands for to `out`: as `blocks.run_values`."""
    (rows, columns), tile, rule = matrix_shape(tuple(x.shape)), scales.tile, scales.rule
    keys = seed_keys(seed)
    numbers: Any = element_codes.scalars(format, rounding, "saturate")[0]
    found = np.zeros(-(-rows // tile.rows) * -(-columns // _WIDTH), np.uint32)
    matrix = x.numel(), array(x), columns, tile.rows, tile.columns
    if rule.exact:
        powered, steps = power_scalars(format, rule), powers.scalars(format)
        _power(*matrix, powered, steps, found, array(out), numbers, keys)
        return bool((found & TINY).any())
    ruled = two_level.rule_of(x, format, scales, tensor_scale)
    apart = two_level.apart(format, seed, out.dtype, tensor_scale is not None)
    _two_level(*matrix, *ruled, *apart, found, array(out), numbers, keys)
    return True


# ---- a part of a panel ---------------------------------------------------------------------------------------------
# Indices are unsigned, and loops over rows stand beside those over columns: numba then knows that an index does not
# count from the end, makes no array for each row, and the loops vectorise.


@inner
def _maxima(x, first, columns, tall, size, wide):
    """The largest magnitude of each tile, as it is stored; what a short tile lacks is 0."""
    largest = np.zeros((size + wide - 1) // wide * wide, x.dtype)
    for r in range(np.uintp(tall)):
        row = np.uintp(first) + r * np.uintp(columns)
        for i in range(np.uintp(size)):
            largest[i] = larger_stored(largest[i], x[row + i])
    if wide == 1:
        return largest
    levels = 0
    while 1 << levels < wide:
        levels += 1
    return largest_stored(largest, levels)


@inner
def _spread(numbers, wide):
    """The number of its tile beside each column."""
    if wide == 1:
        return numbers
    spread = np.empty(numbers.size * wide, numbers.dtype)
    for t in range(numbers.size):
        spread[t * wide : (t + 1) * wide] = numbers[t]
    return spread


@inner
def _stepped(x, first, columns, tall, size, shift, steps, out):
    for r in range(np.uintp(tall)):
        row = np.uintp(first) + r * np.uintp(columns)
        for i in range(np.uintp(size)):
            out[row + i] = stepped(x[row + i], shift[i], steps, out[row + i])


@inner
def _divided_row(x, row, start, stop, divisor, scale, apart, steps, out, numbers, keys, place):
    """Elements `start` to `stop` of a row, the first of which is number `place` of its chunk."""
    for i in range(np.uintp(start), np.uintp(stop)):
        j = np.uintp(row) + i
        if apart is None:
            out[j] = element(x[j], divisor[i], numbers, None, None, keys, np.uintp(place) + i, out[j])
        else:
            index = np.uintp(place) + i
            out[j] = element_apart(x[j], divisor[i], scale[i], numbers, steps, None, keys, index, out[j])


@inner
def _divided(x, first, columns, tall, size, divisor, scale, apart, steps, out, numbers, seed):
    for r in range(tall):
        row = first + r * columns
        if seed is None:
            _divided_row(x, row, 0, size, divisor, scale, apart, steps, out, numbers, None, 0)
        else:  # noise has other keys from the next chunk on
            chunk = row // CHUNK
            cut = min(size, (chunk + 1) * CHUNK - row)
            keys, place = chunk_keys(seed, chunk), row - chunk * CHUNK
            _divided_row(x, row, 0, cut, divisor, scale, apart, steps, out, numbers, keys, place)
            if cut < size:
                keys = chunk_keys(seed, chunk + 1)
                _divided_row(x, row, cut, size, divisor, scale, apart, steps, out, numbers, keys, -cut)


@Kernel
def _power(x, columns, high, wide, rule, steps, found, out, numbers, seed):
    rows, across = x.size // columns, (columns + _WIDTH - 1) // _WIDTH
    for part in numba.prange(found.size):
        row, a = part // across * high, part % across * _WIDTH
        first, tall, size = row * columns + a, min(high, rows - row), min(_WIDTH, columns - a)
        largest = _maxima(x, first, columns, tall, size, wide)
        scale, shift = np.empty(largest.size, np.uint32), np.empty(largest.size, np.uint32)
        noted = note_scales(largest, rule, steps, scale, shift)
        found[part] = noted
        if seed is not None:
            _divided(x, first, columns, tall, size, _spread(scale, wide), None, None, None, out, numbers, seed)
        elif noted & FAR:
            _divided(x, first, columns, tall, size, _spread(scale, wide), None, None, None, out, numbers, None)
        else:
            _stepped(x, first, columns, tall, size, _spread(shift, wide), steps, out)


@inner
def _to_bits(stored, bits):
    for i in range(stored.size):
        bits[i] = stored_bits(stored[i])


@Kernel
def _two_level(x, columns, high, wide, whole, rule, up, apart, steps, found, out, numbers, seed):
    rows, across = x.size // columns, (columns + _WIDTH - 1) // _WIDTH
    for part in numba.prange(found.size):
        row, a = part // across * high, part % across * _WIDTH
        first, tall, size = row * columns + a, min(high, rows - row), min(_WIDTH, columns - a)
        largest = _maxima(x, first, columns, tall, size, wide)
        amax = np.empty(largest.size, np.uint32)
        _to_bits(largest, amax)
        divisor, scale = np.empty(amax.size, np.float32), np.empty(amax.size, np.float32)
        tile_scales(amax, divisor, scale, whole, rule, up)
        divisor, scale = _spread(divisor, wide), _spread(scale, wide)
        _divided(x, first, columns, tall, size, divisor, scale, apart, steps, out, numbers, seed)
