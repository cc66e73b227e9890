"""Whether values are those of a narrower type times one factor, for all of them or for each row or column."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from halfstep.bits.evidence import CERTAIN
from halfstep.bits.places import Places
from halfstep.bits.table import tells
from halfstep.bits.tiles import COLUMN
from halfstep.formats import Float
from halfstep.kernels.cpu.looks import Repeats
from halfstep.quant.tile import ROW, Tile


Doubles = NDArray[np.float64]

_BITS = {"bf16": 8, "fp16": 11}
"""The significant bits of what is looked for."""

_WHOLE = range(8, 12)  # bits of whole numbers of one step, which are no copies; of fewer they are codes
_FEW = 4  # significant bits of codes of floating point, which are no copies
_WIDE = 24  # significant bits of a type in which a product shows what was multiplied
_SHOWN = 64  # significands that are tried on each factor
_ROUNDED = 4  # half steps by which a value over another may be off: each was rounded as it was stored, and once before


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


def _significands(magnitudes: Doubles) -> Doubles:
    found: Doubles = np.unique(np.frexp(magnitudes)[0])
    return found


def _evidence(tiles: Iterable[Doubles], bits: int, stored: int, whole: bool = False) -> float:
    """In all significands' (the `whole` values') lying on the grid, each tile's largest one at some place of it; 0 if
    they do not, or if they do without a factor.
    """
    places, total = np.arange(2.0 ** (bits - 1), 2.0**bits)[:, None], 0.0
    room = 2 * _ROUNDED * 2.0**-stored  # of a number of half steps, for those above the largest one are halved
    for magnitudes in tiles:
        found = magnitudes if whole else _significands(magnitudes)
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
