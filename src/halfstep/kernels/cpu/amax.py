"""The amax of a CPU tensor, from the bits of its elements as stored: one pass, without widening."""

from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfstep.kernels.cpu.arrays import array, plain
from halfstep.kernels.cpu.compiled import CHUNK, Kernel, inner
from halfstep.kernels.cpu.scales import raised_by, stored_bits


def run(x: Tensor) -> Tensor | None:
    """max |x| as a float32 scalar; NaN where x has a NaN. None where no kernel supports it: x must be a contiguous CPU
    tensor (fp32, bf16, fp16) that is not empty."""
    if not plain(x) or not x.numel():
        return None
    chunks = -(-x.numel() // CHUNK)
    found = torch.empty(() if chunks == 1 else chunks, dtype=torch.float32, device="cpu")
    _amax(x.numel(), array(x), array(found))
    return found if chunks == 1 else found.max()


def number(x: NDArray[Any]) -> float:
    """max |x| of an `array`, as a Python float."""
    found = np.empty(-(-x.size // CHUNK), np.uint32)
    _amax(x.size, x, found)
    return float(found.max().view(np.float32))


@inner
def largest_magnitude(x):
    """The float32 bits of the amax of a chunk of an `array`."""
    return stored_bits(raised_by(x.dtype.type(0), x))


@Kernel
def _amax(x, found):
    for chunk in numba.prange(found.size):
        found[chunk] = largest_magnitude(x[chunk * CHUNK : min((chunk + 1) * CHUNK, x.size)])
