"""Products of matrices whose sums are not float32's: `quant.accumulator.accumulate`, an output's row at a time."""

from __future__ import annotations

import numba
import numpy as np
import torch
from numba import types
from torch import Tensor

from halfstep import formats
from halfstep.kernels.cpu.arrays import array, plain
from halfstep.kernels.cpu.compiled import Kernel, inner
from halfstep.kernels.cpu.lanes import SIGN, Lane, lanes, nearest_bf16
from halfstep.quant.accumulator import LEAST, Accumulator, accumulate, exponent, unless_finite


_COLUMNS = 128  # of the output at a time: their running sums stay in the first cache
_ABOVE = 1024
_HALVES = {formats.get("fp16").key: True, formats.get("bf16").key: False}


def run(lhs: Tensor, rhs: Tensor, out: Tensor, accumulator: Accumulator) -> bool:
    """lhs (rows, shared) times rhs (shared, columns), into `out` (rows, columns), of zeros. False where that is not
    done here: it takes contiguous float32 matrices, and sums in fp16, bf16 or aligned."""
    if not all(plain(tensor, torch.float32) and tensor.dim() == 2 for tensor in (lhs, rhs, out)):
        return False
    if not accumulator.aligned and accumulator.format.key not in _HALVES:
        return False
    if not out.numel() or not lhs.shape[1]:
        return True
    terms = accumulator.block, accumulator.promote or 0
    a, b, c = (array(side).view(np.float32).reshape(side.shape) for side in (lhs, rhs, out))
    if not accumulator.aligned:
        _rounded(lhs.numel() * rhs.shape[1], a, b, c, *terms, _HALVES[accumulator.format.key])
        return True
    exponents = exponent(lhs), exponent(rhs)
    if sum(int(side.max()) for side in exponents) > 120:  # products that float32 may not hold
        out.copy_(accumulate(lhs, rhs, accumulator))
        return True
    biased = ((side.clamp(min=-_ABOVE // 2) + _ABOVE // 2).numpy().view(np.uint32) for side in exponents)
    _aligned(lhs.numel() * rhs.shape[1], a, b, *biased, c, *terms, np.uint32(accumulator.fraction_bits))
    out.copy_(unless_finite(out, lhs, rhs))
    return True


# ---- sums that are rounded ------------------------------------------------------------------------------------------


@lanes(types.float32)
def _plus_product(total: Lane, a: Lane, b: Lane) -> Lane:
    return total + a * b


@lanes(types.float32)
def _sum_in_half(running: Lane, block: Lane) -> Lane:
    return _odd_sum(running, block).float_to_half().half_to_float()


@lanes(types.float32)
def _sum_in_bfloat16(running: Lane, block: Lane) -> Lane:
    return (nearest_bf16(_odd_sum(running, block).bits()).to(32) << 16).float()


def _odd_sum(a: Lane, b: Lane) -> Lane:
    """`quant.accumulator.to_odd`."""
    total = a + b
    of_b = total - a
    error = (a - (total - of_b)) + (b - of_b)
    bits, size = total.bits(), error.bits() & ~SIGN & 0xFFFFFFFF
    inexact = (size > 0) & (size < 0x7F800000)
    same = (error.bits() ^ bits) < SIGN
    return inexact.pick(same.pick(bits, bits - 1) | 1, bits).float()


@inner
def _add_products(total, a, b):
    for j in range(total.size):
        total[j] = _plus_product(total[j], a, b[j])


@inner
def _add_blocks_in_half(running, block):
    for j in range(running.size):
        running[j] = _sum_in_half(running[j], block[j])
        block[j] = np.float32(0)


@inner
def _add_blocks_in_bfloat16(running, block):
    for j in range(running.size):
        running[j] = _sum_in_bfloat16(running[j], block[j])
        block[j] = np.float32(0)


@inner
def _promote(total, running):
    for j in range(total.size):
        total[j] += running[j]
        running[j] = np.float32(0)


@inner
def _rounded_row(a, rhs, out, size, promote, half):
    running, block = np.zeros(out.size, np.float32), np.zeros(out.size, np.float32)
    for start in range(0, a.size, size):
        stop = min(start + size, a.size)
        for k in range(start, stop):
            _add_products(block, a[k], rhs[k])
        if half:
            _add_blocks_in_half(running, block)
        else:
            _add_blocks_in_bfloat16(running, block)
        if promote and stop % promote == 0:
            _promote(out, running)
    _promote(out, running)


@Kernel
def _rounded(lhs, rhs, out, block, promote, half):
    tiles = (out.shape[1] + _COLUMNS - 1) // _COLUMNS
    for part in numba.prange(out.shape[0] * tiles):
        row, first = part % out.shape[0], part // out.shape[0] * _COLUMNS
        last = min(first + _COLUMNS, out.shape[1])
        _rounded_row(lhs[row], rhs[:, first:last], out[row, first:last], block, promote, half)


# ---- sums that are aligned and cut ----------------------------------------------------------------------------------


@lanes(types.uint32)
def _higher(largest: Lane, a: Lane, b: Lane) -> Lane:
    """Exponents plus `_ABOVE`, so that none is negative."""
    return largest.max(a + b)


@lanes(types.uint32)
def _with_running(largest: Lane, running: Lane) -> Lane:
    return largest.max(((running.bits() >> 23) & 0xFF) + (_ABOVE - 127)).max(LEAST + _ABOVE)


@lanes(types.uint32)
def _plus_term(total: Lane, a: Lane, b: Lane, exponent: Lane, fraction: Lane) -> Lane:
    return total + (a * b * _power(fraction - exponent + _ABOVE)).truncated()


@lanes(types.float32)
def _cut_sum(terms: Lane, running: Lane, exponent: Lane, fraction: Lane) -> Lane:
    total = terms + (running * _power(fraction - exponent + _ABOVE)).truncated()
    value = total.value_as_float() * _power(exponent - fraction - _ABOVE)
    mask = (fraction.constant(0xFFFFFFFF) << 23) | ~(fraction.constant(0x7FFFFF) >> fraction)
    return (value.bits() & mask).float()


def _power(exponent: Lane) -> Lane:
    """2 to the power of a whole number."""
    return ((exponent + 127) << 23).float()


@inner
def _raise_exponents(largest, a, b):
    for j in range(largest.size):
        largest[j] = _higher(largest[j], a, b[j])


@inner
def _raise_to_running(largest, running):
    for j in range(largest.size):
        largest[j] = _with_running(largest[j], running[j])


@inner
def _add_terms(total, a, b, exponents, fraction):
    for j in range(total.size):
        total[j] = _plus_term(total[j], a, b[j], exponents[j], fraction)


@inner
def _add_cut(running, terms, exponents, fraction):
    for j in range(running.size):
        running[j] = _cut_sum(terms[j], running[j], exponents[j], fraction)
        terms[j] = np.uint32(0)
        exponents[j] = np.uint32(0)


@inner
def _aligned_row(a, rhs, of_a, of_rhs, out, size, promote, fraction):
    running, terms = np.zeros(out.size, np.float32), np.zeros(out.size, np.uint32)
    exponents = np.zeros(out.size, np.uint32)
    for start in range(0, a.size, size):
        stop = min(start + size, a.size)
        for k in range(start, stop):
            _raise_exponents(exponents, of_a[k], of_rhs[k])
        _raise_to_running(exponents, running)
        for k in range(start, stop):
            _add_terms(terms, a[k], rhs[k], exponents, fraction)
        _add_cut(running, terms, exponents, fraction)
        if promote and stop % promote == 0:
            _promote(out, running)
    _promote(out, running)


@Kernel
def _aligned(lhs, rhs, of_lhs, of_rhs, out, block, promote, fraction):
    tiles = (out.shape[1] + _COLUMNS - 1) // _COLUMNS
    for part in numba.prange(out.shape[0] * tiles):
        row, first = part % out.shape[0], part // out.shape[0] * _COLUMNS
        last = min(first + _COLUMNS, out.shape[1])
        b, of_b, c = rhs[:, first:last], of_rhs[:, first:last], out[row, first:last]
        _aligned_row(lhs[row], b, of_lhs[row], of_b, c, block, promote, fraction)
