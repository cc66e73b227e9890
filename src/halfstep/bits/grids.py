"""Whether the magnitudes that share a scale lie on the grid of a format of 8 bits or less, times any number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from halfstep import formats
from halfstep.bits.evidence import CERTAIN, CHOSEN, Fit
from halfstep.bits.places import BAND, Places
from halfstep.bits.scan import LEVELS, Levels
from halfstep.bits.table import tells
from halfstep.formats import Float
from halfstep.quant.tile import ROW, Tile, block, square


Magnitudes = NDArray[np.float64]

GRIDS = {
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
    "int8": "int8",
    "int4": "uint4",  # a code of 4 bits less a zero point of 4 bits
    "float6_e2m3fn": "float6_e2m3fn",
    "float6_e3m2fn": "float6_e3m2fn",
    "float4_e2m1fn": "float4_e2m1fn",
    "nf4": "nf4",
    "bnb_fp4": "bnb_fp4",
}
"""What is looked for, and the format that has its magnitudes."""

TILES = (square(BAND), ROW, block(128), block(64), block(32), block(16))
"""Which values may share a scale, the most first: whatever fits a large tile fits the small ones in it, too."""

COLUMN = Tile(0, 1)
"""Of columns only few levels are looked for: 128 values of each."""

_BLOCKS = 64  # the first tiles of one kind, of which all are looked at, and as many of those beyond
_BEGUN = (512, 128, 64, 32)  # values of the first row which come again where each tile has few
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


def fit_tiles(places: Places, wide: Float | None, tiles: Sequence[Tile] = TILES) -> Match | None:
    """The format whose values, times a scale for each tile, are all magnitudes of every tile looked at; or None.

    Each tile may have any scale, so its largest magnitude fits by choice; of the others only those are evidence that
    are in no tile before, so that values which come again count once. A match is CERTAIN, or none: a model has
    thousands of tensors, and real blocks give hundreds of bits. Where only the first rows are such, the tiles beyond
    are counted in the match's fit.
    """
    names = _suspects(places, wide)
    for some in (places, places.first) if names else ():
        for tile in tiles:
            best = max(_fits(some, tile, names, wide), key=lambda match: match.fit.bits, default=None)
            if best is not None and best.fit.bits >= CERTAIN:
                return best if some is places else _partly(best, places, tile, wide)
    return None


def _partly(match: Match, places: Places, tile: Tile, wide: Float | None) -> Match:
    """The same match, its fit the tiles that do and those that do not."""
    grid, tiles = _grid(match.format), [np.unique(values) for values in _tiles(places, tile)]
    held = sum(_bits(levels, grid, wide, tops=grid.size) is not None for levels in tiles)
    return replace(match, fit=replace(match.fit, held=held, beyond=len(tiles) - held))


def few_levels(places: Places, wide: Float | None, used: int) -> tuple[Tile, int, float] | None:
    """The tiles of which each has few distinct magnitudes, how many at most, and the evidence; or None. Of several
    kinds the one with the most evidence a value.

    Random values of `used` significant bits come again, too: what counts is how much more often these do.
    """
    row, column = places.lines[0], places.bands[0][:, 0]
    begun = [row[:count] for count in _BEGUN if count <= row.size]
    if not any(_repeated(places, bits, wide, used) for bits in (*begun, column) if bits.size >= _BEGUN[-1]):
        return None
    found, dense = None, 0.0
    for tile in (*TILES, COLUMN):
        most, evidence, count = 0, 0.0, 0
        for values in _tiles(places, tile):
            levels = Levels(*np.unique(values, return_counts=True))
            here = repetition(levels, wide, used)
            if levels.magnitudes.size > max(CHOSEN, here and LEVELS):
                break
            most, evidence, count = max(most, levels.magnitudes.size), evidence + here, count + values.size
        else:
            if evidence >= CERTAIN and most > CHOSEN and evidence / count > dense:
                found, dense = (tile, most, evidence), evidence / count
    return found


def _repeated(places: Places, bits: NDArray[np.generic], wide: Float | None, used: int) -> bool:
    values, times = np.unique(places.magnitudes(bits), return_counts=True)
    return 8 * values.size <= 7 * times.sum() and repetition(Levels(values, times), wide, used) > 0


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


def _place(magnitude: float, wide: Float | None, used: int) -> float:
    """The number of values of so many significant bits from the smallest one to this."""
    exponent = max(int(np.frexp(magnitude)[1]) - 1, wide.min_exponent if wide else -1022)
    return float(2.0 ** (used - 1) * (exponent + magnitude * 2.0**-exponent))


def _suspects(places: Places, wide: Float | None) -> list[str]:
    """The formats that the first few values could be of, which are in one tile of any kind: nearly always none."""
    corners = (np.unique(places.magnitudes(line[: TILES[-1].columns])[:_FEW]) for line in places.lines)
    few = next((levels for levels in corners if levels.size > 1), None)
    if few is None:
        return list(GRIDS)
    if not _ratio_of_a_grid(float(few[-2] / few[-1]), float(few[-1]), wide):
        return []
    return [name for name in GRIDS if _bits(few, _grid(name), wide, tops=len(_grid(name))) is not None]


def _ratio_of_a_grid(ratio: float, largest: float, wide: Float | None) -> bool:
    """Whether two values of any grid may have this ratio: what all of a tile's magnitudes cannot fit without."""
    room = _relative(wide) * ratio + (wide.min_subnormal / largest if wide else 0.0)
    place = np.searchsorted(_ratios(), [ratio - 1.1 * room - 1e-12, ratio + 1.1 * room + 1e-12])
    return bool(place[0] < place[1])


