"""A quick check of rows and columns of matrices: whether values repeat, or may be a grid times scales."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfstep.kernels.cpu.bits import Counts
from halfstep.kernels.cpu.compiled import Kernel, inner
from halfstep.kernels.cpu.tables import near_grid


Bits = NDArray[np.uint32]

FIRST = 512
"""How many values of a row or column are checked for repetition; longer ones are cut."""

BEGUN = (FIRST, 128, 64, 32)
"""The lengths of the beginnings of the first row that are checked for repetition; the first column and the last row
need at least the shortest."""

LINES = 8
"""The fewest rows or columns that may be copies of each other."""

COPIED, TURNED = 0.9, 0.1
"""The largest share of distinct rows and columns, and of values that differ along diagonals, in copies."""

AGAIN = 3
"""The number of significands that must repeat in a row or column; among random ones of 24 bits, one does with a
probability of 2^-4."""


class Repeats(NamedTuple):
    """What repeats in some rows and a band of a matrix."""

    parts: int
    """As bits, where an eighth or more of the magnitudes are repeated: in each beginning of `BEGUN`, the first column
    and the last row."""
    row: int
    """Whether at least AGAIN distinct magnitudes of the first row share their significand with another."""
    column: int
    """The same for the first column."""
    alike: int
    """Whether many rows or columns begin alike, or diagonals are constant."""


_SLOTS = 4 * FIRST  # the size of the hash table
_MAGNITUDE, _FRACTION, _INFINITY = np.uint32(0x7FFFFFFF), np.uint32(0x007FFFFF), np.uint32(0x7F800000)


def repeats(rows: Bits, bands: Bits, starts: Counts, columns: Counts) -> list[Repeats]:
    """What repeats in each of several matrices, given some of its rows and a band of each, as float32 bits. `starts`
    and `columns` have two rows, for the rows and for the bands: where each matrix's data begins, then the end; and its
    columns."""
    found = np.zeros((columns.shape[1], len(Repeats._fields)), np.int64)
    _repeats(0, rows, bands, starts, columns, found)
    return [Repeats(*row) for row in found.tolist()]


def suspects(
    values: NDArray[np.float32],
    starts: Counts,
    columns: Counts,
    grids: tuple[NDArray[np.float64], Counts, NDArray[np.float64]],
    limits: tuple[int, int, int],
    room: tuple[float, float],
) -> NDArray[np.bool_]:
    """For each matrix, which of the grids may hold its magnitudes: the first few values of each row (of the first row,
    more) are compared, each row with a scale of its own. Only the first few rows with at least two magnitudes are
    checked.

    `grids` are their values, concatenated; where each begins; and the ratios of any two values of each, ascending.
    `limits`: the number of values of the first row, of the others, and the number of rows. Values may be rounded as in
    `on_grid`: `room` is the relative rounding error and the smallest step.
    """
    found = np.ones((columns.size, grids[1].size - 1), np.bool_)
    _suspects(0, values, starts, columns, *grids, *limits, *room, found)
    return found


@inner
def _differ(keys, slots, kept):
    """Write the distinct ones of some integers below 2^31 to `kept` and return their number. `keys` and `kept` may be
    the same array."""
    slots[:] = 0
    count = 0
    for key in keys:
        held = np.uint32(key + 1)
        place = np.int64(np.uint32(held * np.uint32(2654435769)) >> np.uint32(21))
        while slots[place] != 0 and slots[place] != held:
            place = (place + 1) % _SLOTS
        if slots[place] == 0:
            slots[place] = held
            kept[count] = key
            count += 1
    return count


@inner
def _shared(line, room, slots):
    """How many distinct magnitudes of a row or column share their significand with another."""
    for i in range(line.size):
        room[i] = line[i] & _MAGNITUDE
    count = _differ(room[: line.size], slots, room)
    for i in range(count):
        room[i] &= _FRACTION
    return count - _differ(room[:count], slots, room)


@inner
def _come_again(line, room, slots):
    """Whether an eighth or more of the finite nonzero magnitudes of a row or column are repetitions."""
    count = 0
    for bits in line:
        magnitude = bits & _MAGNITUDE
        if 0 < magnitude < _INFINITY:
            room[count] = magnitude
            count += 1
    return count > 0 and 8 * _differ(room[:count], slots, room) <= 7 * count


@inner
def _begin_alike(matrix, room, slots):
    """Whether many of the rows begin alike, by 31-bit hashes."""
    for row in range(len(matrix)):
        key = np.uint32(2166136261)
        for i in range(LINES):
            key = np.uint32((key ^ matrix[row, i]) * np.uint32(16777619)) ^ (key >> np.uint32(15))
        room[row] = key & _MAGNITUDE
    return _differ(room[: len(matrix)], slots, room) <= COPIED * len(matrix)


@inner
def _turned(band):
    """Whether the first rows are nearly constant along diagonals, in either direction."""
    down, up, size = 0, 0, (LINES - 1) * (band.shape[1] - 1)
    for row in range(1, LINES):
        for column in range(1, band.shape[1]):
            down += band[row, column] == band[row - 1, column - 1]
            up += band[row, column - 1] == band[row - 1, column]
    return max(down, up) / size >= 1 - TURNED


@Kernel
def _repeats(rows, bands, starts, columns, found):
    room, slots = np.empty(FIRST, np.uint32), np.empty(_SLOTS, np.uint32)
    for t in range(columns.shape[1]):
        lines = rows[starts[0, t] : starts[0, t + 1]].reshape((-1, columns[0, t]))
        band = bands[starts[1, t] : starts[1, t + 1]].reshape((-1, columns[1, t]))
        column, last = band[:FIRST, 0], lines[-1, :FIRST]
        for i in range(len(BEGUN)):
            if BEGUN[i] <= lines.shape[1] and _come_again(lines[0, : BEGUN[i]], room, slots):
                found[t, 0] |= 1 << i
        if column.size >= BEGUN[-1] and _come_again(column, room, slots):
            found[t, 0] |= 1 << len(BEGUN)
        if last.size >= BEGUN[-1] and _come_again(last, room, slots):
            found[t, 0] |= 2 << len(BEGUN)
        found[t, 1] = _shared(lines[0, :FIRST], room, slots) >= AGAIN
        found[t, 2] = _shared(column, room, slots) >= AGAIN
        if min(band.shape) >= LINES:
            found[t, 3] = _turned(band) or _begin_alike(band, room, slots) or _begin_alike(band.T, room, slots)


@inner
def _levels(line, few, levels):
    """Write the distinct magnitudes of the first `few` finite nonzero values to `levels`, ascending; returns their
    number."""
    count, seen = 0, 0
    for value in line:
        if seen == few or value == 0 or not np.isfinite(value):
            continue
        seen += 1
        magnitude = np.float64(abs(value))
        place = np.searchsorted(levels[:count], magnitude)
        if place < count and levels[place] == magnitude:
            continue
        for i in range(count, place, -1):
            levels[i] = levels[i - 1]
        levels[place] = magnitude
        count += 1
    return count


@Kernel
def _suspects(values, starts, columns, joined, places, ratios, wide, few, corners, relative, smallest, found):
    room = np.empty(wide, np.float64)
    for t in range(columns.size):
        lines, seen = values[starts[t] : starts[t + 1]].reshape((-1, columns[t])), 0
        for row in range(len(lines)):
            levels = room[: _levels(lines[row, :wide], few if row else wide, room)]
            if levels.size < 2:
                continue
            if seen == corners or not found[t].any():
                break
            seen += 1
            ratio, step = levels[-2] / levels[-1], smallest / levels[-1]
            near = 1.1 * (relative * ratio + step) + 1e-12
            some = np.searchsorted(ratios, ratio - near) < np.searchsorted(ratios, ratio + near)
            for i in range(found.shape[1]):
                if not (some and found[t, i]):
                    found[t, i] = False
                    continue
                grid, fits = joined[places[i] : places[i + 1]], False
                for top in grid if levels.size <= grid.size else grid[:0]:
                    if near_grid(levels, grid, top, relative, step):
                        fits = True
                        break
                found[t, i] = fits
