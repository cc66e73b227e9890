"""Encoding in floats and integers of at most 16 bits, packed or not (`quant.encode`), and decoding of any format."""

import numpy as np
from numba import prange, types
from torch import Tensor

from halfstep.formats import Format
from halfstep.kernels.cpu import element_codes
from halfstep.kernels.cpu.arrays import array, plain
from halfstep.kernels.cpu.compiled import CHUNK, Kernel, ends, inner, piece, specialized
from halfstep.kernels.cpu.elements import Rounding
from halfstep.kernels.cpu.lanes import INFINITY, bits_of, lanes, stored_as
from halfstep.kernels.cpu.noise import chunk_keys, noise, seed_keys
from halfstep.kernels.cpu.runs import elementwise, reduction
from halfstep.kernels.cpu.scales import larger
from halfstep.quant.cast import CONTAINERS
from halfstep.quant.rounding import Seed


# ---- 4- and 6-bit codes in bytes and back, a chunk at a time: `quant.pack` for rows that fill their bytes ------------
# A kernel writes the codes of a chunk to a buffer in the L1 cache, one byte each, and packs them from there. Codes of
# other widths are written to the output directly. Which of the two is decided when the kernel is compiled.


_GROUP = {4: 2, 6: 4}


def fills(columns: int, bits: int) -> bool:
    """Whether codes of that many bits are packed, and a row of `columns` codes fills whole bytes."""
    return bits in _GROUP and columns % _GROUP[bits] == 0


def lie_in(codes: Tensor, values: Tensor, format: Format, packed: bool) -> bool:
    """Whether `codes` has the dtype and size for the codes of `values`, unpacked or packed; for dense tensors of any
    device."""
    if codes.dtype != CONTAINERS[format.storage_bits]:
        return False
    if not packed:
        return codes.shape == values.shape
    columns = values.shape[-1] if values.dim() else 1
    return fills(columns, format.bits) and 8 * codes.numel() == values.numel() * format.bits


def shifts(format: Format) -> tuple[np.uint8, ...] | None:
    """The shifts for packing: of two 4-bit codes in a byte, or of each of three bytes that hold four 6-bit codes. None
    for codes that are not packed."""
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
    """In kernels: the array to which the codes a to b are written, one each: the output itself, or a buffer."""
    if isinstance(shifts, types.NoneType):
        return lambda out, a, b, shifts: out[a:b]
    return lambda out, a, b, shifts: np.empty(CHUNK, np.uint8)[: b - a]


@specialized
def pack(codes, out, a, b, shifts):
    """In kernels: pack the codes a to b from their `place` into `out`, if it is a buffer."""
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


# ---- codes -----------------------------------------------------------------------------------------------------------


def run(
    x: Tensor, out: Tensor, format: Format, rounding: str, overflow: str, seed: Seed | None, packed: bool = False
) -> bool | None:
    """Write the codes of x, rounded, to `out`. False: x has a NaN and the format has no code for it. None where no
    kernel supports it: both must be contiguous CPU tensors of one shape, x fp32, bf16 or fp16.

    `packed`: 4- and 6-bit codes are packed along the rows of `out`, which they fill, as by `quant.pack`.
    """
    known = element_codes.scalars(format, rounding, overflow) if plain(x) and plain(out, out.dtype) else None
    if known is None or not lie_in(out, x, format, packed):
        return None
    worst = None if format.has_nan else np.zeros(-(-x.numel() // CHUNK), np.uint32)
    keys = seed_keys(seed) if rounding == "stochastic" else None
    _encode(x.numel(), array(x), array(out), *known, worst, shifts(format) if packed else None, keys)
    return worst is None or not (worst > INFINITY).any()


def run_decode(codes: Tensor, out: Tensor, format: Format, packed: bool = False) -> bool | None:
    """Write the values of `codes` to `out`. False: a code has more bits than the format. None where no kernel supports
    it: both must be contiguous CPU tensors, as for `run`."""
    known = format.bits <= 16 and plain(out) and plain(codes, codes.dtype)
    if not known or not lie_in(codes, out, format, packed):
        return None
    size = out.numel()
    worst = None if packed or format.bits == format.storage_bits else np.zeros(-(-size // CHUNK), np.uint32)
    meaning = element_codes.decoding_scalars(format, out.dtype)
    if meaning is None:
        meaning = array(element_codes.table(format, out.dtype))
    _decode(size, array(codes), array(out), meaning, worst, shifts(format) if packed else None)
    return worst is None or not (worst >> np.uint32(format.bits)).any()


@lanes("like")
def _code(value, numbers, codes, keys, index, like):
    code = element_codes.encoded(bits_of(value), Rounding(*numbers), element_codes.Coding(*codes), noise(keys, index))
    return code.to(like.bitwidth)


@elementwise
def _decoded(code, numbers, like):
    return stored_as(element_codes.decoded(code.to(32), numbers), like)


@reduction
def _largest_code(most, code):
    return most.max(code.to(32))


@inner
def encode_piece(x, out, numbers, codes, keys, worst):
    """Write the codes of a chunk. worst[0] becomes the bits of its amax, if `worst` is given."""
    largest = np.uint32(0)
    for i in range(x.size):
        out[i] = _code(x[i], numbers, codes, keys, i, out[i])
        if worst is not None:
            largest = larger(largest, x[i])
    if worst is not None:
        worst[0] = largest


def _look_up(out, codes, meaning):
    last = meaning.size - 1
    for i in range(codes.size):
        out[i] = meaning[min(np.int64(codes[i]), last)]


@Kernel
def _encode(x, out, numbers, codes, worst, shifts, seed):
    for chunk in prange((x.size + CHUNK - 1) // CHUNK):
        a, b = ends(chunk, x.size)
        part = place(out, a, b, shifts)
        encode_piece(x[a:b], part, numbers, codes, chunk_keys(seed, chunk), piece(worst, chunk, chunk + 1))
        pack(part, out, a, b, shifts)


@specialized
def _values_piece(out, codes, meaning):
    """In kernels: write the values of codes, by arithmetic or from a table."""
    return _look_up if isinstance(meaning, types.Array) else lambda out, codes, meaning: _decoded(out, codes, meaning)


@Kernel
def _decode(codes, out, meaning, worst, shifts):
    for chunk in prange((out.size + CHUNK - 1) // CHUNK):
        a, b = ends(chunk, out.size)
        part = unpack(codes, a, b, shifts)
        _values_piece(out[a:b], part, meaning)
        if worst is not None:
            worst[chunk] = _largest_code(np.uint32(0), part)
