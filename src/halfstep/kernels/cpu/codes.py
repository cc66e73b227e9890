"""Values to unpacked codes: `quant.encode` onto floats and integers of at most 16 bits; and back, from any format."""

from __future__ import annotations

import numba
import numpy as np
import torch
from numba import types
from torch import Tensor

from halfstep.formats import Float, Format
from halfstep.kernels.cpu import coding, elements
from halfstep.kernels.cpu.arrays import array, plain
from halfstep.kernels.cpu.coding import Coding, Decoding
from halfstep.kernels.cpu.compiled import CHUNK, Kernel, inner, piece
from halfstep.kernels.cpu.elements import Rounding
from halfstep.kernels.cpu.lanes import INFINITY, MAGNITUDE, bits_of, lanes, stored_as
from halfstep.kernels.cpu.noise import chunk_keys, noise, seed_keys


_CONTAINERS = {8: torch.uint8, 16: torch.uint16}


def supports(x: Tensor, out: Tensor, format: Format, rounding: str, overflow: str) -> bool:
    """Whether `run` can write the codes of `x` to `out`: contiguous CPU tensors of equal shape, fp32, bf16 or fp16."""
    return plain(x) and coding.knows(format) and plain(out, _CONTAINERS[format.storage_bits]) and x.shape == out.shape


def run(x: Tensor, out: Tensor, format: Format, rounding: str, overflow: str, seed: int | None) -> bool:
    """Write the codes of `x`, rounded, to `out`. False: there is NaN in x, and the format has no code for it."""
    numbers, codes = coding.scalars(format, rounding, overflow)
    worst = None if format.has_nan else np.zeros(-(-x.numel() // CHUNK), np.uint32)
    keys = seed_keys(seed) if rounding == "stochastic" else None
    _encode(x.numel(), array(x), array(out), numbers, codes, worst, keys)
    return worst is None or not (worst > INFINITY).any()


def supports_decode(codes: Tensor, out: Tensor, format: Format) -> bool:
    """Whether `run_decode` can write the values of `codes` to `out`: contiguous CPU tensors of equal shape."""
    return (
        format.bits <= 16
        and plain(codes, _CONTAINERS[format.storage_bits])
        and plain(out)
        and codes.shape == out.shape
        and (not coding.knows_codes(format) or elements.holds(format, "ieee", torch.float64, out.dtype))
    )


def run_decode(codes: Tensor, out: Tensor, format: Format) -> bool:
    """Write the values of `codes` to `out`. False: there is a code with more bits than the format has."""
    size = codes.numel()
    worst = None if format.bits == format.storage_bits else np.zeros(-(-size // CHUNK), np.uint32)
    if isinstance(format, Float) and coding.knows_codes(format):
        _decode(size, array(codes), array(out), coding.decoding_scalars(format), worst)
    else:
        _look_up(size, array(codes), array(out), array(coding.table(format, out.dtype)), worst)
    return worst is None or not (worst >> np.uint32(format.bits)).any()


@lanes("like")
def _code(value, numbers, codes, keys, index, like):
    code = coding.encoded(bits_of(value), Rounding(*numbers), Coding(*codes), noise(keys, index))
    return code.to(like.bitwidth)


@lanes("like")
def _decoded(code, numbers, like):
    return stored_as(coding.decoded(code.to(32), Decoding(*numbers)), like)


@lanes(types.uint32)
def _larger_magnitude(worst, value):
    return worst.max(bits_of(value) & MAGNITUDE)


@lanes(types.uint32)
def _larger_code(worst, code):
    return worst.max(code.to(32))


@inner
def _encode_piece(x, out, numbers, codes, keys):
    for i in range(x.size):
        out[i] = _code(x[i], numbers, codes, keys, i, out[i])


@inner
def _decode_piece(codes, out, numbers):
    for i in range(codes.size):
        out[i] = _decoded(codes[i], numbers, out[i])


@inner
def _look_up_piece(codes, out, table):
    last = table.size - 1
    for i in range(codes.size):
        out[i] = table[min(np.int64(codes[i]), last)]


@inner
def _note_magnitude(x, worst):
    """worst[0] becomes the largest magnitude's bits; without `worst` nothing is done."""
    if worst is not None:
        largest = worst[0]
        for i in range(x.size):
            largest = _larger_magnitude(largest, x[i])
        worst[0] = largest


@inner
def _note_code(codes, worst):
    if worst is not None:
        largest = worst[0]
        for i in range(codes.size):
            largest = _larger_code(largest, codes[i])
        worst[0] = largest


@Kernel
def _encode(x, out, numbers, codes, worst, seed):
    for chunk in numba.prange((x.size + CHUNK - 1) // CHUNK):
        a = chunk * CHUNK
        b = min(a + CHUNK, x.size)
        _encode_piece(x[a:b], out[a:b], numbers, codes, chunk_keys(seed, chunk))
        _note_magnitude(x[a:b], piece(worst, chunk, chunk + 1))


@Kernel
def _decode(codes, out, numbers, worst):
    for chunk in numba.prange((codes.size + CHUNK - 1) // CHUNK):
        a = chunk * CHUNK
        b = min(a + CHUNK, codes.size)
        _decode_piece(codes[a:b], out[a:b], numbers)
        _note_code(codes[a:b], piece(worst, chunk, chunk + 1))


@Kernel
def _look_up(codes, out, table, worst):
    for chunk in numba.prange((codes.size + CHUNK - 1) // CHUNK):
        a = chunk * CHUNK
        b = min(a + CHUNK, codes.size)
        _look_up_piece(codes[a:b], out[a:b], table)
        _note_code(codes[a:b], piece(worst, chunk, chunk + 1))
