"""Which values of a tensor may share a scale, and what that is called."""

from __future__ import annotations

from halfstep.bits.places import BAND
from halfstep.quant.tile import ROW, Tile, block, square


TILES = (square(BAND), ROW, block(128), block(64), block(32), block(16))
"""Which values may share a scale, the most first: whatever fits a large tile fits the small ones in it, too."""

COLUMN = Tile(0, 1)
"""Of columns only few levels, and factors, are looked for: 128 values of each."""


def named(tile: Tile | None) -> str:
    """A tile in a word; "any" for the whole tensor, whose scale may have any size."""
    return {ROW: "row", COLUMN: "column"}.get(tile, str(tile)) if tile is not None else "any"
