"""Matrices with a scale per row or column, in one pass; the part that clamping removes; and sparse matmuls."""

from typing import Any

import numpy as np
import torch
from numba import prange, types
from torch import Tensor

from halfstep.formats import Format
from halfstep.kernels.cpu import elements
from halfstep.kernels.cpu.arrays import array, plain, separate
from halfstep.kernels.cpu.compiled import Kernel, inner, of_row
from halfstep.kernels.cpu.lanes import MAGNITUDE, bits_of, lanes, nearest_as, stored_as
from halfstep.kernels.cpu.runs import elementwise, multiply, reduction
from halfstep.quant.scaling import Scaling


_TALL = 256  # rows that a thread takes at a time for the columns' amaxes
_OUTS = (torch.int8, torch.float32, torch.bfloat16)


def scalars(format: Format, rounding: str) -> Any:
    """The constants with which `run` rounds; None for stochastic rounding, more than 8 bits, and formats that
    `elements` does not support."""
    return elements.scalars(format, rounding, "saturate") if rounding != "stochastic" and format.bits <= 8 else None


def run(
    x: Tensor, out: Tensor, bounds: Tensor | None, factor: Tensor, format: Format, rounding: str, steps: int
) -> bool:
    """Write x clamped to its bounds, (2, 1) or (2, rows), times factor, (rows, 1) or (1, columns), rounded, to `out`:
    times `steps` as int8; or, divided by the factor again, values that out's dtype holds. 0 where the product is NaN.
    False where no kernel supports it: contiguous CPU matrices, and rounding without noise."""
    if not _is_read(x, bounds) or not plain(out, *_OUTS) or not separate(x, out):
        return False
    if (numbers := scalars(format, rounding)) is None or factor.dtype != torch.float32:
        return False
    back = np.float32(1) if out.dtype == torch.int8 else scales_of(factor.reciprocal(), x)
    given = matrix(x), *_limits(bounds, x.shape[0]), scales_of(factor, x), back
    _rows(x.numel(), *given, np.float32(steps), numbers, matrix(out))
    return True


def _is_read(x: Tensor, bounds: Tensor | None) -> bool:
    """Whether kernels here support a matrix and its bounds."""
    return plain(x) and x.dim() == 2 and x.numel() > 0 and (bounds is None or bounds.dtype == torch.float32)


