"""Whether values on the grid of a quantiser are another tensor's, rounded to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from halfstep.bits.origin import Origin
from halfstep.bits.pair import Doubles, Pair
from halfstep.bits.places import matrix_of
from halfstep.quant.tile import ROW, TENSOR, Tile, block, square


_TILES = {"row": ROW, "128x128": square(128), "2^k": block(32), **{f"1x{n}": block(n) for n in (16, 32, 64, 128)}}
"""By the names that an origin gives to what shares a scale."""

_LOOKED_AT = 256  # tiles, spread over the tensor
_LEVELS = 512  # distinct values of a tile, of 8 bits with signs
_ROOM = 2.0  # times half a step, by which values of a grid and the middles between them were rounded when stored


@dataclass(frozen=True)
class Requantised:
    """B's values lie on a grid; how many of A's values went to the nearest of the grid's values in use there."""

    grid: str
    """The format, and what shares a scale."""
    nearest: float
    """The share of the values looked at."""
    looked_at: int
    all: bool
    """Whether these are all values."""


def requantised(pair: Pair, origin: Origin, significant_bits: int) -> Requantised | None:
    """How B's values follow from A's, where B's bits say that they lie on a grid; None where they do not say so.

    Of each tile the values in use are the grid. A value counts as the nearest one if no other value in use is nearer by
    more than the rounding of both, which have so many significant bits as they are stored.
    """
    if not origin.through or origin.scale is None or origin.share < 1 or origin.through[0] in ("bf16", "fp16"):
        return None
    tile = _TILES.get(origin.scale, TENSOR)
    nearest = count = 0
    for a, b in _tiles(pair, tile):
        levels = np.unique(b)
        if levels.size > _LEVELS or not (np.isfinite(a).all() and np.isfinite(b).all()):
            return None
        between = (levels[1:] + levels[:-1]) / 2
        best = levels[np.searchsorted(between, a)]
        room = _ROOM * 2.0**-significant_bits * np.maximum(np.abs(best), np.abs(b))
        nearest += int((np.abs(a - b) <= np.abs(a - best) + room).sum())
        count += a.size
    named = f"{origin.through[0]}, {_words(origin.scale)}"
    return Requantised(named, nearest / count, count, count == pair.a.numel) if count else None


def _words(scale: str) -> str:
    if scale == "any":
        return "one scale"
    if scale == "row":
        return "a scale a row"
    return f"scales of {scale}" if scale.startswith("2^") else f"a scale for each {scale} block"


def _tiles(pair: Pair, tile: Tile) -> Iterator[tuple[Doubles, Doubles]]:
    """Values of some tiles, spread over the tensor; where all of it shares its scales, runs of it."""
    columns = matrix_of(pair.a.shape)[1] or pair.a.numel
    if tile == TENSOR:
        yield from pair.runs()
        return
    high, width = tile.rows or 1, tile.columns or columns
    bands = -(-(pair.a.numel // columns) // high)
    across = -(-columns // width)
    step = max(bands * across // _LOOKED_AT, 1)
    for i, (a, b) in enumerate(pair.runs(high * columns)):
        one, other = a.reshape(-1, columns), b.reshape(-1, columns)
        for j in range(-i * across % step, across, step):
            place = slice(j * width, (j + 1) * width)
            yield one[:, place].ravel(), other[:, place].ravel()
