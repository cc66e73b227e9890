"""Which formats hold all counted values of a table, with bits to spare, or with some scale.

The tables of several tensors are concatenated: rows are exponents, columns significant bits. `starts` holds where each
table's rows begin, then the end; `lowest` is the exponent of its first row. A format is a row of four integers: its
largest exponent, the exponent of its smallest value, its significant bits, and whether its largest code is NaN.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfstep.kernels.cpu.bits import WIDTH, Counts
from halfstep.kernels.cpu.compiled import Kernel, inner


class First(NamedTuple):
    """The result of a first look at a table; how strong the evidence is, is not decided here."""

    fits: int
    """As bits, which formats may hold all telling values."""
    mixes: int
    """As bits, which formats may hold some of them, so that the tensor may be a mixture. No format if too few values
    have no more significant bits than the format has, or if there is no evidence that more bits are in use."""
    most: int
    """The most significant bits that values of these exponents have in the stored format, limited to those in use."""
    left: int
    """How many of these bits half of the values leave unused."""


def sums(counts: Counts, starts: Counts, lowest: Counts, whole: int) -> tuple[Counts, Counts, Counts, Counts, Counts]:
    """Running sums over significant bits; counts of telling values (no powers of two and no integers below 2^whole);
    sums of rows; sums of columns, per table; and per table the number of values, the most significant bits, the largest
    k for which all are multiples of 2^k (0 for an empty table), and the number of telling values."""
    found: tuple[Counts, Counts, Counts, Counts, Counts] = _sums(0, counts, starts, lowest, whole)
    return found


def held(
    running: Counts, fifteens: Counts, starts: Counts, lowest: Counts, formats: Counts, scaled: NDArray[np.bool_]
) -> tuple[Counts, Counts]:
    """For each table and format, how many values the format holds exactly, and the shift of exponents for this: 0, or
    where `scaled` the smallest with which nothing overflows. `running` is the first result of `sums`."""
    found, shifts = np.zeros((2, starts.size - 1, len(formats)), np.int64)
    _held(0, running, fifteens, starts, lowest, formats, scaled, found, shifts)
    return found, shifts


def added(counts: Counts, rows: Counts, total: Counts) -> None:
    """Add each row of counts to the row of `total` with that index."""
    _added(0, counts, rows, total)


def first_look(
    counts: Counts,
    telling: Counts,
    starts: Counts,
    lowest: Counts,
    formats: Counts,
    ends: tuple[int, int, float, float],
) -> list[First]:
    """A first look at each table, whose values are stored in the first of the formats, for the other formats. `ends`:
    the most bits of those, the number of unused bits that count as short, and the least share, and evidence, of a
    mixture."""
    found = np.zeros((starts.size - 1, len(First._fields)), np.int64)
    _first_look(0, counts, telling, starts, lowest, formats, *ends, found)
    return [First(*row) for row in found.tolist()]


def on_grid(
    levels: NDArray[np.float64], grid: NDArray[np.float64], tops: NDArray[np.float64], relative: float, step: float
) -> NDArray[np.bool_]:
    """For each value of `tops` as the position of the largest level on a grid (both ascending), whether every level,
    scaled so that the largest is there, is near a value of the grid: within `relative` of that value plus `step` of the
    position."""
    found = np.ones(tops.size, np.bool_)
    _on_grid(0, levels, grid, tops, relative, step, found)
    return found


def fitting(counts: Counts, telling: Counts, few: Counts, most: Counts, short: int) -> tuple[Counts, Counts, Counts]:
    """For one table, where a row's narrow format has `few` bits and its stored one `most`: the telling values of each
    row that fit `few`, and all of them. Then three integers: the number of values that fit in all rows, of telling ones
    that do not but leave `short` bits or more unused, and of those that use the last of the few bits."""
    rows, seen = np.zeros((2, few.size), np.int64), np.zeros(3, np.int64)
    _fitting(0, counts, telling, few, most, short, rows, seen)
    return rows[0], rows[1], seen


@Kernel
def _sums(counts, starts, lowest, whole):
    tables, (rows, columns) = starts.size - 1, counts.shape
    running, telling = np.zeros((rows, columns), np.int64), np.zeros((rows, columns), np.int64)
    by_row, by_column = np.zeros(rows, np.int64), np.zeros((tables, columns), np.int64)
    ends = np.zeros((tables, 4), np.int64)
    for t in range(tables):
        for row in range(starts[t], starts[t + 1]):
            exponent = lowest[t] + row - starts[t]
            for column in range(columns):
                count = counts[row, column]
                if count:
                    by_row[row] += count
                    by_column[t, column] += count
                    last = exponent - column + 1
                    ends[t, 2] = min(ends[t, 2], last) if ends[t, 0] else last
                    ends[t, 0] += count
                    ends[t, 1] = max(ends[t, 1], column)
                    if column > 1 and (column > exponent + 1 or exponent >= whole):
                        telling[row, column] = count
                        ends[t, 3] += count
                running[row, column] = by_row[row]
    return running, telling, by_row, by_column, ends


@inner
def _bits(format, exponent, used):
    """The significant bits that a format has for values of an exponent, at most `used`."""
    if exponent > format[0]:
        return 0
    return max(min(format[2], exponent - format[1] + 1, used), 0)


@Kernel
def _held(running, fifteens, starts, lowest, formats, scaled, found, shifts):
    for t in range(starts.size - 1):
        first, stop = starts[t], starts[t + 1]
        for k in range(len(formats) if first < stop else 0):
            format = formats[k]
            if scaled[k]:
                shifts[t, k] = lowest[t] + stop - first - 1 - format[0] + (format[3] and fifteens[stop - 1] > 0)
            for row in range(first, stop):
                exponent = lowest[t] + row - first - shifts[t, k]
                found[t, k] += running[row, _bits(format, exponent, running.shape[1] - 1)]
                if format[3] and exponent == format[0]:
                    found[t, k] -= fifteens[row]


@Kernel
def _added(counts, rows, total):
    for i in range(rows.size):
        for column in range(counts.shape[1]):
            total[rows[i], column] += counts[i, column]


@inner
def _mixes(held, beyond, short, filled, able, expected, least, unused):
    """Whether a mixture may explain these counts; where this says no, `Fit.mixed` does too."""
    written = beyond / 2.0**unused
    random = short <= 2 * written + 3 * np.sqrt(written) + 1
    share = held / (held + beyond)
    return random and 4 * filled >= held and share >= least and share * 1.000001 >= 3 * expected / able


@inner
def _fit(counts, telling, lowest, narrow, stored, used, unused, least):
    """Whether all values, and whether some, may fit a format, in a table whose values use `used` bits."""
    held, beyond, short, filled, able, expected = 0, 0, 0, 0, 0, 0.0
    for row in range(len(counts)):
        most = _bits(stored, lowest + row, used)
        few = _bits(narrow, lowest + row, most)
        end = max(most - unused, few)
        for column in range(1, counts.shape[1]):
            tells = telling[row, column]
            beyond += counts[row, column] if column > few else 0
            short += tells if few < column <= end else 0
            if few < most and tells:
                able += tells
                expected += tells * (2.0 ** max(few - 1, 0) - 1) / (2.0 ** max(most - 1, 1) - 1)
                held += tells if column <= few else 0
                filled += tells if column == few else 0
    if not held:
        return False, False
    return beyond == 0, _mixes(held, beyond, short, filled, able, expected, least, unused)


@inner
def _half(telling, lowest, stored, used):
    """The most bits that values have, and the number that half of them leave unused."""
    free, highest = np.zeros(WIDTH, np.int64), 0
    for row in range(len(telling)):
        most = _bits(stored, lowest + row, used)
        highest = max(highest, most)
        for column in range(telling.shape[1]):
            free[max(most - column, 0)] += telling[row, column]
    count, left, above = free.sum(), WIDTH - 1, free[-1]
    while 2 * above < count:
        left -= 1
        above += free[left]
    return highest, left if count else 0


@Kernel
def _first_look(counts, telling, starts, lowest, formats, few, unused, least, evidence, found):
    stored = formats[0]
    for t in range(starts.size - 1):
        some, tells = counts[starts[t] : starts[t + 1]], telling[starts[t] : starts[t + 1]]
        used, short = 0, 0
        for row in range(len(some)):
            for column in range(some.shape[1]):
                used = max(used, column if some[row, column] else 0)
                short += tells[row, column] if column <= few else 0
        for k in range(1, len(formats)):
            if formats[k][2] >= used:
                fits, _ = _fit(some, tells, lowest[t], formats[k], stored, WIDTH - 1, unused, least)
                found[t, 0] |= fits << (k - 1)
            if short * used >= evidence:
                _, mixes = _fit(some, tells, lowest[t], formats[k], stored, used, unused, least)
                found[t, 1] |= mixes << (k - 1)
        found[t, 2], found[t, 3] = _half(tells, lowest[t], stored, used)


@inner
def near_grid(levels, grid, top, relative, step):
    """Whether all levels, scaled so that the largest is at `top`, are near values of a grid."""
    for level in levels:
        scaled = level / levels[-1] * top
        place = min(max(np.searchsorted(grid, scaled), 1), grid.size - 1)
        low, high = grid[place - 1], grid[place]
        near = low if scaled - low < high - scaled else high
        if not abs(scaled - near) <= relative * near + step * top:
            return False
    return True


@Kernel
def _on_grid(levels, grid, tops, relative, step, found):
    for i in range(tops.size):
        found[i] = near_grid(levels, grid, tops[i], relative, step)


@Kernel
def _fitting(counts, telling, few, most, short, rows, seen):
    for row in range(few.size):
        end = max(most[row] - short, few[row])
        for column in range(counts.shape[1]):
            fits, tells = column <= few[row], telling[row, column]
            seen[0] += counts[row, column] if fits else 0
            seen[1] += tells if not fits and column <= end else 0
            if few[row] < most[row]:
                rows[0, row] += tells if fits else 0
                rows[1, row] += tells
                seen[2] += tells if column == few[row] else 0
