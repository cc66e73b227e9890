"""Values to codes, packed or not: `quant.encode` onto floats and integers of at most 16 bits; back, from any format."""

import numba
import numpy as np
from numba import types
from torch import Tensor

from halfstep.formats import Format
from halfstep.kernels.cpu import element_codes, packing
from halfstep.kernels.cpu.arrays import array, plain
from halfstep.kernels.cpu.compiled import CHUNK, Kernel, ends, inner, piece, specialized
from halfstep.kernels.cpu.element_codes import Coding
from halfstep.kernels.cpu.elements import Rounding
from halfstep.kernels.cpu.lanes import INFINITY, bits_of, lanes, stored_as
from halfstep.kernels.cpu.noise import chunk_keys, noise, seed_keys
from halfstep.kernels.cpu.runs import elementwise, reduction
from halfstep.kernels.cpu.scales import larger
from halfstep.quant.rounding import Seed


def run(
    x: Tensor, out: Tensor, format: Format, rounding: str, overflow: str, seed: Seed | None, packed: bool = False
) -> bool | None:
    """Write the codes of `x`, rounded, to `out`. False: there is NaN in x, and the format has no code for it. None
    where that is not done here: it takes contiguous CPU tensors of equal shape, fp32, bf16 or fp16.

    `packed`: 4- and 6-bit codes go to the rows of `out` as `quant.pack` puts them there, and fill them.
    """
    known = element_codes.scalars(format, rounding, overflow) if plain(x) and plain(out, out.dtype) else None
    if known is None or not packing.lie_in(out, x, format, packed):
        return None
    worst = None if format.has_nan else np.zeros(-(-x.numel() // CHUNK), np.uint32)
    keys = seed_keys(seed) if rounding == "stochastic" else None
    shifts = packing.shifts(format) if packed else None
    _encode(x.numel(), array(x), array(out), *known, worst, shifts, keys)
    return worst is None or not (worst > INFINITY).any()


def run_decode(codes: Tensor, out: Tensor, format: Format, packed: bool = False) -> bool | None:
    """Write the values of `codes` to `out`. False: there is a code with more bits than the format has. None where that
    is not done here: it takes contiguous CPU tensors, as `run` does."""
    known = format.bits <= 16 and plain(out) and plain(codes, codes.dtype)
    if not known or not packing.lie_in(codes, out, format, packed):
        return None
    size = out.numel()
    shifts = packing.shifts(format) if packed else None
    worst = None if packed or format.bits == format.storage_bits else np.zeros(-(-size // CHUNK), np.uint32)
    meaning = element_codes.decoding_scalars(format, out.dtype)
    if meaning is None:
        meaning = array(element_codes.table(format, out.dtype))
    _decode(size, array(codes), array(out), meaning, worst, shifts)
    return worst is None or not (worst >> np.uint32(format.bits)).any()


@lanes("like")
def _code(value, numbers, codes, keys, index, like):
    code = element_codes.encoded(bits_of(value), Rounding(*numbers), Coding(*codes), noise(keys, index))
    return code.to(like.bitwidth)


@elementwise
def _decoded(code, numbers, like):
    return stored_as(element_codes.decoded(code.to(32), numbers), like)


@reduction
def _largest_code(most, code):
    return most.max(code.to(32))


@inner
def encode_piece(x, out, numbers, codes, keys, worst):
    """The codes of a chunk. worst[0] becomes the largest magnitude's bits, where there is a `worst`."""
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
    for chunk in numba.prange((x.size + CHUNK - 1) // CHUNK):
        a, b = ends(chunk, x.size)
        part = packing.place(out, a, b, shifts)
        encode_piece(x[a:b], part, numbers, codes, chunk_keys(seed, chunk), piece(worst, chunk, chunk + 1))
        packing.pack(part, out, a, b, shifts)


@specialized
def _values_piece(out, codes, meaning):
    """In kernels: the values of codes, by arithmetic or from a table."""
    return _look_up if isinstance(meaning, types.Array) else lambda out, codes, meaning: _decoded(out, codes, meaning)


@Kernel
def _decode(codes, out, meaning, worst, shifts):
    for chunk in numba.prange((out.size + CHUNK - 1) // CHUNK):
        a, b = ends(chunk, out.size)
        part = packing.unpack(codes, a, b, shifts)
        _values_piece(out[a:b], part, meaning)
        if worst is not None:
            worst[chunk] = _largest_code(np.uint32(0), part)