@cache
def _ratios() -> Magnitudes:
    """Those of all pairs of values of each grid, ascending."""
    found = [(grid[:, None] / grid).ravel() for grid in map(_grid, GRIDS)]
    return np.unique(np.concatenate([ratios[ratios <= 1] for ratios in found]))


def _relative(wide: Float | None) -> float:
    """How far a value and the one that it is compared with may be off, as they were stored."""
    return 2.0 ** (1 - (wide.significant_bits if wide else 53)) * 1.01


def _fits(places: Places, tile: Tile, names: list[str], wide: Float | None) -> list[Match]:
    held, seen = 0, np.zeros(0)
    evidence = dict.fromkeys(names, -float(np.log2(len(TILES) * len(GRIDS))))
    for values in _tiles(places, tile):
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


def _tiles(places: Places, tile: Tile) -> Iterator[Magnitudes]:
    """The magnitudes in tiles of a kind, the first ones and others spread; none where a larger tile is the same."""
    matrices = (places.lines,) if tile.rows == 1 else places.bands
    rows, columns = matrices[0].shape
    if places.lines.shape[1] <= tile.columns or (tile.rows != 1 and rows == 1):
        return
    high, width = tile.rows or rows, tile.columns or columns
    counts = [-(-matrix.shape[0] // high) * -(-matrix.shape[1] // width) for matrix in matrices]
    total = sum(counts)
    step = max(-(-(total - _BLOCKS) // _BLOCKS), 1)
    for i in (*range(min(total, _BLOCKS)), *range(total - 1, _BLOCKS - 1, -step)):
        which = next(n for n in range(len(counts)) if i < sum(counts[: n + 1]))
        matrix, place = matrices[which], i - sum(counts[:which])
        down, across = divmod(place, -(-matrix.shape[1] // width))
        first, left = down * high, across * width
        values = places.magnitudes(matrix[first : first + high, left : left + width])
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
    relative = _relative(wide)
    step = wide.min_subnormal / levels[-1] if wide else 0.0
    largest = grid[-tops:, None]
    scaled = levels / levels[-1] * largest
    place = np.minimum(np.maximum(np.searchsorted(grid, scaled), 1), grid.size - 1)
    low, high = grid[place - 1], grid[place]
    near = np.where(scaled - low < high - scaled, low, high)
    tolerance = relative * near + step * largest
    fits = (np.abs(scaled - near) <= tolerance).all(1)
    if not fits.any():
        return None
    bits = -np.log2(np.minimum(2 * tolerance / (high - low), 1.0))[fits]
    best: Magnitudes = bits[bits.sum(1).argmax()]
    return best
