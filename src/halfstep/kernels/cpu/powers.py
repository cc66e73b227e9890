"""Blocks whose scale is a power of two, rounded to values where they stand: not divided by the scale, nor multiplied.

Next to a power of two whose last bit is a step of the format, times the scale, a float32 sum rounds to nearest-even by
itself. That holds for the scales at which every value of the format is a normal float32 number, no larger than the
largest; for any other scale, the kernels divide and multiply.
"""

from functools import cache
from math import frexp
from typing import Any, NamedTuple

import numpy as np
from numba import types

from halfstep.formats import Float, Format
from halfstep.kernels.cpu import elements
from halfstep.kernels.cpu.compiled import inner
from halfstep.kernels.cpu.elements import Rounding
from halfstep.kernels.cpu.lanes import INFINITY, MAGNITUDE, SIGN, Lane, lanes
from halfstep.kernels.cpu.scales import power_bits, power_byte, stored_bits


class Steps(NamedTuple):
    """The numbers of one element format: uint32 in a kernel's arguments, lanes inside it."""

    first: Any
    """The byte of the smallest scale at which no value but 0 is below 2^-126."""
    span: Any
    """How many scales from there on are good; 0 for formats that need more care."""
    largest: Any
    """The bits of the largest value, less the 127 that a scale's byte has too many."""
    lowest: Any
    """The exponent field of the smallest normal number, less those 127."""
    cut: Any
    """How far the step is below the number, as an exponent field."""


@cache
def scalars(format: Format) -> tuple[np.uint32, ...]:
    """The `Steps` of a format that `blocks` knows."""
    first = max(2 - frexp(format.smallest)[1], 0)
    numbers = Steps(first, 0, 0, 0, 0)
    if isinstance(format, Float) and _symmetric(format) and format.significant_bits <= 8:
        shift, top = 23 - format.mantissa_bits, frexp(format.max)[1] - 1
        span, largest = max(254 - shift - top - first, 0), elements.float_bits(format.max) - (127 << 23)
        numbers = Steps(first, span, largest, format.min_exponent << 23, shift << 23)
    return tuple(np.uint32(number & 0xFFFFFFFF) for number in numbers)


def _symmetric(format: Float) -> bool:
    """Whether what lies below 0, and -0 itself, is as above."""
    return Rounding(*elements.scalars(format, "nearest_even", "saturate")).zero_sign is None


UNSCALED = 127 << 23  # the exponent field of 1
TINY, FAR = 1, 2
"""What `note_scales` found: a block with values that may be below 2^-126, and one whose scale is not good."""


@lanes(types.uint32)
def _shift(amax, byte, steps):
    p = Steps(*steps)
    wide = byte.to(32)
    good = ((wide - p.first) < p.span).pick(wide << 23, 0)
    of_zeros = (p.span > 0).pick(good.constant(127 << 23), 0)
    return amax.equals(0).pick(of_zeros, good)


@lanes(types.uint32)
def _noted(so_far, amax, byte, shift, steps):
    tiny = (amax > 0) & (byte.to(32) < Steps(*steps).first)
    return so_far | tiny.pick(so_far.constant(TINY), 0) | shift.equals(0).pick(so_far.constant(FAR), 0)


@inner
def note_scales(largest, rule, steps, scale, shift):
    """Each block's scale, from its largest magnitude as stored, and the scale as a shift of exponents (0 if unusable).

    Returns TINY, FAR, both or 0.
    """
    found = np.uint32(0)
    for i in range(largest.size):
        amax = stored_bits(largest[i])
        byte = power_byte(amax, rule)
        scale[i] = power_bits(byte)
        shift[i] = _shift(amax, byte, steps)
        found = _noted(found, amax, byte, shift[i], steps)
    return found


def nearest(bits: Lane, shift: Lane | int, p: Steps) -> Lane:
    """The bits rounded in steps times the power of two that `shift` is the exponent field of."""
    magnitude = (bits & MAGNITUDE).min(p.largest + shift)
    beside = ((magnitude & INFINITY).max(p.lowest + shift) + p.cut).float()
    near = ((magnitude.float() + beside) - beside).bits()
    return near | (bits & SIGN)


def unscaled(format: Format) -> tuple[np.uint32, ...] | None:
    """The `Steps` of a format where `nearest`, with a shift of `UNSCALED`, rounds to it; None where it does not."""
    numbers = scalars(format)
    return numbers if Steps(*numbers).span else None
