"""Codes of 8 bits or less times powers of two, which no product has rounded: which format, and who shares a power."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halfstep.bits.evidence import CERTAIN
from halfstep.bits.grids import WIDER
from halfstep.bits.places import Places
from halfstep.bits.scan import Scan
from halfstep.bits.tiles import TILES
from halfstep.quant.tile import TENSOR, Tile


Whole = NDArray[np.int64]

BITS = 7
"""The significant bits of codes of 8 bits, at most."""

_FLOATS = {
    2: (("float4_e2m1fn", 4, 4),),
    3: (("float6_e3m2fn", 6, 9), ("float8_e5m2", 8, 32)),
    4: (("float6_e2m3fn", 6, 6), ("float8_e4m3fn", 8, 18)),
}
"""By their significant bits: formats, their bits, and those of their largest value as a multiple of the smallest."""

_NONE = 2 * BITS  # bits of a code, where no format holds the values: more than any that does
_EMPTY = 1 << 20  # the last bit in use of a zero


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
    if name in WIDER and finer < CERTAIN:
        return Powers(WIDER[name], tile, (*also, name))
    return Powers(name, tile, also)


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
    significands = (mantissas * 2.0**BITS).astype(np.int64)
    last = above - BITS + np.frexp((significands & -significands).astype(np.float64))[1] - 1
    return np.where(values > 0, above - 1, -_EMPTY), np.where(values > 0, last, _EMPTY)


def _tiled(reduce: np.ufunc, ends: Whole, high: int, wide: int) -> Whole:
    """The ends of tiles."""
    down = reduce.reduceat(ends, np.arange(0, ends.shape[0], high), axis=0)
    found: Whole = reduce.reduceat(down, np.arange(0, ends.shape[1], wide), axis=1)
    return found
