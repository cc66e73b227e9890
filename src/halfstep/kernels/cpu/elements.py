"""Rounding of one element, in lanes: on magnitudes as float32 bits, with one step size above and one below min_normal.

A magnitude of at least `min_normal` is rounded on its bits: the step is a bit of the significand, and a carry out of it
moves to the next binade. Below (and everywhere, in an integer format) the step is fixed: there a float32 sum with 2^23
steps rounds to nearest even by itself. Overflow is handled afterwards, on the rounded magnitude.
"""

from functools import cache
from math import inf, ldexp, nan
from typing import Any, NamedTuple

import numpy as np
import torch

from halfstep.formats import Float, Format, Integer
from halfstep.kernels.cpu.lanes import INFINITY, MAGNITUDE, NAN, SIGN, Lane
from halfstep.quant.cast import shared_range


_ALL = 0xFFFFFFFF


class Rounding(NamedTuple):
    """The constants of one rounding: uint32 as a kernel's arguments, lanes inside it. Values are float32 bits."""

    min_normal: Any
    """The magnitude from which on the step is a bit of the significand; 0: everywhere, infinity: nowhere."""
    shift: Any
    """Bits of the float32 significand that rounding drops: 23 - mantissa_bits."""
    half: Any
    """Added before rounding to nearest, together with the odd bit: half a step, minus the bit that ties to even
    need."""
    odd: Any
    """1 where ties go to even; 0 where a tie is decided by `half` alone."""
    magic: Any
    """2^23 fixed steps."""
    scale: Any
    """1 / the fixed step."""
    step: Any
    """The fixed step."""
    largest: Any
    over: Any
    """The result for a rounded magnitude above the largest."""
    nan_above: Any
    """Magnitudes above it give NaN: infinity's bits, or those of the largest finite float32 where infinities give NaN
    too."""

    # None where both signs are treated alike, -0 is a value and an infinity becomes `over`: that saves a third.
    largest_negative: Any = None
    over_negative: Any = None
    infinite: Any = None
    """The result for an infinity, where `nan_above` does not make it NaN."""
    infinite_negative: Any = None
    zero_sign: Any = None
    """The sign bit, or 0 in formats without -0."""
    # Not None for directed rounding, and where ties go away from zero.
    add: Any = None
    """Rounds up where the remainder, in 2^-32 steps, plus this is at least a step."""
    add_negative: Any = None


Scalars = tuple[np.uint32, ...]

_SIGNIFICANT = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}
_SMALLEST = {torch.float32: -149, torch.bfloat16: -133, torch.float16: -24}
_ADDED = {
    "nearest_away": (1 << 31, 1 << 31), "nearest_up": (1 << 31, (1 << 31) - 2), "toward_zero": (0, 0),
    "up": (_ALL, 0), "down": (0, _ALL),
}  # fmt: skip
# For negative values, ties toward +inf keep the smaller magnitude. A remainder has its lowest bit set where anything is
# left, and since float32 has only multiples of 2^-24 steps above a half, the next remainder is far above that bit.


def float_bits(value: float) -> int:
    """The bits of a float32 magnitude."""
    return int(np.float32(abs(value)).view(np.uint32))


def _step(format: Format, overflow: str, dtype: torch.dtype, source: torch.dtype | None) -> int | None:
    """The exponent of a format's smallest step; None where `scalars` returns None."""
    if isinstance(format, Integer):
        step, significant = -format.fraction_bits, format.high.bit_length()
        known = -100 < step < 100
    elif isinstance(format, Float):
        step, significant = format.min_exponent - format.mantissa_bits, format.mantissa_bits + 1
        # Without mantissa bits a tie depends on the parity of the exponent, which kernels do not support.
        known = 1 <= format.mantissa_bits <= 22 and format.max_exponent <= 127
        known = known and (format.min_exponent == -126 or -126 <= step <= 104)
    else:
        return None
    if source is not None:
        known = known and dtype in _SIGNIFICANT
        known = known and (overflow != "ieee" or shared_range(format, dtype) == (format.min, format.max))
        known = known and (source == dtype or (significant <= _SIGNIFICANT[dtype] and step >= _SMALLEST[dtype]))
    return step if known else None


