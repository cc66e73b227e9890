"""Tables of the values in raw bits: float32 counted by exponent and significant bits, narrower formats by code."""

from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from halfstep.kernels.cpu.compiled import Kernel, inner
from halfstep.kernels.cpu.lanes import MAGNITUDE, Lane
from halfstep.kernels.cpu.runs import elementwise


Counts = NDArray[np.int64]

LOWEST = -150
"""Row r of `float32_table` counts the values with exponent floor(log2 |x|) = LOWEST + r; row 0 zeros, the last row
values that are not finite (infinities in column 1)."""
ROWS, COLUMNS = 279, 32
"""Column b counts significands of b bits, 1 to 24; of those with four bits, 15/8 is counted in column `FIFTEEN`
instead."""
FIFTEEN = 31

WIDTH, NARROW = 54, 25
"""Columns of a table: as many as float64's significands need (WIDTH), and as float32's need (NARROW:
`sorted_float32`)."""


class Seen(NamedTuple):
    """What `sorted_float32` returns for a tensor besides its table."""

    zeros: int
    infinities: int
    nans: int
    lowest: int
    """The exponent of the table's first row."""
    magnitudes: int
    """The number of distinct magnitudes."""
    telling: int
    """The number of distinct values that are evidence of a format: neither powers of two nor integers below 2^24."""
    telling_magnitudes: int
    """The number of distinct magnitudes of these."""
    smallest: int
    largest: int
    """The largest magnitude, and `smallest` the smallest above zero, as bits."""


_NUMBERS = len(Seen._fields)
_PIECE = 1024  # elements whose bins are computed, vectorised, before they are counted one by one
_NOT_FINITE = np.uint32(0xFF000000)  # magnitudes from here on, above a bit of sign
_LARGEST = {np.dtype(np.uint8): 0x7F, np.dtype(np.uint16): 0x7FFF, np.dtype(np.uint32): MAGNITUDE}


def supports(bits: NDArray[Any]) -> bool:
    """Whether the functions in this file can count these raw bits: a flat contiguous array of uint8, uint16 or
    uint32."""
    return bits.dtype in _LARGEST and bits.ndim == 1 and bits.flags.c_contiguous


def add_float32(bits: NDArray[np.uint32], table: Counts, ends: NDArray[np.uint32]) -> None:
    """Add float32 values to a (ROWS, COLUMNS) table, and lower ends[0] to their smallest magnitude above zero."""
    parts = _parts(bits.size)
    found = np.zeros((parts, 2, ROWS * COLUMNS), np.uint32)
    smallest = np.full((parts, _PIECE), 0xFFFFFFFF, np.uint32)
    _float32(bits.size, bits, found, smallest)
    table += found.sum((0, 1), dtype=np.int64).reshape(ROWS, COLUMNS)
    ends[0] = min(int(ends[0]), int(smallest.min()) + 1)


def sorted_float32(bits: NDArray[np.uint32], starts: Counts) -> tuple[Counts, Counts, Counts, list[Seen]]:
    """Sort and count the values of several small float32 tensors; `starts` holds where each begins, then the end.

    Returns where each tensor's rows begin, then their end; for all rows, one per exponent, the finite values above zero
    by `NARROW` columns of significant bits; how many of these have the significand 15/8; and a `Seen` per tensor.
    """
    keys = (bits << np.uint32(1)) | (bits >> np.uint32(31))  # by magnitude, then by sign
    if starts.size > 2:
        keys = np.repeat(np.arange(starts.size - 1, dtype=np.uint64) << np.uint64(32), np.diff(starts)) | keys
    *table, numbers = _sorted(0, np.sort(keys).astype(np.uint32, copy=False), starts)
    return *table, [Seen(*row) for row in numbers.tolist()]


def add_codes(bits: NDArray[Any], table: Counts) -> None:
    """Add 8- or 16-bit codes to a table with one entry per code."""
    found = np.zeros((_parts(bits.size), 2, table.size), np.uint32)
    _codes(bits.size, bits, found)
    table += found.sum((0, 1), dtype=np.int64)


def raise_amax(bits: NDArray[Any], first: int, largest: NDArray[Any], infinity: int) -> None:
    """Raise largest[c] to the largest finite magnitude, as bits, of column c of a matrix with `largest.size` columns.

    `bits` are consecutive elements of the matrix, the first of them in column `first`; magnitudes from
    `infinity` on are not finite.
    """
    found = np.zeros((_parts(bits.size), largest.size), largest.dtype)
    kind = largest.dtype.type
    _amax(bits.size, bits, first, found, kind(_LARGEST[largest.dtype]), kind(infinity))
    np.maximum(largest, found.max(0), out=largest)


def column_amax(bits: NDArray[np.uint32], starts: Counts, columns: Counts) -> NDArray[np.uint32]:
    """The largest finite magnitude, as bits, of each column of several float32 matrices, one after the other; `columns`
    is the number of columns of each (0: the matrix is skipped)."""
    ends = np.concatenate([[0], np.cumsum(columns)])
    largest = np.zeros(ends[-1], np.uint32)
    _column_amax(0, bits, starts, largest, ends)
    return largest


def any_bits(bits: NDArray[Any], smallest_normal: int) -> int:
    """The OR of the bits of all values except subnormals, whose low bits are no evidence of the significand's width."""
    found = np.zeros((_parts(bits.size), _PIECE), bits.dtype)
    kind = bits.dtype.type
    _any(bits.size, bits, found, kind(_LARGEST[bits.dtype]), kind(smallest_normal))
    return int(np.bitwise_or.reduce(found, axis=None))


def _parts(size: int) -> int:
    """How many parts the work is split into, each with its own table: the number of threads, where the size justifies
    that."""
    return max(1, min(size >> 18, torch.get_num_threads()))


