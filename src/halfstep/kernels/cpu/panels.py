"""Quantization to values in tiles of several rows, squares and pieces of columns, written in place or transposed.

A panel is the rows of a tile; lanes run along them (strips). A matmul whose operand's shared dimension is its first
needs tiles of the transposed view: the matrix is read as it is, and its columns are written as rows, without a
transposed copy of the input, which would take as long as the rounding. The last tiles may be short. Noise is indexed by
position in the output. If signs are given a piece is rotated first: its rows are those of a block.
"""

from typing import Any

import numba
import numpy as np
from torch import Tensor

from halfstep.kernels.cpu import blocks, rows
from halfstep.kernels.cpu.arrays import array
from halfstep.kernels.cpu.compiled import CHUNK, Kernel, each, inner, inner_inlined, none, piece, specialized_inlined
from halfstep.kernels.cpu.divided import rounded
from halfstep.kernels.cpu.noise import chunk_keys, seed_keys
from halfstep.kernels.cpu.rotated import WIDTH, opened
from halfstep.kernels.cpu.rules import FAR, TINY, note, room, steps_of
from halfstep.kernels.cpu.runs import transpose
from halfstep.kernels.cpu.scales import larger_stored, largest_stored
from halfstep.quant.quantizer import Quantizer, matrix_shape
from halfstep.quant.rounding import Seed
from halfstep.quant.tile import ROW


_WIDTH = 512  # columns of a panel that a thread takes at a time: 16 rows of them fit the L1 cache
_DEEP = 64  # rows that a thread takes at a time, where tiles are not higher
_TALL = 512  # rows that it takes to write as columns: results go to few rows and fill whole cache lines
_WIDE = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_TALLEST = 256
_ROW = 32  # elements of a row of the transposed view that are rounded at a time, where the row is one tile


def constants(quantizer: Quantizer) -> Any:
    """The constants with which `run_values` rounds elements; None where it does not support these tiles."""
    scales = quantizer.scales
    if scales is None or quantizer.outliers is not None or not (scales.rule.exact or scales.rule.two_level):
        return None
    high, wide = scales.tile.rows, scales.tile.columns
    cut = 1 <= high <= _TALLEST and wide in _WIDE and high * wide > 1
    found = blocks.element_numbers(quantizer.format, quantizer.rounding, scales.rule) if cut else None
    return None if found is None else found[0]


