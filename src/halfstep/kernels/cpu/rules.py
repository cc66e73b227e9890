"""Computes the scales of many tiles from their amaxes, for any rule that kernels support, with one interface for all.

A rule is passed as (rule, whole, up, steps), and identified by which of them are None:

- a power of two: `scales.power_scalars`, None, None, and for values `steps_scalars`, None for codes.
- amax over the format's largest value: None, that value, None, None; in the dtype of the stored scales.
- two levels, an E4M3 scale for each tile and a float32 scale for the tensor: the result of `rule_of`.
"""

from functools import cache
from math import frexp, isfinite
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from torch import Tensor

from halfstep.formats import Float, Format, ocp
from halfstep.kernels.cpu import amax, element_codes, elements
from halfstep.kernels.cpu.compiled import inner, none, specialized_inlined
from halfstep.kernels.cpu.lanes import INFINITY, MAGNITUDE, NAN, SIGN, Lane, bits_of, lanes, nearest_bf16
from halfstep.kernels.cpu.runs import elementwise
from halfstep.kernels.cpu.scales import (
    absmax_scales,
    power_bits,
    power_byte,
    power_bytes,
    powers,
    quotient_of,
    stored_bits,
)
from halfstep.quant import Scales
from halfstep.quant.quantizer import as_rows
from halfstep.quant.rounding import Seed
from halfstep.quant.scaling.base import finite
from halfstep.quant.scaling.two_level import TwoLevel


# ---- powers of two: values are rounded without dividing by the scale and multiplying again ---------------------------
# Adding and subtracting, in float32, a power of two whose last bit is a step of the format times the scale rounds to
# nearest even. That is exact for scales with which every value of the format is a normal float32; for any other scale
# kernels divide and multiply.


class Steps(NamedTuple):
    """The constants of one element format: uint32 as a kernel's arguments, lanes inside it."""

    first: Any
    """The byte of the smallest scale with which no nonzero value is below 2^-126."""
    span: Any
    """How many scales from there on are good; 0 for formats that this does not support."""
    largest: Any
    """The bits of the largest value, minus the bias 127 that a scale's byte contains."""
    lowest: Any
    """The exponent field of the smallest normal value, minus that bias."""
    cut: Any
    """How far the step is below the value's binade, as an exponent field."""


@cache
def steps_scalars(format: Format) -> tuple[np.uint32, ...]:
    """The `Steps` of a format that `blocks` supports."""
    first = max(2 - frexp(format.smallest)[1], 0)
    numbers = Steps(first, 0, 0, 0, 0)
    alike = elements.Rounding(*elements.scalars(format, "nearest_even", "saturate")).zero_sign is None
    if alike and isinstance(format, Float) and format.significant_bits <= 8:
        shift, top = 23 - format.mantissa_bits, frexp(format.max)[1] - 1
        span, largest = max(254 - shift - top - first, 0), elements.float_bits(format.max) - (127 << 23)
        numbers = Steps(first, span, largest, format.min_exponent << 23, shift << 23)
    return tuple(np.uint32(number & 0xFFFFFFFF) for number in numbers)


UNSCALED = 127 << 23  # the exponent field of 1
TINY, FAR = 1, 2
"""Flags of `note_scales`: a tile may have values below 2^-126 (TINY), or a scale that is not good (FAR)."""


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
    """Write each tile's scale, from its amax as stored, and the scale as a shift of exponents (0 if not good).

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
    """The bits rounded in steps times the power of two whose exponent field is `shift`."""
    magnitude = (bits & MAGNITUDE).min(p.largest + shift)
    beside = ((magnitude & INFINITY).max(p.lowest + shift) + p.cut).float()
    near = ((magnitude.float() + beside) - beside).bits()
    return near | (bits & SIGN)


def unscaled(format: Format) -> tuple[np.uint32, ...] | None:
    """The `Steps` of a format where `nearest`, with a shift of `UNSCALED`, rounds to it; None where it does not."""
    numbers = steps_scalars(format)
    return numbers if Steps(*numbers).span else None


# ---- two levels ------------------------------------------------------------------------------------------------------


E4M3_BITS = 4  # significant bits


E4M3 = element_codes.scalars(ocp.float8_e4m3fn, "nearest_even", "saturate")
"""The constants with which tiles' scales are rounded and encoded."""


def rule_of(x: Tensor, format: Format, scales: Scales, tensor_scale: Tensor | None) -> Any:
    """The arguments of `note` for a tensor that is empty or supported by `amax`: E4M3's constants; the format's largest
    value and the tensor's scale, which is also written to `tensor_scale`; and whether scales are rounded up."""
    rule: Any = scales.rule
    largest = amax.run(x)
    if largest is None:  # x is empty
        largest = torch.zeros((), dtype=torch.float32, device="cpu")
    known = largest.item()
    if rule.clips and isfinite(known):  # the rule's formula without torch, whose overhead exceeds rounding a row of x
        scale = tensor_scale_of(known, format)
    else:
        if not isfinite(known):  # take the largest amax of finite tiles
            largest = finite(scales.tile.reduce(as_rows(x).float().abs(), "amax"))
        scale = np.float32(rule.tensor_scale(largest, format))
    if tensor_scale is not None:
        tensor_scale.fill_(float(scale))
    return given(format, rule, scale)


