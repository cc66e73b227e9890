"""The largest magnitude of a tensor, from the bits of its numbers as they are stored: read once, nothing widened."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfstep.kernels.cpu.arrays import array, plain
from halfstep.kernels.cpu.compiled import CHUNK, Kernel, inner
from halfstep.kernels.cpu.lanes import MAGNITUDE, lanes
from halfstep.kernels.cpu.scales import stored_bits


def run(x: Tensor) -> Tensor | None:
    """max |x| as a float32 scalar; NaN where there is one. None where that is not found here: it takes a contiguous CPU
    tensor (fp32, bf16, fp16) that is not empty."""
    if not plain(x) or not x.numel():
        return None
    chunks = -(-x.numel() // CHUNK)
    found = torch.empty(() if chunks == 1 else chunks, dtype=torch.float32, device="cpu")
    _amax(x.numel(), array(x), array(found))
    return found if chunks == 1 else found.max()


def number(x: NDArray[Any]) -> float:
    """The same of an `array`, as a number."""
    found = np.empty(-(-x.size // CHUNK), np.uint32)
    _amax(x.size, x, found)
    return float(found.max().view(np.float32))


@lanes("one")
def larger(one, two):
    return one.max(two & (MAGNITUDE >> 32 - two.type.width))  # NaN's bits are above infinity's


@inner
def largest_magnitude(x, nothing):
    """The bits, as a float32's, of the largest magnitude in a chunk of an `array`; `nothing` is its zero."""
    largest = nothing
    for i in range(x.size):
        largest = larger(largest, x[i])
    return stored_bits(largest)


@Kernel
def _amax(x, found):
    nothing = np.zeros(1, x.dtype)[0]
    for chunk in numba.prange(found.size):
        found[chunk] = largest_magnitude(x[chunk * CHUNK : min((chunk + 1) * CHUNK, x.size)], nothing)
