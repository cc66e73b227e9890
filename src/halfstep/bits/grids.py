"""Whether the magnitudes that share a scale lie on the grid of a format of 8 bits or less, times any number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from halfstep import formats
from halfstep.bits.evidence import CERTAIN, CHOSEN, Fit
from halfstep.bits.scan import BAND, Corner
from halfstep.bits.table import tells
from halfstep.formats import Float
from halfstep.quant.tile import ROW, Tile, block, square


Magnitudes = NDArray[np.float64]

GRIDS = {
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
    "int8": "int8",
    "int4": "uint4",  # a code of 4 bits less a zero point of 4 bits
    "float4_e2m1fn": "float4_e2m1fn",
    "nf4": "nf4",
}
"""What is looked for, and the format that has its magnitudes."""

TILES = (square(BAND), ROW, block(128), block(64), block(32), block(16))
"""Which values may share a scale, the most first: whatever fits a large tile fits the small ones in it, too."""

_BLOCKS = 64  # tiles of one kind that are looked at
_FEW = 10  # values of a tile that say no to nearly all that do not fit
_TOPS = 16  # a tile's largest magnitude is one of so many of the grid's largest


@dataclass(frozen=True)
class Match:
    """A format; all magnitudes are its values times a scale for each `tile` (None: one for the whole tensor)."""

    format: str
    tile: Tile | None
    fit: Fit


def fit_levels(levels: Magnitudes, wide: Float | None) -> Match | None:
    """The format whose values, times one scale, are all of a tensor's distinct magnitudes (ascending); or None.

    Of several, it is the one with the most evidence, which is the coarsest; the largest levels fit by choice.
    """
    found = []
    for name in GRIDS:
        bits = _bits(levels, _grid(name), wide)
        if bits is not None:
            weight = bits[tells(levels)][:-CHOSEN].sum() - np.log2(_TOPS * len(GRIDS))
            found.append(Match(name, None, Fit(levels.size, 0, max(float(weight), 0.0))))
    best = max(found, key=lambda match: match.fit.bits, default=None)
    return best if best is not None and best.fit.accepted else None


def fit_tiles(corner: Corner, wide: Float | None) -> Match | None:
    """The format whose values, times a scale for each tile, are all magnitudes of every tile looked at; or None.

    Each tile may have any scale, so its largest magnitude fits by choice; of the others only those are evidence that
    are in no tile before, so that values which come again count once. A match is CERTAIN, or none: a model has
    thousands of tensors, and real blocks give hundreds of bits.
    """
    names = _suspects(corner, wide)
    for tile in TILES if names else ():
        best = max(_fits(corner, tile, names, wide), key=lambda match: match.fit.bits, default=None)
        if best is not None and best.fit.bits >= CERTAIN:
            return best
    return None


def _suspects(corner: Corner, wide: Float | None) -> list[str]:
    """The formats that the first few values could be of, which are in one tile of any kind: nearly always none."""
    corners = (np.unique(corner.magnitudes(line[: TILES[-1].columns])[:_FEW]) for line in corner.lines)
    few = next((levels for levels in corners if levels.size > 1), None)
    if few is None:
        return list(GRIDS)
    return [name for name in GRIDS if _bits(few, _grid(name), wide, tops=len(_grid(name))) is not None]


def _fits(corner: Corner, tile: Tile, names: list[str], wide: Float | None) -> list[Match]:
    held, seen = 0, np.zeros(0)
    evidence = dict.fromkeys(names, -float(np.log2(len(TILES) * len(GRIDS))))
    for values in _tiles(corner, tile):
        levels = np.unique(values)
        if levels.size == 1:  # fits every grid
            seen = np.union1d(seen, levels)
            continue
        new = ~np.isin(levels[:-1], seen)
        found = {name: _bits(levels, _grid(name), wide) for name in evidence}
        evidence = {
            name: evidence[name] + max(float(bits[:-1][new].sum() - np.log2(_TOPS)), 0.0)
            for name, bits in found.items()
            if bits is not None
        }
        if not evidence:
            break
        held, seen = held + levels.size, np.union1d(seen, levels)
    return [Match(name, tile, Fit(held, 0, max(bits, 0.0))) for name, bits in evidence.items()]


def _tiles(corner: Corner, tile: Tile) -> Iterator[Magnitudes]:
    """The magnitudes in the first tiles of a kind; none where a larger tile is the same."""
    matrix = corner.band if tile.rows > 1 else corner.lines
    rows, columns = matrix.shape
    if corner.lines.shape[1] <= tile.columns or (tile.rows > 1 and rows == 1):
        return
    width = tile.columns or columns
    places = ((first, left) for first in range(0, rows, tile.rows) for left in range(0, columns, width))
    for first, left in islice(places, _BLOCKS):
        values = corner.magnitudes(matrix[first : first + tile.rows, left : left + width])
        if values.size:
            yield values


@cache
def _grid(name: str) -> Magnitudes:
    values = np.abs(np.array([float(v) for v in formats.get(GRIDS[name]).values()]))
    return np.unique(values[np.isfinite(values) & (values != 0)])


def _bits(levels: Magnitudes, grid: Magnitudes, wide: Float | None, tops: int = _TOPS) -> Magnitudes | None:
    """Of each level the bits of evidence in its lying on the grid times one scale; None if they do not all.

    The largest level is one of the `tops` largest values. Another is found if it lies within two roundings to `wide`
    (its own and the largest one's) of a value of the grid times the scale. A random one would by the chance that this
    width has in the room between two values.
    """
    if levels.size > grid.size:
        return None
    relative = 2.0 ** (1 - (wide.significant_bits if wide else 53)) * 1.01
    step = wide.min_subnormal / levels[-1] if wide else 0.0
    largest = grid[-tops:, None]
    scaled = levels / levels[-1] * largest
    place = np.clip(np.searchsorted(grid, scaled), 1, grid.size - 1)
    low, high = grid[place - 1], grid[place]
    near = np.where(scaled - low < high - scaled, low, high)
    tolerance = relative * near + step * largest
    fits = (np.abs(scaled - near) <= tolerance).all(1)
    if not fits.any():
        return None
    bits = -np.log2(np.minimum(2 * tolerance / (high - low), 1.0))[fits]
    best: Magnitudes = bits[bits.sum(1).argmax()]
    return best