@cache
def scalars(
    format: Format,
    rounding: str,
    overflow: str,
    dtype: torch.dtype = torch.float32,
    source: torch.dtype | None = None,
) -> Any:
    """The `Rounding` of a format as `Scalars`, for values written in `dtype`. None where its step or its largest value
    is not exact in float32; with a `source`, also where `dtype` lacks a value that rounding a `source` value can
    give."""
    if (step := _step(format, overflow, dtype, source)) is None:
        return None
    lowest, largest = shared_range(format, dtype) if overflow == "saturate" else (format.min, format.max)
    over = infinite = (largest, -lowest)
    nan_above = INFINITY
    if isinstance(format, Float):
        fixed_below = ldexp(1, format.min_exponent)
        if format.min_exponent == -126:  # as in float32, whose subnormals have steps of the last bit too
            step, fixed_below = 0, 0.0
        if overflow == "ieee" and format.specials != "finite":
            beyond = inf if format.has_infinity else nan
            stays = {"toward_zero": (1, 1), "up": (0, 1), "down": (1, 0)}.get(rounding, (0, 0))
            over = (largest if stays[0] else beyond, -lowest if stays[1] else beyond)
            infinite = (beyond, beyond)
        shift = 23 - format.mantissa_bits
        half, odd = (1 << shift - 1) - 1, 1
        if format.specials == "fnuz":
            nan_above = INFINITY - 1
    else:
        fixed_below, shift, half, odd = inf, 23, 0, 0
    numbers = Rounding(
        min_normal=float_bits(fixed_below),
        shift=shift,
        half=half,
        odd=odd,
        magic=float_bits(ldexp(1, step + 23)),
        scale=float_bits(ldexp(1, -step)),
        step=float_bits(ldexp(1, step)),
        largest=float_bits(largest),
        over=_special(over[0]),
        nan_above=nan_above,
    )
    beyond_range = {_special(value) for value in (*over, *infinite)}
    directed = rounding not in ("nearest_even", "stochastic")
    alike = largest == -lowest and len(beyond_range) == 1 and format.has_negative_zero
    if directed or not alike:
        numbers = numbers._replace(
            largest_negative=float_bits(lowest),
            over_negative=_special(over[1]),
            infinite=_special(infinite[0]),
            infinite_negative=_special(infinite[1]),
            zero_sign=SIGN if format.has_negative_zero else 0,
        )
    if directed:
        add, add_negative = _ADDED[rounding]
        numbers = numbers._replace(add=add, add_negative=add_negative)
    return tuple(np.uint32(number) for number in numbers if number is not None)


def _special(value: float) -> int:
    return NAN if value != value else float_bits(value)


def rounded(bits: Lane, p: Rounding, noise: Lane | None = None) -> Lane:
    """Float32 bits rounded: with `noise`, in the direction of `p.add`, or without either to nearest even.

    Noise rounds up if and only if floor(remainder * 2^32) + noise >= 2^32, the remainder in steps.
    """
    magnitude = bits & MAGNITUDE
    if noise is None and p.add is None:
        on_bits, steps = nearest_both(magnitude, p)
        fixed = (steps - p.magic.float()).bits()
    else:
        on_bits, steps = noisy_both(bits, magnitude, noise, p)
        fixed = (steps * p.step.float()).bits()
    return finish(bits, magnitude, magnitude.below(p.min_normal).pick(fixed, on_bits & kept(p)), p)


def nearest_both(magnitude: Lane, p: Rounding) -> tuple[Lane, Lane]:
    """The bits with rounding's carry added, low bits not yet cleared; and 2^23 plus the number of fixed steps."""
    return magnitude + p.half + ((magnitude >> p.shift) & p.odd), magnitude.float() + p.magic.float()


def noisy_both(bits: Lane, magnitude: Lane, noise: Lane | None, p: Rounding) -> tuple[Lane, Lane]:
    """The bits with rounding's carry added, and the number of fixed steps, as a float.

    Without noise, directed rounding adds `p.add`, and notices a remainder below 2^-32 too.
    """
    steps = magnitude.float() * p.scale.float()
    if p.zero_sign is not None:  # integer formats get here with values of any size
        steps = steps.min(2.0**23)
    whole = steps.truncated().value_as_float()
    rest = steps - whole
    remainder = (rest * 2.0**32).truncated_wide()
    if noise is None:  # `steps` may have flushed to zero, too
        noise = (bits > MAGNITUDE).pick(p.add_negative, p.add)
        remainder = remainder | (rest > 0.0).to(32) | ((whole <= 0.0).to(32) & (magnitude > 0).to(32))
    rises = (remainder + noise) < remainder
    return magnitude + (noise >> (p.shift.constant(32) - p.shift)), rises.pick(whole + 1.0, whole)


def kept(p: Rounding) -> Lane:
    """The mask of the bits that rounding keeps."""
    return p.shift.constant(_ALL) << p.shift


def finish(bits: Lane, magnitude: Lane, rounded: Lane, p: Any) -> Lane:
    """The rounded magnitude, or the overflow result, with its sign; for 16 bits (`Narrow`), in upper halves.

    A NaN's magnitude may have been rounded up into the sign bit, where it compares as negative: it is NaN all the same.
    """
    nan, sign = (bits.constant(number >> 32 - bits.type.width) for number in (NAN, SIGN))
    rounded = within(bits, magnitude, rounded, p, p.nan_above, nan)
    return rounded | (bits & (sign if p.zero_sign is None else rounded.equals(0).pick(p.zero_sign, sign)))


def within(bits: Lane, magnitude: Lane, value: Lane, p: Any, nan_above: Lane, nan: Lane) -> Lane:
    """The rounded value or code of a magnitude, replaced where it overflows, is infinite or NaN, by the constants p."""
    if p.over_negative is None:
        value = value.above(p.largest).pick(p.over, value)
    else:
        sign, infinity = (bits.constant(number >> 32 - bits.type.width) for number in (SIGN, INFINITY))
        negative = bits >= sign
        over = negative.pick(p.over_negative, p.over)
        value = value.above(negative.pick(p.largest_negative, p.largest)).pick(over, value)
        value = magnitude.equals(infinity).pick(negative.pick(p.infinite_negative, p.infinite), value)
    return magnitude.above(nan_above).pick(nan, value)
