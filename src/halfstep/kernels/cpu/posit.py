"""Rounding to the nearest posit, as values or as codes, as fast as to floats.

The exponent and significand of a float32, minus the bias, are one signed integer d whose upper bits are the regime and
whose lower bits are a posit's exponent and fraction: adding half of the last kept bit, and truncating, rounds on the
bit string. The number of dropped bits depends on the regime alone.
"""

from functools import cache
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from halfstep.formats import Format, Posit
from halfstep.kernels.cpu.arrays import array, plain, separate
from halfstep.kernels.cpu.compiled import CHUNK, Kernel, ends, piece
from halfstep.kernels.cpu.elements import float_bits
from halfstep.kernels.cpu.lanes import INFINITY, MAGNITUDE, NAN, SIGN, Lane, bits_of, stored_as
from halfstep.kernels.cpu.runs import elementwise


_ONE = 127 << 23  # the bits of 1.0; d is a float32's bits minus these
_CONTAINERS = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}
_HELD = {torch.float32: (120, 24), torch.bfloat16: (120, 8), torch.float16: (15, 11)}
"""The largest power of two that kernels write in a dtype, and its significant bits."""


class Cutting(NamedTuple):
    """The constants of one posit format: uint32 as a kernel's arguments, lanes inside it."""

    smallest: Any
    largest: Any
    regime_shift: Any
    """23 + es: the number of bits of d below the regime."""
    base: Any
    """The number of dropped bits where the regime is shortest."""
    bits: Any


def run(x: Tensor, out: Tensor, format: Posit, rounding: str) -> bool:
    """Write x, rounded to the nearest posit on the bit string, ties to even, to `out`: its value, or its code if out is
    an integer tensor. False where no kernel supports it: both must be contiguous CPU tensors of one shape, either the
    same tensor or of different storages."""
    numbers = scalars(format, rounding, x.dtype, out.dtype) if plain(x) and plain(out, out.dtype) else None
    if numbers is None or x.shape != out.shape or not separate(x, out):
        return False
    given = None if x.data_ptr() == out.data_ptr() else array(x)
    _posits(x.numel(), given, array(out), numbers, None if out.dtype in _HELD else ())
    return True


@cache
def scalars(format: Format, rounding: str, source: torch.dtype, target: torch.dtype) -> Any:
    """The `Cutting` of a posit format, as `Scalars`, for `source` values rounded to values in `target`, or to codes
    where that is their container.

    None where no bit of a float32 is dropped, minpos or maxpos is no normal float32, `target` lacks a posit that
    rounding a `source` value can give, or rounding is not to nearest.
    """
    if not isinstance(format, Posit) or rounding != "nearest_even":
        return None
    largest = (format.width - 2) << format.es
    if not 3 <= format.width <= 25 + format.es or largest > 120:
        return None
    if target not in _HELD:
        if target != _CONTAINERS[format.storage_bits]:
            return None
    elif largest > _HELD[target][0] or (source != target and format.width - 2 - format.es > _HELD[target][1]):
        return None
    numbers = Cutting(
        smallest=float_bits(format.smallest),
        largest=float_bits(format.max),
        regime_shift=23 + format.es,
        base=26 + format.es - format.width,
        bits=format.width,
    )
    return tuple(np.uint32(number) for number in numbers)


def _cut(d: Lane, p: Cutting) -> tuple[Lane, Lane]:
    """The number of dropped bits, and the regime, counted from 0 on either side of 1."""
    negative = d.shift_signed(31)
    regime = d.shift_signed(p.regime_shift) ^ negative
    return (regime + p.base).min(p.regime_shift), regime


def _rounded(bits: Lane, p: Cutting) -> Lane:
    """The rounded d of a magnitude, treated as if it were nonzero."""
    d = (bits & MAGNITUDE).min(p.largest).max(p.smallest) - _ONE
    cut, _ = _cut(d, p)
    # Where the cut is at the regime, the last bit of the code is the one that ends it: 0 after ones, 1 after zeros.
    odd = (cut < p.regime_shift).pick((d >> cut) & 1, d >> 31)
    one = cut.constant(1) << cut
    return (d + (one >> 1) + odd - 1) & (one.constant(0) - one)


def _value(bits: Lane, p: Cutting, like: Any) -> Lane:
    magnitude = bits & MAGNITUDE
    rounded = (_rounded(bits, p) + _ONE) | (bits & SIGN)
    rounded = magnitude.equals(0).pick(magnitude, rounded)
    return stored_as((magnitude >= INFINITY).pick(bits.constant(NAN), rounded), like)


def _code(bits: Lane, p: Cutting, like: Any) -> Lane:
    magnitude = bits & MAGNITUDE
    d = _rounded(bits, p)
    cut, regime = _cut(d, p)
    rest = (d & ((d.constant(1) << p.regime_shift) - 1)) >> cut
    ones = (d.constant(1) << (p.bits - 1)) - (d.constant(1) << (p.bits - 2 - regime))
    zeros = d.constant(1) << ((p.bits - 3 - regime) & 31)
    code = (d >= SIGN).pick(zeros, ones) | rest
    code = (bits >= SIGN).pick(code.constant(0) - code, code) & ((d.constant(2) << (p.bits - 1)) - 1)
    code = magnitude.equals(0).pick(magnitude, code)
    return (magnitude >= INFINITY).pick(d.constant(1) << (p.bits - 1), code).to(like.bitwidth)


@elementwise
def _piece(out, value, numbers, coded, like):
    made = _value if coded is None else _code
    return made(bits_of(out if value is None else value), Cutting(*numbers), like)


@Kernel
def _posits(x, out, numbers, coded):
    for chunk in numba.prange((out.size + CHUNK - 1) // CHUNK):
        a, b = ends(chunk, out.size)
        _piece(out[a:b], piece(x, a, b), numbers, coded)
