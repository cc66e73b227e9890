"""4- and 6-bit codes in bytes and back, within a chunk: `quant.pack` for rows that fill their bytes."""

from __future__ import annotations

import numpy as np
from numba import types

from halfstep.kernels.cpu.compiled import inner
from halfstep.kernels.cpu.lanes import lanes


@lanes(types.uint8)
def _pair(one, two, high_first):
    """Two codes in a byte; `high_first` is 4 to put the first into the upper half, else 0."""
    return (one << high_first) | (two << (high_first ^ 4))


@lanes(types.uint8)
def _first_of(byte, high_first):
    return (byte >> high_first) & 15


@lanes(types.uint8)
def _second_of(byte, high_first):
    return (byte >> (high_first ^ 4)) & 15


@lanes(types.uint8)
def _two_sixths(one, two, right, left):
    return (one >> right) | (two << left)


@lanes(types.uint8)
def _sixth_of(one, two, right, left):
    return ((one >> right) | (two << left)) & 63


@inner
def pack(codes, out, bits, high_first):
    """One code a byte to 4 or 6 bits each."""
    if bits == 4:
        for i in range(out.size):
            out[i] = _pair(codes[2 * i], codes[2 * i + 1], high_first)
    else:
        for i in range(out.size // 3):
            out[3 * i] = _two_sixths(codes[4 * i], codes[4 * i + 1], np.uint8(0), np.uint8(6))
            out[3 * i + 1] = _two_sixths(codes[4 * i + 1], codes[4 * i + 2], np.uint8(2), np.uint8(4))
            out[3 * i + 2] = _two_sixths(codes[4 * i + 2], codes[4 * i + 3], np.uint8(4), np.uint8(2))


@inner
def unpack(packed, out, bits, high_first):
    """The inverse of `pack`."""
    if bits == 4:
        for i in range(packed.size):
            out[2 * i] = _first_of(packed[i], high_first)
            out[2 * i + 1] = _second_of(packed[i], high_first)
    else:
        for i in range(packed.size // 3):
            a, b, c = packed[3 * i], packed[3 * i + 1], packed[3 * i + 2]
            out[4 * i] = _sixth_of(a, b, np.uint8(0), np.uint8(7))
            out[4 * i + 1] = _sixth_of(a, b, np.uint8(6), np.uint8(2))
            out[4 * i + 2] = _sixth_of(b, c, np.uint8(4), np.uint8(4))
            out[4 * i + 3] = _sixth_of(c, c, np.uint8(2), np.uint8(7))