def run_values(
    x: Tensor, out: Tensor, quantizer: Quantizer, seed: Seed | None, tensor_scale: Tensor | None = None
) -> bool | None:
    """Write x, quantized and dequantized, to `out`, as `blocks.run_values`. None where no kernel supports it: both must
    be contiguous CPU tensors of one shape and different storages, and not empty."""
    numbers, scales = constants(quantizer), quantizer.scales
    dense = x.dim() and x.numel() and x.shape == out.shape and blocks.takes_values(x, out)
    if numbers is None or scales is None or not dense:
        return None
    (_, columns), tile = matrix_shape(tuple(x.shape)), scales.tile
    ruled, apart = blocks.tensor_rule_arguments(x, out, quantizer, seed, tensor_scale)
    sides = (max(_DEEP // tile.rows, 1) * tile.rows, _WIDTH), (tile.rows, tile.columns)
    small = round_tiles(x, columns, sides, None, ruled, apart, out, None, numbers, seed)
    return small or scales.rule.two_level


def run_view(x: Tensor, out: Tensor, quantizer: Quantizer) -> bool | None:
    """Write x, a transposed view of a matrix, quantized and dequantized in blocks of its rows or in whole rows, to
    `out`.

    Returns whether nonzero values below 2^-126 may occur. None where no kernel supports it: scales must be powers of
    two, and rounding to nearest.
    """
    format, scales = quantizer.format, quantizer.scales
    if scales is None or quantizer.rounding != "nearest_even" or not scales.rule.exact:
        return None
    if x.dim() != 2 or not x.numel() or x.shape != out.shape or x.shape[1] % (scales.tile.columns or _ROW):
        return None
    values = blocks.value_constants(quantizer, x.shape[1])
    if values is None or not blocks.takes_values(x.t(), out):
        return None
    known = None
    if scales.tile == ROW:
        found = rows.run_amax(x.t(), None, 0)
        assert found is not None
        known = array(found)
    high, ruled = scales.tile.columns or _ROW, blocks.rule_arguments(format, scales.rule, values=True)
    sides = (_TALL, WIDTH), (high, 1)
    turn = (np.uint32(0),) * (high.bit_length() - 1)
    return round_tiles(x.t(), x.shape[0], sides, known, ruled, None, out, turn, values[0], None)


def round_tiles(
    x: Tensor, columns: int, sides: Any, known: Any, ruled: Any, apart: Any, out: Tensor, turn: Any, numbers: Any,
    seed: Seed | None, rotation: Any = blocks.UPRIGHT,
) -> bool:  # fmt: skip
    """`run_values` or `run_view` with the constants that this file and `_round_strip` take for tiles, a rule and a
    format.

    Args:
        x: with rows of that many columns.
        sides: the rows and columns that a thread takes at a time; those of a tile.
        rotation: `rotated.rotation`, along the columns; its blocks are as high as the rows that a thread takes.
    """
    (tall, width), tile = sides
    high, step = x.numel() // columns, out.shape[-1]
    found = np.zeros(-(-high // tall) * -(-columns // width), np.uint32)
    how = known, *ruled, apart, array(out), step, turn, numbers, seed_keys(seed)
    _panels(x.numel(), array(x), columns, tall, width, *rotation, tile, found, *how)
    return bool((found & TINY).any())


@Kernel
def _panels(
    x, columns, tall, width, signs, norm, levels, part, tile, found, known, rule, whole, up, steps, apart, out, step,
    turn, numbers, seed,
):  # fmt: skip
    rows, across = x.size // columns, (columns + width - 1) // width
    for i in numba.prange(found.size):
        row, a = i // across * tall, i % across * width
        if turn is not None and known is None:  # rows vary fastest, so that the next ones continue the same cache lines
            row, a = i % (found.size // across) * tall, i // (found.size // across) * width
        size = min(width, columns - a)
        to = row * step + a if turn is None else a * step + row
        own = piece(known, a, a + size)
        source, start, stride, deep = opened(x, rows, columns, row, a, tall, size, signs, norm, levels, part)
        found[i] = _round_strip(
            source, start, stride, deep, size, tile, own, rule, whole, up, steps, apart, out, to, step, turn, numbers,
            seed,
        )  # fmt: skip


# ---- strips ----------------------------------------------------------------------------------------------------------
# Maxima are taken along columns, which needs no shuffles, and then across the columns of a tile; then each column gets
# its tile's scale. Indices are unsigned, and the loop over rows is in the same function as the loop over columns: so
# numba knows that an index does not count from the end, makes no array per row, and the loops vectorise.


# ---- elements ------------------------------------------------------------------------------------------------------


@inner
def _strip(x, first, stride, tall, size, divisor, scale, steps, out, to, step, numbers):
    for r in range(np.uintp(tall)):
        row, at = np.uintp(first) + r * np.uintp(stride), np.uintp(to) + r * np.uintp(step)
        for i in range(np.uintp(size)):
            s = each(scale, i)
            out[at + i] = rounded(x[row + i], divisor[i], s, steps, numbers, None, None, None, i, out[at + i])


@inner
def _noisy_row(x, first, start, stop, divisor, scale, steps, out, to, numbers, keys, place):
    """Round elements `start` to `stop` of a row, the first of which is element `place` of its noise chunk."""
    for i in range(np.uintp(start), np.uintp(stop)):
        j, k, index = np.uintp(first) + i, np.uintp(to) + i, np.uintp(place) + i
        out[k] = rounded(x[j], divisor[i], each(scale, i), steps, numbers, None, None, keys, index, out[k])


@inner
def _noisy(x, first, stride, tall, size, divisor, scale, steps, out, to, step, numbers, seed):
    """Round rows with the noise of their position in `out`, whose keys change from one chunk to the next."""
    for r in range(tall):
        row, at = first + r * stride, to + r * step
        chunk = at // CHUNK
        cut = min(size, (chunk + 1) * CHUNK - at)
        keys, place = chunk_keys(seed, chunk), at - chunk * CHUNK
        _noisy_row(x, row, 0, cut, divisor, scale, steps, out, at, numbers, keys, place)
        if cut < size:
            keys = chunk_keys(seed, chunk + 1)
            _noisy_row(x, row, cut, size, divisor, scale, steps, out, at, numbers, keys, -cut)


@inner_inlined
def _write(x, first, stride, tall, size, divisor, scale, steps, values, out, to, step, turn, numbers, seed):
    """Round columns to `out`: as rows that are `step` apart, or, with `turn`, transposed, without noise."""
    if turn is not None:
        _strip(x, first, stride, tall, size, divisor, scale, steps, values, 0, size, numbers)
        transpose(values, turn, out, to, step)
    elif seed is not None:
        _noisy(x, first, stride, tall, size, divisor, scale, steps, out, to, step, numbers, seed)
    else:
        _strip(x, first, stride, tall, size, divisor, scale, steps, out, to, step, numbers)


# ---- tiles ---------------------------------------------------------------------------------------------------------


@inner
def _maxima(x, first, stride, tall, size, wide, largest):
    """The amax of each tile, as stored; columns missing from a short tile count as 0."""
    for i in range(np.uintp(largest.size)):
        largest[i] = 0
    for r in range(np.uintp(tall)):
        row = np.uintp(first) + r * np.uintp(stride)
        for i in range(np.uintp(size)):
            largest[i] = larger_stored(largest[i], x[row + i])
    if wide == 1:
        return largest
    levels = 0
    while 1 << levels < wide:
        levels += 1
    return largest_stored(largest, levels)


@inner_inlined
def _spread(numbers, wide):
    """One value per tile, repeated for each of its columns."""
    if wide == 1:
        return numbers
    spread = np.empty(numbers.size * wide, numbers.dtype)
    for t in range(numbers.size):
        spread[t * wide : (t + 1) * wide] = numbers[t]
    return spread


@specialized_inlined
def _held(turn, count, out):
    """In kernels: a buffer for columns before they are transposed; None where they are not."""
    return (lambda turn, count, out: None) if none(turn) else lambda turn, count, out: np.empty(count, out.dtype)


@inner
def _round_strip(
    x, first, stride, tall, size, tile, known, rule, whole, up, steps, apart, out, to, step, turn, numbers, seed
):
    """Round `size` columns of `tall` rows, from x at `first`, in tiles of `tile` rows and columns; returns the flags of
    `rules.note`.

    Args:
        known: the amax of each tile, where tiles are as high as the matrix; or None.
        rule, whole, up, steps: as `rules` takes them.
        apart: None where values include the tensor's scale of two levels.
        out, to, step, turn: as `_write` takes them.
    """
    high, wide = tile
    largest = np.empty((size + wide - 1) // wide * wide, x.dtype)
    divisor, beside = room(largest.size // wide, whole, None)
    values, found = _held(turn, size * high, out), np.uint32(0)
    if known is not None:
        found = note(known, rule, whole, up, steps, None, None, divisor, beside)
    for r in range(0, tall, high):
        start, deep, noted = first + r * stride, min(high, tall - r), found
        at = to + r * step if turn is None else to + r
        if known is None:
            maxima = _maxima(x, start, stride, deep, size, wide, largest)
            noted = note(maxima, rule, whole, up, steps, None, None, divisor, beside)
            found |= noted
        if apart is not None:
            over, by = _spread(divisor, wide), _spread(beside, wide)
            _write(x, start, stride, deep, size, over, by, steps_of(apart), values, out, at, step, turn, numbers, seed)
        elif steps is None or seed is not None or noted & FAR:
            over = _spread(divisor, wide)
            _write(x, start, stride, deep, size, over, None, None, values, out, at, step, turn, numbers, seed)
        else:
            shift = _spread(beside, wide)
            _write(x, start, stride, deep, size, shift, None, steps, values, out, at, step, turn, numbers, None)
    return found