@elementwise
def _bins(value: Lane) -> Lane:
    magnitude = value & MAGNITUDE
    below = magnitude < 0x00800000
    spread = below.pick(magnitude.value_as_float().bits(), magnitude)  # a subnormal, normalized
    row = (spread >> 23) + below.pick(spread.constant(-126 & 0xFFFFFFFF), 23)
    row = magnitude.equals(0).pick(row.constant(0), row)
    significand = (spread & 0x007FFFFF) | 0x00800000
    last = significand & (significand.constant(0) - significand)
    column = last.constant(127 + 24) - (last.value_as_float().bits() >> 23)
    column = significand.equals(0x00F00000).pick(column.constant(FIFTEEN), column)
    return ((row << 5) | column).to(16)


@elementwise
def _least(out: Lane, value: Lane) -> Lane:
    """The smaller of `out` and the magnitude's bits minus one, so that zero counts as the largest."""
    return ((value & MAGNITUDE) - 1).min(out)


@elementwise
def _most(out: Lane, value: Lane, mask: Lane, infinity: Lane) -> Lane:
    magnitude = value & mask
    return (magnitude < infinity).pick(magnitude, 0).max(out)


@elementwise
def _seen(out: Lane, value: Lane, mask: Lane, smallest: Lane) -> Lane:
    return ((value & mask) < smallest).pick(out, value | out)


@inner
def _tally(bins, counts):
    """Count bins with two counters each, used alternately, so that an addition need not wait for the previous one."""
    one, two = counts[0], counts[1]
    for i in range(0, bins.size - 1, 2):
        one[bins[i]] += np.uint32(1)
        two[bins[i + 1]] += np.uint32(1)
    if bins.size % 2:
        one[bins[bins.size - 1]] += np.uint32(1)


@inner
def _float32_part(x, counts, least):
    bins = np.empty(_PIECE, np.uint16)
    for a in range(0, x.size, _PIECE):
        piece = x[a : a + _PIECE]
        _bins(bins, piece)
        _tally(bins[: piece.size], counts)
        _least(least, piece)


@Kernel
def _sorted(keys, starts):
    tensors = starts.size - 1
    ends, rows = np.zeros((tensors, 2), np.int64), np.zeros(starts.size, np.int64)
    seen = np.zeros((tensors, _NUMBERS), np.int64)
    magnitudes, bins = np.empty(keys.size, np.uint32), np.empty(keys.size, np.uint16)
    for i in range(keys.size):
        magnitudes[i] = keys[i] >> 1
    _bins(bins, magnitudes)
    for t in range(tensors):
        first, stop = starts[t], starts[t + 1]
        while first < stop and keys[first] < 2:
            first += 1
        while stop > first and keys[stop - 1] >= _NOT_FINITE:
            stop -= 1
            seen[t, 1 if keys[stop] <= _NOT_FINITE + 1 else 2] += 1
        seen[t, 0], rows[t + 1], ends[t, 0], ends[t, 1] = first - starts[t], rows[t], first, stop
        if first < stop:
            seen[t, 3], seen[t, 7], seen[t, 8] = LOWEST + (bins[first] >> 5), magnitudes[first], magnitudes[stop - 1]
            rows[t + 1] += (bins[stop - 1] >> 5) - (bins[first] >> 5) + 1
    counts, fifteens = np.zeros((rows[-1], NARROW), np.int64), np.zeros(rows[-1], np.int64)
    for t in range(tensors):
        last, lowest = -1, rows[t] - seen[t, 3]
        for i in range(ends[t, 0], ends[t, 1]):
            exponent, bits = LOWEST + (bins[i] >> 5), bins[i] & 31
            if bits == FIFTEEN:
                fifteens[lowest + exponent] += 1
                bits = 4
            counts[lowest + exponent, bits] += 1
            key = keys[i]
            if key != last:
                tells = bits > 1 and (bits > exponent + 1 or exponent >= 24)
                other = key >> 1 != last >> 1
                seen[t, 4] += other
                seen[t, 5] += tells
                seen[t, 6] += tells and other
                last = key
    return rows, counts, fifteens, seen


@inner
def _amax_part(x, column, most, mask, infinity):
    a = 0
    while a < x.size:
        b = min(x.size, a + most.size - column)
        _most(most[column:], x[a:b], mask, infinity)
        a, column = b, 0


@inner
def _any_part(x, seen, mask, smallest):
    for a in range(0, x.size, _PIECE):
        _seen(seen, x[a : a + _PIECE], mask, smallest)


@Kernel
def _any(x, seen, mask, smallest):
    parts = len(seen)
    for part in numba.prange(parts):
        _any_part(x[x.size * part // parts : x.size * (part + 1) // parts], seen[part], mask, smallest)


@Kernel
def _float32(x, counts, least):
    parts = len(counts)
    for part in numba.prange(parts):
        _float32_part(x[x.size * part // parts : x.size * (part + 1) // parts], counts[part], least[part])


@Kernel
def _codes(x, counts):
    parts = len(counts)
    for part in numba.prange(parts):
        _tally(x[x.size * part // parts : x.size * (part + 1) // parts], counts[part])


@Kernel
def _amax(x, first, most, mask, infinity):
    parts = len(most)
    for part in numba.prange(parts):
        a = x.size * part // parts
        column = (first + a) % most.shape[1]
        _amax_part(x[a : x.size * (part + 1) // parts], column, most[part], mask, infinity)


@Kernel
def _column_amax(x, starts, most, ends):
    for t in range(starts.size - 1):
        if ends[t] < ends[t + 1]:
            _amax_part(
                x[starts[t] : starts[t + 1]],
                0,
                most[ends[t] : ends[t + 1]],
                np.uint32(MAGNITUDE),
                np.uint32(0x7F800000),
            )
