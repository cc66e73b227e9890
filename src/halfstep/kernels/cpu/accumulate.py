"""Matmuls with an emulated accumulator (`quant.accumulator.accumulate`), computed one row of the output at a time."""

import numba
import numpy as np
import torch
from torch import Tensor

from halfstep import formats
from halfstep.kernels.cpu.arrays import array, plain
from halfstep.kernels.cpu.compiled import Kernel, inner
from halfstep.kernels.cpu.lanes import SIGN, Lane, nearest_bf16
from halfstep.kernels.cpu.runs import add, elementwise
from halfstep.quant.accumulator import LEAST, Accumulator, accumulate, exponent, unless_finite


_COLUMNS = 128  # columns of the output at a time: their running sums stay in the L1 cache
_ABOVE = 1024
_HALVES = {formats.get("fp16").key: True, formats.get("bf16").key: False}


def run(lhs: Tensor, rhs: Tensor, out: Tensor, accumulator: Accumulator) -> bool:
    """lhs (rows, shared) @ rhs (shared, columns), added to `out` (rows, columns), which holds zeros. False where no
    kernel supports it: all must be contiguous float32 matrices, and sums in fp16, bf16 or aligned."""
    if not all(plain(tensor, torch.float32) and tensor.dim() == 2 for tensor in (lhs, rhs, out)):
        return False
    if not accumulator.aligned and accumulator.format.key not in _HALVES:
        return False
    if not out.numel() or not lhs.shape[1]:
        return True
    terms = accumulator.block, accumulator.promote or 0
    a, b, c = (array(side).view(np.float32).reshape(side.shape) for side in (lhs, rhs, out))
    if not accumulator.aligned:
        _products(lhs.numel() * rhs.shape[1], a, b, None, None, c, *terms, _HALVES[accumulator.format.key])
        return True
    exponents = exponent(lhs), exponent(rhs)
    if sum(int(side.max()) for side in exponents) > 120:  # products may overflow float32
        out.copy_(accumulate(lhs, rhs, accumulator))
        return True
    biased = ((side.clamp(min=-_ABOVE // 2) + _ABOVE // 2).numpy().view(np.uint32) for side in exponents)
    _products(lhs.numel() * rhs.shape[1], a, b, *biased, c, *terms, np.uint32(accumulator.fraction_bits))
    out.copy_(unless_finite(out, lhs, rhs))
    return True


# ---- accumulators that round ----------------------------------------------------------------------------------------


@elementwise
def _add_product(out: Lane, a: Lane, b: Lane) -> Lane:
    return out + a * b


@elementwise
def _add_in_half(out: Lane, block: Lane) -> Lane:
    return _odd_sum(out, block).float_to_half().half_to_float()


@elementwise
def _add_in_bfloat16(out: Lane, block: Lane) -> Lane:
    return (nearest_bf16(_odd_sum(out, block).bits()).to(32) << 16).float()


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
def _rounded_row(a, rhs, out, size, promote, half):
    running, block = np.zeros(out.size, np.float32), np.zeros(out.size, np.float32)
    for start in range(0, a.size, size):
        stop = min(start + size, a.size)
        for k in range(start, stop):
            _add_product(block, a[k], rhs[k])
        if half:
            _add_in_half(running, block)
        else:
            _add_in_bfloat16(running, block)
        block[:] = 0
        if promote and stop % promote == 0:
            add(out, running)
            running[:] = 0
    add(out, running)


# ---- accumulators that align terms and truncate ---------------------------------------------------------------------


@elementwise
def _raise_exponents(out: Lane, a: Lane, b: Lane) -> Lane:
    """The larger of `out` and the exponent of a product; exponents are offset by `_ABOVE`, so that none is negative."""
    return out.max(a + b)


@elementwise
def _raise_to_running(out: Lane, running: Lane) -> Lane:
    return out.max(((running.bits() >> 23) & 0xFF) + (_ABOVE - 127)).max(LEAST + _ABOVE)


@elementwise
def _add_terms(out: Lane, a: Lane, b: Lane, exponent: Lane, fraction: Lane) -> Lane:
    return out + (a * b * _power(fraction - exponent + _ABOVE)).truncated()


@elementwise
def _add_cut(out: Lane, terms: Lane, exponent: Lane, fraction: Lane) -> Lane:
    total = terms + (out * _power(fraction - exponent + _ABOVE)).truncated()
    value = total.value_as_float() * _power(exponent - fraction - _ABOVE)
    mask = (fraction.constant(0xFFFFFFFF) << 23) | ~(fraction.constant(0x7FFFFF) >> fraction)
    return (value.bits() & mask).float()


def _power(exponent: Lane) -> Lane:
    """2 to the power of an integer."""
    return ((exponent + 127) << 23).float()


@inner
def _aligned_row(a, rhs, of_a, of_rhs, out, size, promote, fraction):
    running = np.zeros(out.size, np.float32)
    exponents, terms = np.empty(out.size, np.uint32), np.empty(out.size, np.uint32)
    for start in range(0, a.size, size):
        stop = min(start + size, a.size)
        exponents[:] = terms[:] = 0
        for k in range(start, stop):
            _raise_exponents(exponents, of_a[k], of_rhs[k])
        _raise_to_running(exponents, running)
        for k in range(start, stop):
            _add_terms(terms, a[k], rhs[k], exponents, fraction)
        _add_cut(running, terms, exponents, fraction)
        if promote and stop % promote == 0:
            add(out, running)
            running[:] = 0
    add(out, running)


@Kernel
def _products(lhs, rhs, of_lhs, of_rhs, out, block, promote, how):
    """Matmul with sums aligned to `how` fraction bits, if the operands' exponents `of_lhs` and `of_rhs` are given; else
    with sums rounded to fp16 if `how`, else to bf16."""
    tiles = (out.shape[1] + _COLUMNS - 1) // _COLUMNS
    for part in numba.prange(out.shape[0] * tiles):
        row, first = part % out.shape[0], part // out.shape[0] * _COLUMNS
        last = min(first + _COLUMNS, out.shape[1])
        if of_lhs is None:
            _rounded_row(lhs[row], rhs[:, first:last], out[row, first:last], block, promote, how)
        else:
            b, of_b, c = rhs[:, first:last], of_rhs[:, first:last], out[row, first:last]
            _aligned_row(lhs[row], b, of_lhs[row], of_b, c, block, promote, how)
