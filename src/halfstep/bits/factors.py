"""Whether values are those of a narrower type times a factor, or codes times powers of two; first looks at scans."""

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
"""The significant bits of what is looked for."""

_WHOLE = range(8, 12)  # bits of whole numbers of one step, which are no copies; of fewer they are codes
_FEW = 4  # significant bits of codes of floating point, which are no copies
_WIDE = 24  # significant bits of a type in which a product shows what was multiplied
_SHOWN = 64  # significands that are tried on each factor
_ROUNDED = 4  # half steps by which a value over another may be off: each was rounded as it was stored, and once before

CODE_BITS = 7
"""The significant bits of codes of 8 bits, at most."""

_FLOATS = {
    2: (("float4_e2m1fn", 4, 4),),
    3: (("float6_e3m2fn", 6, 9), ("float8_e5m2", 8, 32)),
    4: (("float6_e2m3fn", 6, 6), ("float8_e4m3fn", 8, 18)),
}
"""By their significant bits: formats, their bits, and those of their largest value as a multiple of the smallest."""

_NONE = 2 * CODE_BITS  # bits of a code, where no format holds the values: more than any that does
_EMPTY = 1 << 20  # the last bit in use of a zero


def factored(places: Places, again: Repeats, wide: Float | None) -> tuple[str, Tile | None, float] | None:
    """The narrower type, what has a factor of its own (None: nothing, there is one for all), and the evidence; or None.

    A factor moves all significands alike, so that they come again however large the values are; and they lie on a grid
    of 2^(bits - 1) steps for some place of the largest one in it. The factor itself was chosen to fit.
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
    """The different ones of each tile that are normal and tell something; of no tile those of the rows looked at."""
    for values in places.tiles(tile) if tile is not None else (places.used(places.lines.ravel()),):
        magnitudes = np.unique(np.abs(values[tells(values)]))
        yield magnitudes[magnitudes >= 2.0**wide.min_exponent]


def _evidence(tiles: Iterable[Doubles], bits: int, stored: int, whole: bool = False) -> float:
    """In all significands' (the `whole` values') lying on the grid, each tile's largest one at some place of it; 0 if
    they do not, or if they do without a factor.
    """
    places, total = np.arange(2.0 ** (bits - 1), 2.0**bits)[:, None], 0.0
    room = 2 * _ROUNDED * 2.0**-stored  # of a number of half steps, for those above the largest one are halved
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
    """A format's values times powers of two: one, or one for each `tile`."""

    format: str
    tile: Tile
    also: tuple[str, ...] = ()
    """What they could have been, where it was not looked which of them share a power."""


def powers(scan: Scan) -> Powers | None:
    """The smallest format that holds values of so few significant bits, with as few powers of two as explain them.

    Whole numbers have fewer bits the smaller they are, where floating point has as many: at random, each bit more would
    be unused by a chance of one half.

    A power for each tile is worth it where the values then fit a format with fewer bits than under one for all, by more
    than it takes to say which power each tile has.
    """
    used, table = scan.table.significant_bits, scan.table
    place = table.rows - table.last_bit + 1
    tile, whole, most = TENSOR, int(place[-1]), 0.0
    finer = int((np.maximum(used - place, 0) * table.exponents).sum())
    for one in TILES if scan.places is not None else ():
        saved, bits, bare = _saved(scan.places, one, used) if scan.places is not None else (0.0, 0, 0)
        if saved > most:
            tile, whole, most, finer = one, bits, saved, bare
    beyond = int((np.maximum(place - used, 0) * table.exponents).sum())  # bits unused, were there one step
    if finer >= CERTAIN and (whole <= used or beyond < CERTAIN):
        return Powers(f"int{used + 1}", tile)
    name, _ = _smallest(used, max(whole, used + 1))
    if name is None:
        return None
    also = (f"int{used + 1}",) if scan.places is None or whole <= used else ()
    return Powers(WIDER[name], tile, (*also, name)) if name in WIDER and finer < CERTAIN else Powers(name, tile, also)


def _smallest(used: int, whole: int) -> tuple[str | None, int]:
    """The format of fewest bits whose values have as many significant ones, the largest `whole` above the last."""
    if whole <= used:
        return f"int{used + 1}", used + 1
    return next(((name, bits) for name, bits, most in _FLOATS.get(max(used, 2), ()) if whole <= most), (None, _NONE))


def _saved(places: Places, tile: Tile, used: int) -> tuple[float, int, int]:
    """The bits a value that a power for each tile saves, those of a largest value above its tile's last one, and those
    that whole numbers leave unused.
    """
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
    """The ends of tiles."""
    return reduce.reduceat(
        reduce.reduceat(ends, np.arange(0, ends.shape[0], high), axis=0), np.arange(0, ends.shape[1], wide), axis=1
    )


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
    return min(different, *turned) if different <= COPIED or min(turned) <= TURNED else None


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
    steps = 2.0 ** (np.maximum(np.frexp(rarer)[1] - 1, wide.min_exponent if wide else -1022) + 1.0 - used)
    bits = (np.minimum(times[1:], times[:-1]) - 1) * np.log2(np.diff(levels) / steps)
    return max(0.0, float(bits.max()) - float(np.log2(levels.size)))


def _place(magnitude: float, wide: Float | None, used: int) -> float:
    """The number of values of so many significant bits from the smallest one to this."""
    exponent = max(int(np.frexp(magnitude)[1]) - 1, wide.min_exponent if wide else -1022)
    return float(2.0 ** (used - 1) * (exponent + magnitude * 2.0**-exponent))
