"""Values to values: `quant.round_to` onto floats and integers, in fp32, bf16 and fp16, at the speed of a copy."""

from __future__ import annotations

import numba
from torch import Tensor

from halfstep.formats import Format
from halfstep.kernels.cpu import elements
from halfstep.kernels.cpu.arrays import array, plain, separate
from halfstep.kernels.cpu.compiled import CHUNK, Kernel, inner, piece
from halfstep.kernels.cpu.elements import Rounding
from halfstep.kernels.cpu.lanes import bits_of, lanes, stored_as
from halfstep.kernels.cpu.noise import chunk_keys, noise, seed_keys


def supports(x: Tensor, out: Tensor, format: Format, rounding: str, overflow: str) -> bool:
    """Whether `run` can round `x` into `out`: contiguous CPU tensors of one shape, the same one or apart in memory."""
    return (
        plain(x)
        and plain(out)
        and x.shape == out.shape
        and elements.knows(format)
        and elements.holds(format, overflow, x.dtype, out.dtype)
        and separate(x, out)
    )


def run(x: Tensor, out: Tensor, format: Format, rounding: str, overflow: str, seed: int | None) -> None:
    """Write `x`, rounded, to `out`. `seed` keys the noise of stochastic rounding (`quant.noise_bits`)."""
    numbers = elements.scalars(format, rounding, overflow, out.dtype)
    source, target = array(x), None if x.data_ptr() == out.data_ptr() else array(out)
    if rounding == "nearest_even":
        _nearest(x.numel(), source, target, numbers)
    elif rounding == "stochastic":
        _stochastic(x.numel(), source, target, numbers, seed_keys(seed))
    else:
        _directed(x.numel(), source, target, numbers)


@lanes("like")
def _nearest_element(value, numbers, like):
    return stored_as(elements.nearest(bits_of(value), Rounding(*numbers)), like)


@lanes("like")
def _directed_element(value, numbers, like):
    return stored_as(elements.directed(bits_of(value), Rounding(*numbers)), like)


@lanes("like")
def _stochastic_element(value, numbers, index, keys, like):
    return stored_as(elements.stochastic(bits_of(value), noise(keys, index), Rounding(*numbers)), like)


# Without `out` a kernel works in place: with it, the loop is compiled for arrays that do not overlap.


@inner
def _nearest_piece(x, out, numbers):
    if out is None:
        for i in range(x.size):
            x[i] = _nearest_element(x[i], numbers, x[i])
    else:
        for i in range(x.size):
            out[i] = _nearest_element(x[i], numbers, out[i])


@inner
def _directed_piece(x, out, numbers):
    if out is None:
        for i in range(x.size):
            x[i] = _directed_element(x[i], numbers, x[i])
    else:
        for i in range(x.size):
            out[i] = _directed_element(x[i], numbers, out[i])


@inner
def _stochastic_piece(x, out, numbers, keys):
    if out is None:
        for i in range(x.size):
            x[i] = _stochastic_element(x[i], numbers, i, keys, x[i])
    else:
        for i in range(x.size):
            out[i] = _stochastic_element(x[i], numbers, i, keys, out[i])


@Kernel
def _nearest(x, out, numbers):
    for chunk in numba.prange((x.size + CHUNK - 1) // CHUNK):
        a = chunk * CHUNK
        b = min(a + CHUNK, x.size)
        _nearest_piece(x[a:b], piece(out, a, b), numbers)


@Kernel
def _directed(x, out, numbers):
    for chunk in numba.prange((x.size + CHUNK - 1) // CHUNK):
        a = chunk * CHUNK
        b = min(a + CHUNK, x.size)
        _directed_piece(x[a:b], piece(out, a, b), numbers)


@Kernel
def _stochastic(x, out, numbers, seed):
    for chunk in numba.prange((x.size + CHUNK - 1) // CHUNK):
        a = chunk * CHUNK
        b = min(a + CHUNK, x.size)
        _stochastic_piece(x[a:b], piece(out, a, b), numbers, chunk_keys(seed, chunk))
