"""Tiles side by side, rounded to values where lanes run across them: what `panels` does to a part of a matrix.

Maxima are taken down the columns, where no register has to be turned, and those of a tile across them; then each column
has its scale beside it. Indices are unsigned, and loops over rows stand beside those over columns: numba then knows
that an index does not count from the end, makes no array for each row, and the loops vectorise.
"""

from __future__ import annotations

import numpy as np

from halfstep.kernels.cpu.compiled import CHUNK, each, inner, inner_inlined, none, specialized_inlined
from halfstep.kernels.cpu.divided import rounded
from halfstep.kernels.cpu.noise import chunk_keys
from halfstep.kernels.cpu.powers import FAR
from halfstep.kernels.cpu.rules import note, room, steps_of
from halfstep.kernels.cpu.scales import larger_stored, largest_stored
from halfstep.kernels.cpu.turn import transpose


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
def tiles(x, first, stride, tall, size, tile, known, rule, whole, up, steps, apart, out, to, step, turn, numbers, seed):
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
