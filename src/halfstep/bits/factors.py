"""Whether values are those of a narrower type times a factor, or codes of 8 bits or less times powers of two."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halfstep.bits.evidence import CERTAIN
from halfstep.bits.grids import WIDER
from halfstep.bits.places import COLUMN, TILES, Places
from halfstep.bits.scan import Scan
from halfstep.bits.table import tells
from halfstep.formats import Float
from halfstep.kernels.cpu.looks import Repeats
from halfstep.quant import ROW, TENSOR, Tile


Doubles = NDArray[np.float64]
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
        few = _evidence(_magnitudes(places, tile, wide), _FEW, stored) >= CERTAIN
        return None if few else (name, tile, evidence)
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
    significands = (mantissas * 2.0**CODE_BITS).astype(np.int64)
    last = above - CODE_BITS + np.frexp((significands & -significands).astype(np.float64))[1] - 1
    return np.where(values > 0, above - 1, -_EMPTY), np.where(values > 0, last, _EMPTY)


def _tiled(reduce: np.ufunc, ends: Whole, high: int, wide: int) -> Whole:
    """The ends of tiles."""
    down = reduce.reduceat(ends, np.arange(0, ends.shape[0], high), axis=0)
    found: Whole = reduce.reduceat(down, np.arange(0, ends.shape[1], wide), axis=1)
    return found
