"""Moments that are codes of a byte with a scale a tile, read and written by Adam's kernel a tile at a time.

Codes are decoded in the loop that updates the weight, and written as soon as the tile's maximum is known. A tile stays
in the registers and in the nearest cache, and memory is read while other tiles are computed with. Decoding a whole
chunk, then updating, then encoding it (`coded.opened`, `coded.closed`) leaves memory idle in two of three loops and
waits for it in the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from halfstep.kernels.cpu import element_codes
from halfstep.kernels.cpu.adam_lanes import decode, encode
from halfstep.kernels.cpu.codebook import encode_block
from halfstep.kernels.cpu.compiled import inner_overload
from halfstep.kernels.cpu.dequantize import half_scale, larger_code
from halfstep.kernels.cpu.divided import element, scaled
from halfstep.kernels.cpu.element_codes import Decoding
from halfstep.kernels.cpu.lanes import lanes


def multiplier(kept: Any, start: Any, tile: Any, scale: Any, decoding: Any) -> Any:
    """In kernels: what `number` multiplies the codes of a tile by; NaN where that would not give their values."""
    raise NotImplementedError


def open_tile(kept: Any, start: Any, tile: Any, times: Any, decoding: Any, values: Any) -> Any:
    """In kernels: before `number` is asked for those of a tile: what is looked up is so here, in a loop of its own."""
    raise NotImplementedError


def number(kept: Any, i: Any, values: Any, k: Any, times: Any, decoding: Any) -> Any:
    """In kernels: number i as float32, of an array of numbers or, as k of its tile, of codes multiplied by `times`."""
    raise NotImplementedError


def keep_number(kept: Any, i: Any, values: Any, k: Any, new: Any) -> Any:
    """In kernels: a new number, rounded, to place i of an array of numbers; of codes, to place k of a tile's values."""
    raise NotImplementedError


def encode_tile(values: Any, scale: Any, kept: Any, start: Any, tile: Any, numbers: Any, codes: Any) -> Any:
    """In kernels: the values of a tile to codes, from `start` on."""
    raise NotImplementedError


# ---- decoding ------------------------------------------------------------------------------------------------------


@lanes(types.float32)
def _from_half(code, times, decoding):
    return element_codes.half_of(code, Decoding(*decoding)) * times


@lanes(types.float32)
def _from_table(value, scale):
    return scaled(value, scale, types.uint32)


@inner_overload(open_tile, inlined=True)
def _open_tile(kept, start, tile, times, decoding, values):
    size = 1 << len(tile)

    def looked_up(kept, start, tile, times, decoding, values):
        for i in range(size):
            values[i] = decoding[kept[start + i]]
        for i in range(size):
            values[i] = _from_table(values[i], times)

    def nothing(kept, start, tile, times, decoding, values):
        pass

    return looked_up if isinstance(decoding, types.Array) else nothing


@inner_overload(number, inlined=True)
def _number(kept, i, values, k, times, decoding):
    if isinstance(decoding, types.NoneType):
        return lambda kept, i, values, k, times, decoding: decode(kept[i])
    if isinstance(decoding, types.Array):
        return lambda kept, i, values, k, times, decoding: values[k]
    return lambda kept, i, values, k, times, decoding: _from_half(kept[i], times, decoding)


@inner_overload(keep_number, inlined=True)
def _keep_number(kept, i, values, k, new):
    if isinstance(values, types.NoneType):

        def stored(kept, i, values, k, new):
            kept[i] = encode(new, kept[i])

        return stored

    def beside(kept, i, values, k, new):
        values[k] = new

    return beside


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

    return own if isinstance(decoding, types.Array) else of_halves


# ---- encoding ------------------------------------------------------------------------------------------------------


@inner_overload(encode_tile, inlined=True)
def _encode_tile(values, scale, kept, start, tile, numbers, codes):
    size = 1 << len(tile)

    def floats(values, scale, kept, start, tile, numbers, codes):
        if scale > 0:
            for i in range(size):
                kept[start + i] = element(values[i], scale, numbers, codes, None, None, i, kept[start + i])
        else:  # of zeros, or lost
            kept[start : start + size] = 0

    def places(values, scale, kept, start, tile, numbers, codes):
        encode_block(values, 0, size, scale, values.view(np.uint32), codes, kept, start)

    return places if isinstance(numbers, types.NoneType) else floats
