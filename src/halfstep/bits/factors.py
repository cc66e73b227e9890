"""Tests whether values are a narrower type's times a factor, or codes times powers of two; and first looks at scans."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halfstep.bits.grids import CERTAIN, CHOSEN, WIDER, first_looks, suspects
from halfstep.bits.scan import LEVELS, Levels, Scan
from halfstep.bits.table import tells
from halfstep.bits.values import COLUMN, TILES, Doubles, Places, repeats
from halfstep.formats import Float
from halfstep.kernels.cpu.looks import BEGUN, COPIED, FIRST, LINES, TURNED, Repeats
from halfstep.kernels.cpu.tables import First
from halfstep.quant import ROW, TENSOR, Tile


Whole = NDArray[np.int64]

_BITS = {"bf16": 8, "fp16": 11}
"""The narrower types that are looked for, with their significant bits."""

_WHOLE = range(8, 12)  # bits of integers times one step, which are no bf16 or fp16 values; of fewer bits: codes
_FEW = 4  # significant bits of float codes, which are no bf16 or fp16 values
_WIDE = 24  # significant bits of a type in which a product still shows the narrower type
_SHOWN = 64  # significands that are tried first with each factor
_ROUNDED = 4  # half steps of error of a ratio of two values: each was rounded when it was stored, and once before

CODE_BITS = 7
"""The most significant bits of 8-bit codes."""

_FLOATS = {
    2: (("float4_e2m1fn", 4, 4),),
    3: (("float6_e3m2fn", 6, 9), ("float8_e5m2", 8, 32)),
    4: (("float6_e2m3fn", 6, 6), ("float8_e4m3fn", 8, 18)),
}
"""Float formats by their significant bits: the name, its bits, and the bits of its largest value in units of its
smallest."""

_NONE = 2 * CODE_BITS  # bits of a code where no format holds the values: more than any format has
_EMPTY = 1 << 20  # stands for the last bit in use of a zero


def factored(places: Places, again: Repeats, wide: Float | None) -> tuple[str, Tile | None, float] | None:
    """The narrower type whose values times factors these are; the tile that has a factor of its own (None: one factor
    for all values); and the evidence in bits. None where there is none.

    A factor changes all significands alike, so equal significands recur at different magnitudes; and they all lie on a
    grid of 2^(bits - 1) steps for some position of the largest one. The factor itself was chosen to fit, which costs
    evidence.
    """
    if wide is None or wide.significant_bits < _WIDE:
        return None
    tiles = (*((None, ROW) if again.row else ()), *((COLUMN,) if again.column else ()))
    stored = wide.significant_bits
    for tile, (name, bits) in itertools.product(tiles, _BITS.items()):
        evidence = _evidence(_magnitudes(places, tile, wide), bits, stored)
        if evidence < CERTAIN:
            continue
        wholes = (n for n in _WHOLE if _evidence(_magnitudes(places, tile, wide), n, stored, whole=True) >= CERTAIN)
        if (whole := next(wholes, None)) is not None:
            return (f"int{whole + 1}", None, evidence) if tile is None else None
        return None if _evidence(_magnitudes(places, tile, wide), _FEW, stored) >= CERTAIN else (name, tile, evidence)
    return None


def _magnitudes(places: Places, tile: Tile | None, wide: Float) -> Iterator[Doubles]:
    """The distinct telling normal magnitudes of each tile; with tile None, those of the rows looked at."""
    for values in places.tiles(tile) if tile is not None else (places.used(places.lines.ravel()),):
        magnitudes = np.unique(np.abs(values[tells(values)]))
        yield magnitudes[magnitudes >= 2.0**wide.min_exponent]


def _evidence(tiles: Iterable[Doubles], bits: int, stored: int, whole: bool = False) -> float:
    """The evidence in that all significands (with `whole`, all values) lie on the grid, for some position of each
    tile's largest one; 0 if they do not, or if they do without a factor."""
    places, total = np.arange(2.0 ** (bits - 1), 2.0**bits)[:, None], 0.0
    room = 2 * _ROUNDED * 2.0**-stored  # in half steps, since significands above the largest value's are halved
    for magnitudes in tiles:
        found = magnitudes if whole else np.unique(np.frexp(magnitudes)[0])
        if found.size < 2:
            continue
        tops, some = places, found[:: -(-found.size // _SHOWN)]
        for few in (some, found):
            steps = (1 if whole else 2) * tops * few / found[-1]
            tops = tops[(np.abs(steps - np.round(steps)) <= room * tops).all(1)]
        if not tops.size or (tops == np.ldexp(found[-1], bits)).any():
            return 0.0
        total += max(0.0, -float(np.log2(2 * room * tops.min())) * (some.size - 1) - (bits - 1))
    return total


@dataclass(frozen=True)
class Powers:
    """A format's values times powers of two: one for all values, or one for each `tile`."""

    format: str
    tile: Tile
    also: tuple[str, ...] = ()
    """Other formats that these could be, where it was not examined which values share a power."""


def powers(scan: Scan) -> Powers | None:
    """The smallest format that holds these values of few significant bits, with as few powers of two as explain them.

    Integers use fewer significant bits the smaller they are, while floats use as many at any magnitude: a random float
    leaves each further bit unused with a probability of one half.

    A power per tile is accepted where the values then fit a format of fewer bits than with one power for all, by more
    bits than it takes to encode the power of each tile.
    """
    used, table = scan.table.significant_bits, scan.table
    place = table.rows - table.last_bit + 1
    tile, whole, most = TENSOR, int(place[-1]), 0.0
    finer = int((np.maximum(used - place, 0) * table.exponents).sum())
    for one in TILES if scan.places is not None else ():
        saved, bits, bare = _saved(scan.places, one, used) if scan.places is not None else (0.0, 0, 0)
        if saved > most:
            tile, whole, most, finer = one, bits, saved, bare
    beyond = int((np.maximum(place - used, 0) * table.exponents).sum())  # bits that would be unused if all had one step
    if finer >= CERTAIN and (whole <= used or beyond < CERTAIN):
        return Powers(f"int{used + 1}", tile)
    name, _ = _smallest(used, max(whole, used + 1))
    if name is None:
        return None
    also = (f"int{used + 1}",) if scan.places is None or whole <= used else ()
    return Powers(WIDER[name], tile, (*also, name)) if name in WIDER and finer < CERTAIN else Powers(name, tile, also)


def _smallest(used: int, whole: int) -> tuple[str | None, int]:
    """The format of the fewest bits with `used` significant bits, whose largest value is `whole` bits above its last
    bit."""
    if whole <= used:
        return f"int{used + 1}", used + 1
    return next(((name, bits) for name, bits, most in _FLOATS.get(max(used, 2), ()) if whole <= most), (None, _NONE))


def _saved(places: Places, tile: Tile, used: int) -> tuple[float, int, int]:
    """The bits per value that a power for each tile saves; the bits from a tile's last bit to its largest value; and
    the bits that integers would leave unused."""
    count, whole, together, unused = 0, 0, 0, 0
    lasts: list[Whole] = []
    for matrix in (places.lines,) if tile.rows == 1 else places.bands:
        first, last = _ends(places.doubles(matrix))
        high, wide = tile.rows or len(first), tile.columns or first.shape[1]
        exponents = first
        first, last = _tiled(np.maximum, first, high, wide), _tiled(np.minimum, last, high, wide)
        some = last < _EMPTY
        if not some.any():
            continue
        whole = max(whole, int((first - last)[some].max()) + 1)
        together = max(together, int(first[some].max() - last[some].min()) + 1)
        spread = last.repeat(high, 0)[: len(matrix)].repeat(wide, 1)[:, : matrix.shape[1]]
        unused += int(np.maximum(used - 1 - (exponents - spread), 0)[exponents > -_EMPTY].sum())
        lasts.append(last[some])
        count += matrix.size
    own = np.concatenate(lasts) if lasts else np.zeros(0, np.int64)
    if own.size < 2:
        return 0.0, 0, 0
    shares = np.unique(own, return_counts=True)[1] / own.size
    saved = _smallest(used, together)[1] - _smallest(used, whole)[1]
    return saved + own.size / count * float((shares * np.log2(shares)).sum()), whole, unused


def _ends(values: NDArray[np.float64]) -> tuple[Whole, Whole]:
    """The exponent of each value, and of its last bit in use."""
    values = np.where(np.isfinite(values), np.abs(values), 0.0)
    mantissas, above = np.frexp(values)
    significands = (mantissas * 2.0**CODE_BITS).astype(np.int64)
    last = above - CODE_BITS + np.frexp((significands & -significands).astype(np.float64))[1] - 1
    return np.where(values > 0, above - 1, -_EMPTY), np.where(values > 0, last, _EMPTY)


def _tiled(reduce: np.ufunc, ends: Whole, high: int, wide: int) -> Whole:
    """The exponents of `_ends`, reduced over each tile."""
    return reduce.reduceat(
        reduce.reduceat(ends, np.arange(0, ends.shape[0], high), axis=0), np.arange(0, ends.shape[1], wide), axis=1
    )


@dataclass(frozen=True)
class Looks:
    """The first looks at one scan."""

    table: First
    repeats: Repeats | None = None
    """None where the scan has no places."""
    grids: Sequence[str] = ()
    """The result of `grids.suspects`."""


def looks(scans: Sequence[Scan], wide: Float | None, formats: Sequence[Float]) -> Iterator[Looks]:
    """First looks at scans of values that `wide` holds (None: 53 bits), for casts from these formats."""
    if not scans:
        return
    places = [scan.places for scan in scans if scan.places is not None]
    comes = iter(zip(repeats(places), suspects(places, wide), strict=True) if places else ())
    for scan, table in zip(scans, first_looks([scan.table for scan in scans], wide, formats), strict=True):
        yield Looks(table, *next(comes)) if scan.places is not None else Looks(table)


def come_again(places: Places, parts: int, wide: Float | None, used: int) -> bool:
    """Whether values of the first or the last row, or of a column, repeat clearly more often than random ones; `parts`
    says which of these to examine (`Repeats.parts`)."""
    row, last, column = places.lines[0], places.lines[-1][:FIRST], places.bands[0][:, 0]
    some = (*(row[:count] for count in BEGUN), column, last)  # a row's scale may tell nothing
    again = (places.used(bits) for i, bits in enumerate(some) if parts >> i & 1)
    return any(_repetition(values, wide, used)[1] > 0 for values in again)


def few_levels(places: Places, wide: Float | None, used: int) -> tuple[Tile, int, float] | None:
    """The kind of tile of which each has few distinct magnitudes, the most that one has, and the evidence; or None. If
    several kinds fit, the one with the most evidence per value.

    Random values of `used` significant bits repeat too: only more frequent repetition is evidence.
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
    """Bits of evidence in repeated values: between the quartiles of the magnitudes, where values are dense.

    Of N values of `used` significant bits in that range, n random ones have at most d distinct values with a
    probability of at most (N over d) * (d/N)^n, if they are equally likely; N is halved, for they are not.
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
    """The share of distinct values where rows, columns or diagonals of blocks are copies; None where they are not.

    Equal values among independently drawn codes do not make whole rows equal.
    """
    band = places.doubles(places.bands[0])
    band = band[np.isfinite(band).all(1)]
    rows, columns = (some[(some != 0).sum(1) >= LINES] for some in (band, band.T))
    if min(len(rows), len(columns)) < LINES:
        return None
    different = np.unique(rows, axis=0).shape[0] / len(rows) * np.unique(columns, axis=0).shape[0] / len(columns)
    turned = [_differ(rows[1:, 1:], rows[:-1, :-1]), _differ(rows[1:, :-1], rows[:-1, 1:])]
    return min(different, *turned) if different <= COPIED or min(turned) <= TURNED else None


def _differ(one: Doubles, other: Doubles) -> float:
    """The share of values that differ, among those where not both are zero."""
    some = (one != 0) | (other != 0)
    return float((one != other)[some].mean()) if some.any() else 1.0


def _repetition(values: Doubles, wide: Float | None, used: int) -> tuple[int, float]:
    """The number of distinct magnitudes, and the evidence in their repetition."""
    levels = Levels(*np.unique(np.abs(values), return_counts=True))
    return levels.magnitudes.size, repetition(levels, wide, used) or _apart(values, wide, used)


def _apart(values: Doubles, wide: Float | None, used: int) -> float:
    """The evidence where half of the values or more have two magnitudes: that no value is between two common ones.

    If values grow rarer on both sides of the most common ones, then one that is as large as the rarer of two, or
    between them, equals the rarer one with a probability of at most its step over their distance.
    """
    levels, times = np.unique(values[tells(values)], return_counts=True)
    _, both = np.unique(np.abs(levels), return_inverse=True)
    if levels.size < 2 or 2 * np.sort(np.bincount(both, times))[-CHOSEN:].sum() < times.sum():
        return 0.0
    rarer = np.where(times[1:] < times[:-1], levels[1:], levels[:-1])
    steps = 2.0 ** (np.maximum(np.frexp(rarer)[1] - 1, wide.min_exponent if wide else -1022) + 1.0 - used)
    bits = (np.minimum(times[1:], times[:-1]) - 1) * np.log2(np.diff(levels) / steps)
    return max(0.0, float(bits.max()) - float(np.log2(levels.size)))


def _place(magnitude: float, wide: Float | None, used: int) -> float:
    """The number of values of `used` significant bits from the smallest one to this magnitude."""
    exponent = max(int(np.frexp(magnitude)[1]) - 1, wide.min_exponent if wide else -1022)
    return float(2.0 ** (used - 1) * (exponent + magnitude * 2.0**-exponent))
