"""Amaxes of blocks, and the scales computed from them, in lanes."""

from functools import cache
from math import ceil

import numpy as np
from numba import types

from halfstep.formats import Format
from halfstep.kernels.cpu.compiled import inner, none, specialized
from halfstep.kernels.cpu.elements import Scalars
from halfstep.kernels.cpu.lanes import INFINITY, MAGNITUDE, NAN, Lane, bits_of, lanes
from halfstep.kernels.cpu.runs import elementwise, reduction
from halfstep.quant.scaling import Scaling


LARGEST = 0x7F7FFFFF  # the bits of the largest finite float32


@cache
def power_scalars(element: Format, rule: Scaling) -> Scalars | None:
    """The constants of `power_byte` for a rule's `power`: what is added to the bits of amax so that they carry, and the
    exponent to subtract. None for other rules, and where the byte for an amax of 0 would not be 0."""
    power = rule.power(element)
    if power is None or not (0.5 <= power[0] <= 1 and -64 <= power[1] <= 64):
        return None
    carry, exponent = power
    return np.uint32((1 << 23) - ceil((2 * carry - 1) * 2**23)), np.uint32(exponent - 1 & 0xFFFFFFFF)


# ---- the amax of every block ---------------------------------------------------------------------------------------


@lanes("one")
def larger_stored(one, two):
    """The larger magnitude of two stored floats, as stored: in all three dtypes bits order like magnitudes."""
    bits = MAGNITUDE >> 32 - one.type.width
    return (one & bits).max(two & bits)


@lanes(types.uint32)
def stored_bits(stored):
    """A stored float as float32 bits."""
    return bits_of(stored)


@inner
def _halving(x, out):
    for i in range(out.size):
        out[i] = larger_stored(x[2 * i], x[2 * i + 1])


as_bits = elementwise(stored_bits)
"""In kernels: stored floats as float32 bits."""


@inner
def largest_stored(x, levels):
    """The amax of each 2^levels elements, as stored. NaN is above infinity.

    A tree of pairwise maxima: each level is one flat loop, which vectorises; a maximum across a register does not.
    """
    size = x.size // 2
    one, two = np.empty(size, x.dtype), np.empty(size // 2, x.dtype)
    _halving(x, one)
    for _ in range(levels - 1):
        size //= 2
        _halving(one[: 2 * size], two[:size])
        one, two = two, one
    return one[:size]


@lanes(types.uint32)
def larger(bits, stored):
    """The larger of a magnitude's float32 bits and those of a stored float."""
    return bits.max(bits_of(stored) & MAGNITUDE)


@lanes("most")
def raised(most, stored):
    """The larger of `most` and the magnitude of a stored float. `most` is not masked, so that loops vectorise."""
    return most.max(stored & MAGNITUDE >> 32 - stored.type.width)


raised_by, larger_of = reduction(raised), reduction(larger)


@inner
def _largest_of_rows(x, run, levels):
    found = np.zeros(x.size // run, x.dtype)
    for b in range(found.size):
        found[b] = raised_by(found[b], x[b * run : (b + 1) * run])
    return found


@specialized
def largest_of(x, run, levels):
    """In kernels: the amax, as stored, of each tile of `run` elements, or of 2^len(levels) if levels are given. Tiles
    long enough are reduced one by one: there one maximum across a register per tile costs little."""
    if none(levels):
        return lambda x, run, levels: _largest_of_rows(x, run, levels)
    count, size = len(levels), 1 << len(levels)

    def runs(x, run, levels):
        found = np.zeros(x.size // size, x.dtype)
        for b in range(found.size):
            largest, start = found[b], b * size
            for i in range(size):
                largest = raised(largest, x[start + i])
            found[b] = largest
        return found

    return runs if count >= 7 else lambda x, run, levels: largest_stored(x, count)


# ---- scales --------------------------------------------------------------------------------------------------------


@lanes(types.uint8)
def power_byte(amax, rule):
    """The byte k + 127 of the scale 2^k, from amax; 0 for a block of zeros, 255 for one with infinity or NaN."""
    added, element_exponent = rule
    amax = bits_of(amax)
    whole = amax.value_as_float().bits() - (149 << 23)  # a subnormal, normalized with an exponent below the smallest
    normal = (amax < 1 << 23).pick(whole, amax)
    exponent = (normal + added).shift_signed(23) - element_exponent
    byte = (exponent >= 0x80000000).pick(exponent.constant(0), exponent).min(254)
    return (amax >= INFINITY).pick(byte.constant(255), byte).to(8)


@lanes(types.uint32)
def power_bits(byte):
    """The float32 bits of a scale's byte."""
    exponent = byte.to(32)
    bits = exponent.equals(0).pick(exponent.constant(0x400000), exponent << 23)
    return exponent.equals(255).pick(exponent.constant(NAN), bits)


def quotient_of(amax, largest):
    """amax / largest, or NaN for a block with infinity or NaN."""
    amax = bits_of(amax)
    return ((amax >= INFINITY).pick(amax.constant(NAN), amax)).float() / largest


def quotient(bits: Lane, scale: Lane) -> Lane:
    """The bits of x / scale; +0 where the scale is NaN or 0."""
    if scale.stored == types.uint32:  # a power of two, given as bits: multiplying by its inverse is exact
        top = scale.constant(254 << 23)
        inverse = (scale < 1 << 23).pick(top, top - scale)  # 2^-127 is subnormal
        inverse = inverse.equals(0).pick(scale.constant(1 << 22), inverse)
        return (scale > INFINITY).pick(scale.constant(0), (bits.float() * inverse.float()).bits())
    return (scale > 0.0).pick((bits.float() / scale).bits(), 0)


# ---- the scales of many blocks ----


absmax_scale = lanes(types.float32)(quotient_of)
power_bytes, powers, absmax_scales = elementwise(power_byte), elementwise(power_bits), elementwise(quotient_of)