def tensor_scale_of(amax: float, format: Format) -> np.float32:
    """The tensor's scale from its finite amax, for a rule that `clips`."""
    return np.float32(np.float32(amax) / np.float32(ocp.float8_e4m3fn.max * format.max) or 1)


def given(format: Format, rule: TwoLevel, scale: Tensor | np.float32) -> Any:
    """The arguments of `note` for a tensor whose scale is known."""
    return E4M3[0], (np.float32(format.max), np.float32(scale)), np.uint32(not rule.clips), None


def apart(format: Format, seed: Seed | None, dtype: torch.dtype, leaves: bool) -> Any:
    """For values that leave out the tensor's scale, the `Steps` with which they are rounded, or 0 where these do not
    apply; None for values that include it."""
    if not leaves:
        return None
    assert dtype == torch.float32 or format.significant_bits + E4M3_BITS <= 8  # it holds the products exactly
    return (unscaled(format) if seed is None else None) or np.uint32(0)


@elementwise
def _tile_scale(amax, largest, tensor_scale, numbers, up):
    """amax / largest / tensor_scale rounded to E4M3; if `up` is not 0, the next larger one where amax would still
    overflow."""
    p, amax = elements.Rounding(*numbers), bits_of(amax)
    known = (amax >= INFINITY).pick(amax.constant(NAN), amax).float()
    scale = elements.rounded((known / largest / tensor_scale).bits(), p)
    step = ((scale & INFINITY).max(p.min_normal) - (E4M3_BITS - 1 << 23)).float()
    clipped = (up > 0) & ((known / (scale.float() * tensor_scale)) > largest)
    return clipped.pick(scale.float() + step, scale.float())


@elementwise
def note_codes(scale, numbers, codes):
    """In kernels: the codes of E4M3 values."""
    return element_codes.encoded(scale.bits(), elements.Rounding(*numbers), element_codes.Coding(*codes)).to(8)


@elementwise
def _times(one, other):
    return one * other


# ---- any rule --------------------------------------------------------------------------------------------------------


@elementwise
def _narrow(amax, largest):
    """amax / largest as the nearest bfloat16; NaN for a tile with infinity or NaN."""
    return nearest_bf16(quotient_of(amax, largest).bits())


@elementwise
def _widened(stored):
    """A bfloat16 scale as a float32."""
    return bits_of(stored).float()


@specialized_inlined
def steps_of(apart):
    """In kernels: the steps in `apart`, or None if it has none."""
    return (lambda apart: apart) if isinstance(apart, types.BaseTuple) else lambda apart: None


@specialized_inlined
def room(count, whole, stored):
    """In kernels: buffers for the divisors of `count` tiles, and for the values beside them (see `note`)."""
    if none(whole):
        return lambda count, whole, stored: (np.empty(count, np.uint32), np.empty(count, np.uint32))
    if isinstance(whole, types.Float) and stored.dtype == types.float32:
        return lambda count, whole, stored: (stored, stored)
    return lambda count, whole, stored: (np.empty(count, np.float32), np.empty(count, np.float32))


@specialized_inlined
def note(largest, rule, whole, up, steps, coding, stored, divisor, beside):
    """In kernels: compute the divisors of elements from amaxes as stored. `beside` gets, for values and powers of two,
    the shifts; for two levels, the E4M3 scales. The stored form is written to `stored`, unless that is None.

    Returns the flags of `note_scales` for powers of two and values; else 0.
    """

    def to_step(largest, rule, whole, up, steps, coding, stored, divisor, beside):
        return note_scales(largest, rule, steps, divisor, beside)

    def power(largest, rule, whole, up, steps, coding, stored, divisor, beside):
        power_bytes(stored, largest, rule)
        powers(divisor, stored)
        return np.uint32(0)

    def absmax(largest, rule, whole, up, steps, coding, stored, divisor, beside):
        absmax_scales(stored, largest, whole)
        return np.uint32(0)

    def narrow(largest, rule, whole, up, steps, coding, stored, divisor, beside):
        _narrow(stored, largest, whole)
        _widened(divisor, stored)
        return np.uint32(0)

    def two_levels(largest, rule, whole, up, steps, coding, stored, divisor, beside):
        _tile_scale(beside, largest, whole[0], whole[1], rule, up)
        _times(divisor, beside, whole[1])
        if coding is not None:
            note_codes(stored, beside, rule, coding)
        return np.uint32(0)

    if none(whole):
        return power if none(steps) else to_step
    if isinstance(whole, types.Float):
        return absmax if stored.dtype == types.float32 else narrow
    return two_levels
