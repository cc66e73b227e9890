"""An output gradient times the scales of what it is multiplied with, rounded as one tensor: in two passes."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numba import types
from torch import Tensor

from halfstep.formats import Format
from halfstep.kernels.cpu import elements
from halfstep.kernels.cpu.arrays import array, plain
from halfstep.kernels.cpu.compiled import Kernel, inner
from halfstep.kernels.cpu.elements import Rounding
from halfstep.kernels.cpu.lanes import MAGNITUDE, bits_of, lanes, stored_as
from halfstep.kernels.cpu.rows import is_by_row, matrix, numbers_of


def supports(x: Tensor, scale: Tensor, format: Format, rounding: str, dtype: torch.dtype) -> bool:
    """Whether `run` can round `x`: a contiguous CPU matrix, into a dtype that holds the format's values."""
    known = plain(x) and x.dim() == 2 and x.numel() > 0 and rounding != "stochastic" and elements.knows(format)
    return known and scale.dtype == torch.float32 and elements.holds(format, "saturate", torch.float32, dtype)


def run_amax(x: Tensor, scale: Tensor) -> Tensor:
    """The largest magnitude of x times scale, (rows, 1) or (1, columns), in float32; NaN where there is one."""
    found = torch.empty(x.shape[0], dtype=torch.float32, device="cpu")
    kernel = _amax_by_row if is_by_row(x, scale) else _amax_by_column
    kernel(x.numel(), matrix(x), numbers_of(scale), array(found))
    return found.max()


def run(x: Tensor, scale: Tensor, factor: Tensor, format: Format, rounding: str, out: Tensor) -> None:
    """Write x times scale times factor, each product rounded to float32, rounded and saturated, to `out`."""
    numbers: Any = elements.scalars(format, rounding, "saturate", out.dtype)
    kernel = _fold_row if is_by_row(x, scale) else _fold_column
    kernel(x.numel(), matrix(x), numbers_of(scale), numbers_of(factor.view(1)), numbers, matrix(out))


@lanes(types.uint32)
def _larger(most, value, scale):
    return most.max((bits_of(value).float() * scale).bits() & MAGNITUDE)


@lanes("like")
def _folded(value, scale, factor, numbers, like):
    bits = ((bits_of(value).float() * scale) * factor).bits()
    return stored_as(elements.rounded(bits, Rounding(*numbers)), like)


@inner
def _largest(x, scale):
    largest = np.uint32(0)
    for i in range(x.size):
        largest = _larger(largest, x[i], scale)
    return largest


@inner
def _largest_each(x, scale):
    largest = np.uint32(0)
    for i in range(x.size):
        largest = _larger(largest, x[i], scale[i])
    return largest


@inner
def _fold(x, scale, factor, numbers, out):
    for i in range(x.size):
        out[i] = _folded(x[i], scale, factor, numbers, out[i])


@inner
def _fold_each(x, scale, factor, numbers, out):
    for i in range(x.size):
        out[i] = _folded(x[i], scale[i], factor, numbers, out[i])


@Kernel
def _amax_by_row(x, scale, found):
    for r in numba.prange(x.shape[0]):
        found[r] = _largest(x[r], scale[r])


@Kernel
def _amax_by_column(x, scale, found):
    for r in numba.prange(x.shape[0]):
        found[r] = _largest_each(x[r], scale)


@Kernel
def _fold_row(x, scale, factor, numbers, out):
    for r in numba.prange(x.shape[0]):
        _fold(x[r], scale[r], factor[0], numbers, out[r])


@Kernel
def _fold_column(x, scale, factor, numbers, out):
    for r in numba.prange(x.shape[0]):
        _fold_each(x[r], scale, factor[0], numbers, out[r])
