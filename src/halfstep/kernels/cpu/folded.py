"""An output gradient times the scales of what it is multiplied with, rounded as one tensor: in two passes."""

from __future__ import annotations

import numba
import numpy as np
import torch
from numba import types
from torch import Tensor

from halfstep.formats import Format
from halfstep.kernels.cpu import elements
from halfstep.kernels.cpu.arrays import array, plain
from halfstep.kernels.cpu.compiled import Kernel, each, inner, of_row
from halfstep.kernels.cpu.elements import Rounding
from halfstep.kernels.cpu.lanes import MAGNITUDE, bits_of, lanes, stored_as
from halfstep.kernels.cpu.rows import matrix, scales_of
from halfstep.quant.scaling import Scaling


def run(
    x: Tensor, scale: Tensor, format: Format, rounding: str, rule: Scaling, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """x times scale, (rows, 1) or (1, columns), times the rule's factor of the largest of these, each product rounded
    to float32; rounded and saturated, in `dtype`; and the factor's inverse. None where that is not done here: it takes
    a contiguous CPU matrix, and a dtype that holds the format's values."""
    numbers = elements.scalars(format, rounding, "saturate", dtype, torch.float32)
    known = plain(x) and x.dim() == 2 and x.numel() > 0 and rounding != "stochastic"
    if not known or numbers is None or scale.dtype != torch.float32:
        return None
    given, found = (
        (x.numel(), matrix(x), scales_of(scale, x)),
        torch.empty(x.shape[0], dtype=torch.float32, device="cpu"),
    )
    _amax(*given, array(found))
    factor = rule.factor(found.max(), format)
    if factor is None:
        return None
    out = torch.empty(x.shape, dtype=dtype, device="cpu")
    _fold(*given, np.float32(factor), numbers, matrix(out))
    return out, factor.reciprocal()


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
        largest = _larger(largest, x[i], each(scale, i))
    return largest


@inner
def _fold_row(x, scale, factor, numbers, out):
    for i in range(x.size):
        out[i] = _folded(x[i], each(scale, i), factor, numbers, out[i])


@Kernel
def _amax(x, scale, found):
    for r in numba.prange(x.shape[0]):
        found[r] = _largest(x[r], of_row(scale, r))


@Kernel
def _fold(x, scale, factor, numbers, out):
    for r in numba.prange(x.shape[0]):
        _fold_row(x[r], of_row(scale, r), factor, numbers, out[r])
