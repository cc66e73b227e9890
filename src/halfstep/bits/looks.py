"""First looks at many scans at once, after a no of which nothing else is asked; few magnitudes, and copied parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halfstep.bits.evidence import CERTAIN, CHOSEN, first_looks
from halfstep.bits.grids import suspects
from halfstep.bits.places import COLUMN, TILES, Places, repeats
from halfstep.bits.scan import LEVELS, Levels, Scan
from halfstep.bits.table import tells
from halfstep.formats import Float
from halfstep.kernels.cpu.looks import BEGUN, COPIED, FIRST, LINES, TURNED, Repeats
from halfstep.kernels.cpu.tables import First
from halfstep.quant import Tile


Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Looks:
    """Those at one scan."""

    table: First
    repeats: Repeats | None = None
    """None where there are no places."""
    grids: Sequence[str] = ()
    """The `grids.suspects`."""


def looks(scans: Sequence[Scan], wide: Float | None, formats: Sequence[Float]) -> Iterator[Looks]:
    """Those at scans of values that `wide` holds (None: 53 bits), of which casts from some formats are looked for."""
    if not scans:
        return
    places = [scan.places for scan in scans if scan.places is not None]
    comes = iter(zip(repeats(places), suspects(places, wide), strict=True) if places else ())
    for scan, table in zip(scans, first_looks([scan.table for scan in scans], wide, formats), strict=True):
        yield Looks(table, *next(comes)) if scan.places is not None else Looks(table)


def come_again(places: Places, parts: int, wide: Float | None, used: int) -> bool:
    """Whether values of the first or the last row or of a column come again clearly more often than random ones, of
    those `parts` in which they come again (`Repeats.parts`).
    """
    row, last, column = places.lines[0], places.lines[-1][:FIRST], places.bands[0][:, 0]
    some = (*(row[:count] for count in BEGUN), column, last)  # a row's scale may tell nothing
    again = (places.used(bits) for i, bits in enumerate(some) if parts >> i & 1)
    return any(_repetition(values, wide, used)[1] > 0 for values in again)


def few_levels(places: Places, wide: Float | None, used: int) -> tuple[Tile, int, float] | None:
    """The tiles of which each has few distinct magnitudes, how many at most, and the evidence; or None. Of several
    kinds the one with the most evidence a value.

    Random values of `used` significant bits come again, too: what counts is how much more often these do.
    """
    found, dense = None, 0.0
    for tile in (*TILES, COLUMN):
        most, evidence, count = 0, 0.0, 0
        for values in places.tiles(tile):
            seen, here = _repetition(values, wide, used)
            if seen > max(CHOSEN, here and LEVELS):
                break
            most, evidence, count = max(most, seen), evidence + here, count + values.size
        else:
            if evidence >= CERTAIN and evidence / count > dense:
                found, dense = (tile, most, evidence), evidence / count
    return found


def repetition(levels: Levels, wide: Float | None, used: int) -> float:
    """Bits of evidence in values that come again: between the quartiles of the magnitudes, where values are dense.

    Of N values of `used` significant bits that lie there, n random ones are no more than d different ones by a chance
    of at most (N over d) * (d/N)^n, if they are equally likely; N is halved, for they are not.
    """
    some = tells(levels.magnitudes)
    magnitudes, times = levels.magnitudes[some], levels.times[some]
    sums = np.cumsum(times)
    low, high = np.searchsorted(sums, [sums[-1] / 4, sums[-1] * 3 / 4]) if sums.size else (0, 0)
    if high - low < CHOSEN:
        return 0.0
    seen, count = high - low + 1, int(times[low : high + 1].sum())
    first, last = (_place(magnitudes[i], wide, used) for i in (low, high))
    return float(max(0.0, (count - seen) * np.log2((last - first + 1) / 2 / seen) - seen * np.log2(np.e)))


def copied(places: Places) -> float | None:
    """The share of different values where rows, columns or the diagonals of blocks are copies; None where they are not.

    Equal values of codes that were drawn one by one stand in lines that differ.
    """
    band = places.doubles(places.bands[0])
    band = band[np.isfinite(band).all(1)]
    rows, columns = (some[(some != 0).sum(1) >= LINES] for some in (band, band.T))
    if min(len(rows), len(columns)) < LINES:
        return None
    different = np.unique(rows, axis=0).shape[0] / len(rows) * np.unique(columns, axis=0).shape[0] / len(columns)
    turned = [_differ(rows[1:, 1:], rows[:-1, :-1]), _differ(rows[1:, :-1], rows[:-1, 1:])]
    least = min(different, *turned)
    return least if different <= COPIED or min(turned) <= TURNED else None


def _differ(one: Doubles, other: Doubles) -> float:
    """The share of different values where not both are zero."""
    some = (one != 0) | (other != 0)
    return float((one != other)[some].mean()) if some.any() else 1.0


def _repetition(values: Doubles, wide: Float | None, used: int) -> tuple[int, float]:
    """The distinct magnitudes among values, and the evidence in their coming again."""
    levels = Levels(*np.unique(np.abs(values), return_counts=True))
    return levels.magnitudes.size, repetition(levels, wide, used) or _apart(values, wide, used)


def _apart(values: Doubles, wide: Float | None, used: int) -> float:
    """The evidence where half of the values or more are two magnitudes: in that none lies between two that are common.

    If values grow rarer to both sides of the most common ones, then one that is as large as the rarer of the two or
    lies between them is a rarer one by a chance of at most its step over their distance.
    """
    levels, times = np.unique(values[tells(values)], return_counts=True)
    _, both = np.unique(np.abs(levels), return_inverse=True)
    if levels.size < 2 or 2 * np.sort(np.bincount(both, times))[-CHOSEN:].sum() < times.sum():
        return 0.0
    rarer = np.where(times[1:] < times[:-1], levels[1:], levels[:-1])
    lowest = wide.min_exponent if wide else -1022
    steps = 2.0 ** (np.maximum(np.frexp(rarer)[1] - 1, lowest) + 1.0 - used)
    bits = (np.minimum(times[1:], times[:-1]) - 1) * np.log2(np.diff(levels) / steps)
    return max(0.0, float(bits.max()) - float(np.log2(levels.size)))


def _place(magnitude: float, wide: Float | None, used: int) -> float:
    """The number of values of so many significant bits from the smallest one to this."""
    exponent = max(int(np.frexp(magnitude)[1]) - 1, wide.min_exponent if wide else -1022)
    return float(2.0 ** (used - 1) * (exponent + magnitude * 2.0**-exponent))