def run_amax(x: Tensor, bounds: Tensor | None, dim: int) -> Tensor | None:
    """The amax of each row (dim 1: (rows, 1)) or column ((1, columns)) of x clamped to the bounds, in float32; NaN
    where an element or a bound is NaN. None where no kernel supports it."""
    if not _is_read(x, bounds):
        return None
    limits = _limits(bounds, x.shape[0])
    if dim == 1:
        out = torch.empty(x.shape[0], 1, dtype=torch.float32, device="cpu")
        _row_amax(x.numel(), matrix(x), *limits, None, array(out))
        return out
    found = torch.zeros(-(-x.shape[0] // _TALL), x.shape[1], dtype=torch.float32, device="cpu")
    _column_amax(x.numel(), matrix(x), *limits, matrix(found), _TALL)
    return found.amax(0, keepdim=True)


def run_beyond(x: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """The elements outside of the bounds, minus the bound: values row by row, their columns, and where rows start. None
    where no kernel supports it."""
    if not _is_read(x, bounds):
        return None
    bits, limits = matrix(x), _limits(bounds, x.shape[0])
    starts = torch.zeros(x.shape[0] + 1, dtype=torch.int64, device="cpu")
    counts = array(starts)[1:]
    _count_beyond(x.numel(), bits, *limits, counts)
    np.cumsum(counts, out=counts)
    values = torch.empty(int(starts[-1]), dtype=torch.float32, device="cpu")
    columns = torch.empty(int(starts[-1]), dtype=torch.int32, device="cpu")
    if len(values):
        _take_beyond(x.numel(), bits, *limits, array(starts), array(values, torch.float32), array(columns))
    return values, columns, starts


def run_folded(
    x: Tensor, scale: Tensor, format: Format, rounding: str, rule: Scaling, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """x times scale, (rows, 1) or (1, columns), times the rule's factor for the amax of that, each product rounded to
    float32; rounded and saturated, in `dtype`; and 1 / factor. None where no kernel supports it: x must be a contiguous
    CPU matrix, and `dtype` must hold the format's values."""
    numbers = elements.scalars(format, rounding, "saturate", dtype, torch.float32)
    if not _is_read(x, scale) or numbers is None or rounding == "stochastic":
        return None
    bits, times = matrix(x), scales_of(scale, x)
    found = torch.empty(x.shape[0], dtype=torch.float32, device="cpu")
    _row_amax(x.numel(), bits, None, None, times, array(found))
    factor = rule.factor(found.max(), format)
    if factor is None:
        return None
    out = torch.empty(x.shape, dtype=dtype, device="cpu")
    _fold(x.numel(), bits, times, np.float32(factor), numbers, matrix(out))
    return out, factor.reciprocal()


def matrix(x: Tensor) -> Any:
    """The `array` of a matrix, in its shape."""
    return array(x).reshape(x.shape)


def scales_of(scale: Tensor, x: Tensor) -> Any:
    """A matrix's scales as `of_row` takes them: (rows, 1) by row, (1, columns) by column."""
    numbers = array(scale.contiguous(), torch.float32)
    return numbers if scale.shape == (x.shape[0], 1) else numbers.reshape(1, -1)


def _limits(bounds: Tensor | None, rows: int) -> tuple[Any, Any]:
    """The lower and the upper bound of each row, or None."""
    if bounds is None:
        return None, None
    low, high = array(bounds.expand(2, rows).contiguous(), torch.float32).reshape(2, rows)
    return low, high


def _larger_between(most, value, low, high, scale):
    number = bits_of(value).float()
    if scale is not None:
        number = number * scale
    if low is not None:
        number = (number > high).pick(high, number)
        number = (number < low).pick(low, number)
        number = low.is_nan().pick(low, number)
    return most.max(number.bits() & MAGNITUDE)


_amax_of = reduction(_larger_between)


@elementwise
def _raise(out, value, low, high):
    return _larger_between(out, value, low, high, None)


@Kernel
def _row_amax(x, low, high, scale, out):
    for r in prange(x.shape[0]):
        out[r] = _amax_of(np.uint32(0), x[r], of_row(low, r), of_row(high, r), of_row(scale, r))


@Kernel
def _column_amax(x, low, high, found, tall):
    for part in prange(found.shape[0]):
        for r in range(part * tall, min((part + 1) * tall, x.shape[0])):
            _raise(found[part], x[r], of_row(low, r), of_row(high, r))


@elementwise
def _row(value, low, high, factor, back, steps, numbers, like):
    number = bits_of(value).float()
    if low is not None:
        number = (number > high).pick(high, number)
        number = (number < low).pick(low, number)
    scaled = number * factor
    usual = scaled.is_nan().pick(scaled.constant(0.0), scaled).bits()
    rounded = elements.rounded(usual, elements.Rounding(*numbers)).float()
    if like == types.int8:
        return (rounded * steps).truncated().to(8)
    return nearest_as(rounded * back, like)


@Kernel
def _rows(x, low, high, factor, back, steps, numbers, out):
    for r in prange(x.shape[0]):
        scale, again = of_row(factor, r), of_row(back, r)
        _row(out[r], x[r], of_row(low, r), of_row(high, r), scale, again, steps, numbers)


@elementwise
def _folded(value, scale, factor, numbers, like):
    bits = ((bits_of(value).float() * scale) * factor).bits()
    return stored_as(elements.rounded(bits, elements.Rounding(*numbers)), like)


@Kernel
def _fold(x, scale, factor, numbers, out):
    for r in prange(x.shape[0]):
        _folded(out[r], x[r], of_row(scale, r), factor, numbers)


# ---- elements outside of the bounds ---------------------------------------------------------------------------------


@reduction
def _count_row(count, value, low, high):
    number = bits_of(value).float()
    return count + ((number > high).to(32) | (number < low).to(32))


@elementwise
def _flag_row(value, low, high):
    number = bits_of(value).float()
    return (number > high).to(8) | (number < low).to(8)


@lanes(types.float32)
def _less(value, low, high):
    number = bits_of(value).float()
    return number - (number > high).pick(high, low)


@inner
def _take_row(x, low, high, flags, values, columns):
    eights, taken = flags.view(np.uint64), 0  # few flags are set, so eight are tested at a time
    for e in range(eights.size):
        if eights[e]:
            for i in range(8 * e, min(8 * e + 8, x.size)):
                if flags[i]:
                    values[taken] = _less(x[i], low, high)
                    columns[taken] = i
                    taken += 1


@Kernel
def _count_beyond(x, low, high, counts):
    for r in prange(x.shape[0]):
        counts[r] = _count_row(np.uint32(0), x[r], low[r], high[r])


@Kernel
def _take_beyond(x, low, high, starts, values, columns):
    for part in prange((x.shape[0] + 15) // 16):
        flags = np.zeros((x.shape[1] + 7) // 8 * 8, np.uint8)
        for r in range(part * 16, min(part * 16 + 16, x.shape[0])):
            a, b = starts[r], starts[r + 1]
            _flag_row(flags, x[r], low[r], high[r])
            _take_row(x[r], low[r], high[r], flags, values[a:b], columns[a:b])


# ---- sparse matrix @ dense matrix: the nonzero values of each row times rows of the other, added in order ------------


def run_sparse(
    values: Tensor, columns: Tensor, starts: Tensor, width: int, down: bool, other: Tensor, scale: Tensor | None,
    out: Tensor,
) -> bool:  # fmt: skip
    """Write the sparse matrix (rows, width), or its transpose if `down`, @ `other`, times scale (per column, or one),
    to `out`. False where no kernel supports it: contiguous CPU matrices, the sparse one in float32."""
    if not (plain(values, torch.float32) and plain(other) and plain(out, torch.float32)) or not out.numel():
        return False
    parts = array(values, torch.float32), array(columns), array(starts)
    if down:
        turned = np.empty(len(values), np.float32), np.empty(len(values), np.int32), np.zeros(width + 1, np.int64)
        _transposed.serial(*parts, *turned)
        parts = turned
    work = len(values) * out.shape[1] + out.numel()
    times = None if scale is None else array(scale.expand(1, out.shape[1]).contiguous(), torch.float32)
    _product(work, *parts, array(other).reshape(other.shape), times, array(out, torch.float32).reshape(out.shape))
    return True


@elementwise
def _add_products(out, values, others):
    for value, other in zip(values, others, strict=True):
        out = out + value * bits_of(other).float()
    return out


@Kernel
def _product(values, columns, starts, other, scale, out):
    for r in prange(out.shape[0]):
        row = out[r]
        row[:] = 0
        last = starts[r + 1]
        rest = last - (last - starts[r]) % 4
        for i in range(starts[r], rest, 4):  # the sum stays in registers meanwhile
            four = values[i], values[i + 1], values[i + 2], values[i + 3]
            one, two, three = other[columns[i]], other[columns[i + 1]], other[columns[i + 2]]
            _add_products(row, four, (one, two, three, other[columns[i + 3]]))
        for i in range(rest, last):
            _add_products(row, (values[i],), (other[columns[i]],))
        if scale is not None:
            multiply(row, scale)


@Kernel
def _transposed(values, columns, starts, turned, rows, begins):
    """Write the transposed sparse matrix, each row in order."""
    for i in range(columns.size):
        begins[columns[i] + 1] += 1
    for c in range(begins.size - 1):
        begins[c + 1] += begins[c]
    place = begins[:-1].copy()
    for r in range(starts.size - 1):
        for i in range(starts[r], starts[r + 1]):
            at = place[columns[i]]
            turned[at], rows[at] = values[i], r
            place[columns[i]] = at + 1
