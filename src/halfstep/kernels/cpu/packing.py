"""4- and 6-bit codes in bytes and back, a chunk at a time: `quant.pack` for rows that fill their bytes.

A kernel writes the codes of a chunk a byte each, to a buffer that stays in the nearest cache, and packs them from
there. Codes of other widths go where they belong at once: what kind of codes these are, a kernel knows when it is
compiled.
"""

import numpy as np
from numba import types
from torch import Tensor

from halfstep.formats import Format
from halfstep.kernels.cpu.compiled import CHUNK, inner, specialized
from halfstep.kernels.cpu.lanes import lanes
from halfstep.quant.cast import CONTAINERS


_GROUP = {4: 2, 6: 4}


def fills(columns: int, bits: int) -> bool:
    """Whether codes of that many bits are packed, and rows of so many of them leave no bits over."""
    return bits in _GROUP and columns % _GROUP[bits] == 0


def lie_in(codes: Tensor, values: Tensor, format: Format, packed: bool) -> bool:
    """Whether these can be the codes of so many values, of dense tensors anywhere: a container each, or packed."""
    if codes.dtype != CONTAINERS[format.storage_bits]:
        return False
    if not packed:
        return codes.shape == values.shape
    columns = values.shape[-1] if values.dim() else 1
    return fills(columns, format.bits) and 8 * codes.numel() == values.numel() * format.bits


def shifts(format: Format) -> tuple[np.uint8, ...] | None:
    """How kernels pack: the places of two codes in a byte, or the bits that each of three bytes skips, or not."""
    if format.bits == 4:
        return (np.uint8(4), np.uint8(0)) if format.high_nibble_first else (np.uint8(0), np.uint8(4))
    return (np.uint8(0), np.uint8(2), np.uint8(4)) if format.bits == 6 else None


@lanes(types.uint8)
def _pair(one, two, shifts):
    return (one << shifts[0]) | (two << shifts[1])


@lanes(types.uint8)
def _half(byte, shift):
    return (byte >> shift) & 15


@lanes(types.uint8)
def _two_sixths(one, two, right):
    return (one >> right) | (two << (right.constant(6) - right))


@lanes(types.uint8)
def _sixth_of(one, two, right, left):
    return ((one >> right) | (two << left)) & 63


@inner
def _pack_pairs(codes, out, shifts):
    for i in range(out.size):
        out[i] = _pair(codes[2 * i], codes[2 * i + 1], shifts)


@inner
def _pack_sixths(codes, out, shifts):
    for i in range(out.size // 3):
        one, two = codes[4 * i + 1], codes[4 * i + 2]
        out[3 * i] = _two_sixths(codes[4 * i], one, shifts[0])
        out[3 * i + 1] = _two_sixths(one, two, shifts[1])
        out[3 * i + 2] = _two_sixths(two, codes[4 * i + 3], shifts[2])


@inner
def _unpack_pairs(packed, out, shifts):
    for i in range(packed.size):
        out[2 * i] = _half(packed[i], shifts[0])
        out[2 * i + 1] = _half(packed[i], shifts[1])


@inner
def _unpack_sixths(packed, out):
    for i in range(packed.size // 3):
        a, b, c = packed[3 * i], packed[3 * i + 1], packed[3 * i + 2]
        out[4 * i] = _sixth_of(a, b, np.uint8(0), np.uint8(7))
        out[4 * i + 1] = _sixth_of(a, b, np.uint8(6), np.uint8(2))
        out[4 * i + 2] = _sixth_of(b, c, np.uint8(4), np.uint8(4))
        out[4 * i + 3] = _sixth_of(c, c, np.uint8(2), np.uint8(7))


@specialized
def place(out, a, b, shifts):
    """In kernels: where the codes a to b are written, one each."""
    if isinstance(shifts, types.NoneType):
        return lambda out, a, b, shifts: out[a:b]
    return lambda out, a, b, shifts: np.empty(CHUNK, np.uint8)[: b - a]


@specialized
def pack(codes, out, a, b, shifts):
    """In kernels: the codes a to b, written to their `place`, to where they belong in `out`."""
    if isinstance(shifts, types.NoneType):
        return lambda codes, out, a, b, shifts: None
    if len(shifts) == 2:
        return lambda codes, out, a, b, shifts: _pack_pairs(codes, out[a // 2 : b // 2], shifts)
    return lambda codes, out, a, b, shifts: _pack_sixths(codes, out[a // 4 * 3 : b // 4 * 3], shifts)


@specialized
def unpack(packed, a, b, shifts):
    """In kernels: the codes a to b, one each."""
    if isinstance(shifts, types.NoneType):
        return lambda packed, a, b, shifts: packed[a:b]
    if len(shifts) == 2:

        def pairs(packed, a, b, shifts):
            codes = np.empty(CHUNK, np.uint8)[: b - a]
            _unpack_pairs(packed[a // 2 : b // 2], codes, shifts)
            return codes

        return pairs

    def sixths(packed, a, b, shifts):
        codes = np.empty(CHUNK, np.uint8)[: b - a]
        _unpack_sixths(packed[a // 4 * 3 : b // 4 * 3], codes)
        return codes

    return sixths
