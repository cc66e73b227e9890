"""Whole rows that share a power of two as their scale, rounded to values: of a matrix, or of its transposed view.

A row is read twice while it is near: for its largest magnitude, and to be rounded (`powers`). What a product needs of
an operand whose shared dimension is its first are rows of the transposed view: their maxima come first, by `rows`; then
the matrix is read as it lies, and transposed in registers, as in `columns`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from torch import Tensor

from halfstep.formats import Codebook, Format
from halfstep.kernels.cpu import element_codes, powers, rows
from halfstep.kernels.cpu.arrays import array
from halfstep.kernels.cpu.blocks import takes_values
from halfstep.kernels.cpu.columns import divided_strip, stepped_strip, transpose
from halfstep.kernels.cpu.compiled import Kernel, inner
from halfstep.kernels.cpu.divided import element
from halfstep.kernels.cpu.powers import FAR, TINY, note_scales, stepped
from halfstep.kernels.cpu.scales import knows as knows_element
from halfstep.kernels.cpu.scales import knows_rule, larger_stored, power_scalars
from halfstep.quant.quantizer import Quantizer, matrix_shape
from halfstep.quant.scales import Scales
from halfstep.quant.tile import ROW


_TALL = 16  # rows that a thread takes at a time
_LEVELS = (np.uint32(0),) * 5  # of the transposed view, blocks of 32 numbers at a time


def knows(quantizer: Quantizer) -> bool:
    """Whether the kernels here do what this quantizer does."""
    if quantizer.scales is None or quantizer.scales.tile != ROW or isinstance(quantizer.format, Codebook):
        return False
    return (
        quantizer.rounding == "nearest_even"
        and quantizer.outliers is None
        and quantizer.scales.rule.exact
        and knows_element(quantizer.format)
        and knows_rule(quantizer.format, quantizer.scales.rule)
    )


def supports_values(x: Tensor, out: Tensor, quantizer: Quantizer) -> bool:
    """Whether `run_values` can round `x` into `out`: a contiguous CPU tensor, or a matrix's transposed view whose rows
    are whole blocks of 32; apart in memory."""
    return (
        knows(quantizer)
        and x.dim() > 0
        and x.numel() > 0
        and x.shape == out.shape
        and (takes_values(x, out) or (_lies_down(x) and takes_values(x.t(), out)))
    )


def run_values(x: Tensor, out: Tensor, format: Format, scales: Scales) -> bool:
    """Write what x, rounded in rows, stands for to `out`.

    Returns whether some may be below 2^-126, but not 0.
    """
    ruled = power_scalars(format, scales.rule), powers.scalars(format)
    numbers: Any = element_codes.scalars(format, "nearest_even", "saturate")[0]
    high, wide = matrix_shape(tuple(x.shape))
    if x.is_contiguous():
        return power_values(array(x), array(out), wide, ruled, numbers)
    largest = array(rows.run_amax(x.t(), None, 0))
    scale, shift = np.empty(high, np.uint32), np.empty(high, np.uint32)
    noted = _note.serial(largest, *ruled, scale, shift)
    _down(x.numel(), array(x.t()), _LEVELS, scale, shift, bool(noted & FAR), ruled[1], array(out), numbers)
    return bool(noted & TINY)


def power_values(x: Any, out: Any, columns: int, powered: Any, numbers: Any) -> bool:
    """The same of `array`s, by the `power_scalars` and `powers.scalars` of the format."""
    found = np.zeros(-(-x.size // columns // _TALL), np.uint32)
    _rows(x.size, x, columns, *powered, found, out, numbers)
    return bool((found & TINY).any())


def _lies_down(x: Tensor) -> bool:
    return x.dim() == 2 and not x.is_contiguous() and x.shape[1] % (1 << len(_LEVELS)) == 0


@inner
def _largest_of(x, found):
    largest = found[0]
    for i in range(x.size):
        largest = larger_stored(largest, x[i])
    found[0] = largest


@inner
def _stepped_row(x, shift, steps, out):
    for i in range(x.size):
        out[i] = stepped(x[i], shift, steps, out[i])


@inner
def _divided_row(x, scale, numbers, out):
    for i in range(x.size):
        out[i] = element(x[i], scale, numbers, None, None, None, i, out[i])


@Kernel
def _note(largest, rule, steps, scale, shift):
    return note_scales(largest, rule, steps, scale, shift)


@Kernel
def _rows(x, columns, rule, steps, found, out, numbers):
    for part in numba.prange(found.size):
        largest, scale, shift = np.empty(1, x.dtype), np.empty(1, np.uint32), np.empty(1, np.uint32)
        for a in range(part * _TALL * columns, min((part + 1) * _TALL * columns, x.size), columns):
            b = a + columns
            largest[0] = 0
            _largest_of(x[a:b], largest)
            noted = note_scales(largest, rule, steps, scale, shift)
            if noted & FAR:
                _divided_row(x[a:b], scale[0], numbers, out[a:b])
            else:
                _stepped_row(x[a:b], shift[0], steps, out[a:b])
            found[part] |= noted


@Kernel
def _down(x, levels, scale, shift, far, steps, out, numbers):
    width, block = 128, 1 << len(levels)
    high = x.size // scale.size
    across = (scale.size + width - 1) // width
    for part in numba.prange(across * ((high + 511) // 512)):
        a, row = part % across * width, part // across * 512
        size = min(width, scale.size - a)
        values = np.empty(size * block, out.dtype)
        for r in range(row, min(row + 512, high), block):
            first = r * scale.size + a
            if far:
                divided_strip(x, first, scale.size, levels, scale[a : a + size], numbers, values)
            else:
                stepped_strip(x, first, scale.size, levels, shift[a : a + size], steps, values)
            transpose(values, levels, out, a * high + r, high)
