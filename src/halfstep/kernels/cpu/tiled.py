"""Moments that are codes of a byte with a scale a tile, read and written by the optimizer's kernel a tile at a time.

Codes are decoded in the loop that updates the weight, and written as soon as the tile's maximum is known. A tile stays
in the registers and in the nearest cache, and memory is read while other tiles are computed with. Decoding a whole
chunk, then updating, then encoding it (`coded.opened`, `coded.closed`) leaves memory idle in two of three loops and
waits for it in the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from halfstep.kernels.cpu.codebook import encode_block
from halfstep.kernels.cpu.compiled import inner_overload
from halfstep.kernels.cpu.dequantize import half_scale, larger_code
from halfstep.kernels.cpu.divided import rounded, scaled
from halfstep.kernels.cpu.lanes import lanes


def multiplier(kept: Any, start: Any, tile: Any, scale: Any, decoding: Any) -> Any:
    """In kernels: what the codes of a tile are multiplied by; NaN where that would not give their values."""
    raise NotImplementedError


def open_tile(kept: Any, start: Any, tile: Any, times: Any, decoding: Any, values: Any, place: Any) -> Any:
    """In kernels: what is looked up is so here, in a loop of its own, to values from `place` on."""
    raise NotImplementedError


def encode_tile(values: Any, place: Any, scale: Any, kept: Any, start: Any, tile: Any, numbers: Any, codes: Any) -> Any:
    """In kernels: the values of a tile, from `place` on, to codes, from `start` on. Values before them may be lost."""
    raise NotImplementedError


# ---- decoding ------------------------------------------------------------------------------------------------------


@lanes(types.float32)
def _from_table(value, scale):
    return scaled(value, scale, types.uint32)


@inner_overload(open_tile, inlined=True)
def _open_tile(kept, start, tile, times, decoding, values, place):
    size = 1 << len(tile)

    def looked_up(kept, start, tile, times, decoding, values, place):
        for i in range(size):
            values[place + i] = decoding[kept[start + i]]
        for i in range(size):
            values[place + i] = _from_table(values[place + i], times)

    def nothing(kept, start, tile, times, decoding, values, place):
        pass

    return nothing if isinstance(decoding, types.BaseTuple) else looked_up


@inner_overload(multiplier, inlined=True)
def _multiplier(kept, start, tile, scale, decoding):
    size = 1 << len(tile)

    def of_halves(kept, start, tile, scale, decoding):
        most = np.uint8(0)
        for i in range(size):
            most = larger_code(most, kept[start + i], decoding)
        times = half_scale(scale, most, decoding)
        return times if times > 0 else np.float32(np.nan)

    def own(kept, start, tile, scale, decoding):
        return scale

    return of_halves if isinstance(decoding, types.BaseTuple) else own


# ---- encoding ------------------------------------------------------------------------------------------------------


@inner_overload(encode_tile, inlined=True)
def _encode_tile(values, place, scale, kept, start, tile, numbers, codes):
    size = 1 << len(tile)

    def floats(values, place, scale, kept, start, tile, numbers, codes):
        if scale > 0:
            for i in range(size):
                kept[start + i] = rounded(
                    values[place + i], scale, None, None, numbers, codes, None, None, i, kept[start + i]
                )
        else:  # of zeros, or lost
            for i in range(size):
                kept[start + i] = 0

    def places(values, place, scale, kept, start, tile, numbers, codes):
        encode_block(values, place, size, scale, values.view(np.uint32), codes, kept, start)

    return places if isinstance(numbers, types.NoneType) else floats
