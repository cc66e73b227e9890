"""Values to values: `quant.round_to` onto floats and integers, in fp32, bf16 and fp16, at the speed of a copy."""

from __future__ import annotations

from typing import Any

import numba
import torch
from numba import types
from torch import Tensor

from halfstep.formats import Format
from halfstep.kernels.cpu import elements, narrow
from halfstep.kernels.cpu.arrays import array, plain, separate
from halfstep.kernels.cpu.compiled import CHUNK, Kernel, inner, piece
from halfstep.kernels.cpu.elements import Rounding
from halfstep.kernels.cpu.lanes import bits_of, lanes, stored_as
from halfstep.kernels.cpu.narrow import Narrow
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
    numbers: Any = elements.scalars(format, rounding, overflow, out.dtype)
    if rounding == "nearest_even" and x.dtype == out.dtype == torch.bfloat16:
        numbers = narrow.scalars(format, overflow)
    target = None if x.data_ptr() == out.data_ptr() else array(out)
    _values(x.numel(), array(x), target, numbers, seed_keys(seed) if rounding == "stochastic" else None)


@lanes("like")
def _rounded(value, numbers, keys, index, like):
    if numbers[0].stored == types.uint16:
        return narrow.rounded(value, Narrow(*numbers))
    return stored_as(elements.rounded(bits_of(value), Rounding(*numbers), noise(keys, index)), like)


@inner
def _piece(x, out, numbers, keys):
    if out is None:  # in place; with `out`, the loop is compiled for arrays that do not overlap
        for i in range(x.size):
            x[i] = _rounded(x[i], numbers, keys, i, x[i])
    else:
        for i in range(x.size):
            out[i] = _rounded(x[i], numbers, keys, i, out[i])


@Kernel
def _values(x, out, numbers, seed):
    for chunk in numba.prange((x.size + CHUNK - 1) // CHUNK):
        a = chunk * CHUNK
        b = min(a + CHUNK, x.size)
        _piece(x[a:b], piece(out, a, b), numbers, chunk_keys(seed, chunk))
