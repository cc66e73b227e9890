"""Tiles of several rows, squares and pieces of columns, rounded to values where they lie or in a transposed matrix.

A panel is the rows of a tile; lanes run along them (strips). What a product needs of an operand whose shared
dimension is its first are tiles of the transposed view: the matrix is read as it lies, and its columns are written as
rows, without a transposed copy of the input, which takes as long as the rounding. The last tiles may be short. Noise is
that of what is written, row by row. Where there are signs a piece is rotated first: its rows are those of a block.
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


_WIDTH = 512  # columns of a panel that a thread takes at a time: 16 rows of them lie in the nearest cache
_DEEP = 64  # rows of those, of tiles that are not higher
_TALL = 512  # rows of those that it writes as columns: the results go to few rows, and fill whole lines of the cache
_WIDE = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_TALLEST = 256
_ROW = 32  # elements of a whole row, of the transposed view, that are rounded at a time


def numbers_of(quantizer: Quantizer) -> Any:
    """What `run_values` rounds elements by; None where it does not form the values of these tiles."""
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
    """Write what x, rounded in these tiles, stands for to `out`: as `blocks.run_values`. None where it is not done
    here: it takes contiguous CPU tensors of one shape, apart in memory, that are not empty."""
    numbers, scales = numbers_of(quantizer), quantizer.scales
    dense = x.dim() and x.numel() and x.shape == out.shape and blocks.takes_values(x, out)
    if numbers is None or scales is None or not dense:
        return None
    (_, columns), tile = matrix_shape(tuple(x.shape)), scales.tile
    ruled, apart = blocks.ruled_of(x, out, quantizer, seed, tensor_scale)
    sides = (max(_DEEP // tile.rows, 1) * tile.rows, _WIDTH), (tile.rows, tile.columns)
    small = round_tiles(x, columns, sides, None, ruled, apart, out, None, numbers, seed)
    return small or scales.rule.two_level


def run_view(x: Tensor, out: Tensor, quantizer: Quantizer) -> bool | None:
    """Write what x, a matrix's transposed view, rounded in blocks of its rows or rows of 32s, stands for to `out`.

    Returns whether some may be below 2^-126, but not 0. None where it is not done here: it takes scales that are powers
    of two, to nearest.
    """
    format, scales = quantizer.format, quantizer.scales
    if scales is None or quantizer.rounding != "nearest_even" or not scales.rule.exact:
        return None
    if x.dim() != 2 or not x.numel() or x.shape != out.shape or x.shape[1] % (scales.tile.columns or _ROW):
        return None
    values = blocks.values_of(quantizer, x.shape[1])
    if values is None or not blocks.takes_values(x.t(), out):
        return None
    known = None
    if scales.tile == ROW:
        found = rows.run_amax(x.t(), None, 0)
        assert found is not None
        known = array(found)
    high, ruled = scales.tile.columns or _ROW, blocks.ruled_by(format, scales.rule, values=True)
    sides = (_TALL, WIDTH), (high, 1)
    turn = (np.uint32(0),) * (high.bit_length() - 1)
    return round_tiles(x.t(), x.shape[0], sides, known, ruled, None, out, turn, values[0], None)


def round_tiles(
    x: Tensor, columns: int, sides: Any, known: Any, ruled: Any, apart: Any, out: Tensor, turn: Any, numbers: Any,
    seed: Seed | None, rotation: Any = blocks.UPRIGHT,
) -> bool:  # fmt: skip
    """The same by what the functions here, and `_round_strip`, take of tiles, a rule and a format.

    Args:
        x: in rows of so many columns.
        sides: the rows and columns that a thread takes at a time; those of a tile.
        rotation: `rotated.rotation`, down the columns; its blocks are as high as what a thread takes.
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
        if turn is not None and known is None:  # the next rows go on with the same lines
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
# Maxima are taken down the columns, where no register has to be turned, and those of a tile across them; then each
# column has its scale beside it. Indices are unsigned, and loops over rows stand beside those over columns: numba then
# knows that an index does not count from the end, makes no array for each row, and the loops vectorise.


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
    """Elements `start` to `stop` of a row, the first of which is number `place` of its chunk."""
    for i in range(np.uintp(start), np.uintp(stop)):
        j, k, index = np.uintp(first) + i, np.uintp(to) + i, np.uintp(place) + i
        out[k] = rounded(x[j], divisor[i], each(scale, i), steps, numbers, None, None, keys, index, out[k])


@inner
def _noisy(x, first, stride, tall, size, divisor, scale, steps, out, to, step, numbers, seed):
    """Rows whose noise is that of `out` as it lies: with other keys from the next chunk on."""
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
    """Round the columns to `out`: rows that are `step` apart, or, where there is a `turn`, columns, without noise."""
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
    """The largest magnitude of each tile, as it is stored; what a short tile lacks is 0."""
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
    """The number of its tile beside each column."""
    if wide == 1:
        return numbers
    spread = np.empty(numbers.size * wide, numbers.dtype)
    for t in range(numbers.size):
        spread[t * wide : (t + 1) * wide] = numbers[t]
    return spread


@specialized_inlined
def _held(turn, count, out):
    """In kernels: room for columns before they are turned; None where they are not."""
    return (lambda turn, count, out: None) if none(turn) else lambda turn, count, out: np.empty(count, out.dtype)


@inner
def _round_strip(
    x, first, stride, tall, size, tile, known, rule, whole, up, steps, apart, out, to, step, turn, numbers, seed
):
    """Round `size` columns of `tall` rows, from x at `first`, by tiles of `tile` rows and columns; what was noted.

    Args:
        known: the largest magnitude of each tile, of one that is as high as the matrix; or None.
        rule, whole, up, steps: as `rules` takes them.
        apart: None where values are to have the tensor's scale of two levels.
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
