"""What tables of counted values say of formats: which hold them, with bits to spare, or under some scale."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from halfstep.kernels.cpu.bits import WIDTH, Counts
from halfstep.kernels.cpu.compiled import Kernel, inner


def sums(counts: Counts, lowest: int, whole: int) -> tuple[Counts, Counts, Counts, Counts, Counts]:
    """Of a table whose rows are exponents from the lowest on: its running sums by significant bits; the counts of what
    is no power of two and no whole number below 2^whole; the sums of rows; those of columns; then the number of all
    values, the most significant bits, and the largest k for which all are multiples of 2^k (0 of none).
    """
    found: tuple[Counts, Counts, Counts, Counts, Counts] = _sums(0, counts, lowest, whole)
    return found


def on_grid(
    levels: NDArray[np.float64], grid: NDArray[np.float64], tops: NDArray[np.float64], relative: float, step: float
) -> NDArray[np.bool_]:
    """For each place of the largest level on a grid (both ascending) whether each level over the largest one times
    that place is near a value of the grid: by `relative` of that value and `step` of the place.
    """
    found = np.ones(tops.size, np.bool_)
    _on_grid(0, levels, grid, tops, relative, step, found)
    return found


def suspects(
    values: NDArray[np.float64],
    grids: NDArray[np.float64],
    starts: Counts,
    ratios: NDArray[np.float64],
    few: int,
    corners: int,
    relative: float,
    smallest: float,
) -> NDArray[np.bool_]:
    """Which of the grids, joined, the magnitudes of each row's first `few` values are on (of the first row, all), each
    row under a scale of its own; of `corners` rows, the first that have two magnitudes or more. Values were rounded
    as in `on_grid`, to steps of `smallest` at least; ratios are those of any two values of a grid, ascending.
    """
    found = np.ones(starts.size - 1, np.bool_)
    _suspects(0, values, grids, starts, ratios, few, corners, relative, smallest, found)
    return found


def unused_bits(counts: Counts, most: Counts) -> Counts:
    """Values by how many of the significant bits that each row has at most they leave unused."""
    found = np.zeros(WIDTH, np.int64)
    _unused_bits(0, counts, most, found)
    return found


def fitting(counts: Counts, telling: Counts, few: Counts, most: Counts, short: int) -> tuple[Counts, Counts, Counts]:
    """Of tables of rows of exponents and columns of significant bits, where `few` of a row are fewer than its `most`:
    the telling values of each row that fit these, and all of them. Then three numbers: the values that fit in all rows,
    the telling ones beyond which leave `short` bits or more unused, and those that use the last of the few.
    """
    rows, seen = np.zeros((2, few.size), np.int64), np.zeros(3, np.int64)
    _fitting(0, counts, telling, few, most, short, rows, seen)
    return rows[0], rows[1], seen


@Kernel
def _sums(counts, lowest, whole):
    rows, columns = counts.shape
    running, telling = np.zeros((rows, columns), np.int64), np.zeros((rows, columns), np.int64)
    by_row, by_column, ends = np.zeros(rows, np.int64), np.zeros(columns, np.int64), np.zeros(3, np.int64)
    for row in range(rows):
        exponent = lowest + row
        for column in range(columns):
            count = counts[row, column]
            if count:
                by_row[row] += count
                by_column[column] += count
                last = exponent - column + 1
                ends[2] = min(ends[2], last) if ends[0] else last
                ends[0] += count
                ends[1] = max(ends[1], column)
                if column > 1 and (column > exponent + 1 or exponent >= whole):
                    telling[row, column] = count
            running[row, column] = by_row[row]
    return running, telling, by_row, by_column, ends


@inner
def _fits(levels, grid, top, relative, step):
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
        found[i] = _fits(levels, grid, tops[i], relative, step)


@inner
def _levels(line, few, levels):
    """The distinct magnitudes of the first few values that are finite and not zero, ascending: how many there are."""
    count, seen = 0, 0
    for value in line:
        if seen == few or value == 0 or not np.isfinite(value):
            continue
        seen += 1
        magnitude = abs(value)
        place = np.searchsorted(levels[:count], magnitude)
        if place < count and levels[place] == magnitude:
            continue
        for i in range(count, place, -1):
            levels[i] = levels[i - 1]
        levels[place] = magnitude
        count += 1
    return count


@Kernel
def _suspects(values, grids, starts, ratios, few, corners, relative, smallest, found):
    room, seen = np.empty(values.shape[1]), 0
    for row in range(len(values)):
        levels = room[: _levels(values[row], few if row else values.shape[1], room)]
        if levels.size < 2 or seen == corners:
            continue
        seen += 1
        ratio, step = levels[-2] / levels[-1], smallest / levels[-1]
        near = 1.1 * (relative * ratio + step) + 1e-12
        some = np.searchsorted(ratios, ratio - near) < np.searchsorted(ratios, ratio + near)
        for i in range(found.size):
            if not (some and found[i]):
                found[i] = False
                continue
            grid, fits = grids[starts[i] : starts[i + 1]], False
            for top in grid:
                fits = fits or (levels.size <= grid.size and _fits(levels, grid, top, relative, step))
            found[i] = fits


@Kernel
def _unused_bits(counts, most, found):
    for row in range(most.size):
        for column in range(counts.shape[1]):
            found[max(most[row] - column, 0)] += counts[row, column]


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
