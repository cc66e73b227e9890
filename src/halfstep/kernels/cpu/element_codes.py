"""Encoding and decoding of one element, in lanes: `elements` rounds, this file computes the code of the result.

A codebook's code is found by the cut points between its values.
"""

from functools import cache
from math import ldexp
from typing import Any, NamedTuple

import numpy as np
import torch

from halfstep.formats import Codebook, Float, Format, Integer
from halfstep.kernels.cpu import elements
from halfstep.kernels.cpu.lanes import INFINITY, MAGNITUDE, NAN, SIGN, Lane


class Coding(NamedTuple):
    """The constants of one encoding, besides those of its `Rounding`; codes are without sign, except fnuz's NaN."""

    bias: Any
    """The difference between the float32 bits, shifted down to the format's, and the code."""
    largest: Any
    over: Any
    nan: Any
    sign_shift: Any
    """The distance of a float32's sign bit from a code's."""

    # None where both signs are treated alike, -0 has a code and an infinity becomes `over`.
    largest_negative: Any = None
    over_negative: Any = None
    infinite: Any = None
    infinite_negative: Any = None
    complement: Any = None
    """For signed integers the mask of a code's bits, all set; 0 for floats."""


def in_bytes(format: Format, rounding: str) -> Any:
    """The saturating `scalars` of a format whose codes are packed into bytes (4, 6 or 8 bits); None for other
    formats."""
    return scalars(format, rounding, "saturate") if format.bits in (4, 6, 8) else None


@cache
def scalars(format: Format, rounding: str, overflow: str) -> Any:
    """The `Rounding` and the `Coding` of a format, `Scalars` each. None for more than 16 bits, and where
    `elements.scalars` gives None."""
    numbers = elements.scalars(format, rounding, overflow)
    if numbers is None or format.bits > 16:
        return None
    p = elements.Rounding(*(int(n) for n in numbers))
    bias = 0
    if isinstance(format, Float):
        bias = format.min_exponent - 1 + 127 << format.mantissa_bits
        last = (1 << format.bits - 1) - 1
        infinity = (1 << format.exponent_bits) - 1 << format.mantissa_bits
        nan = {"fn": last, "fnuz": last + 1}.get(format.specials, infinity | 1 << max(format.mantissa_bits - 1, 0))
    else:
        nan = infinity = 0

    def code(value: Any) -> Any:
        if value is None or value == NAN:
            return value and nan
        if value == INFINITY:
            return infinity
        magnitude = float(np.uint32(value).view(np.float32))
        if isinstance(format, Integer):
            return int(ldexp(magnitude, format.fraction_bits))
        if magnitude < format.min_normal:
            return int(magnitude / format.min_subnormal)
        return (value >> p.shift) - bias

    coding = Coding(
        bias=bias,
        largest=code(p.largest) or 0,
        over=code(p.over) or 0,
        nan=nan,
        sign_shift=32 - format.bits,
        largest_negative=code(p.largest_negative),
        over_negative=code(p.over_negative),
        infinite=code(p.infinite),
        infinite_negative=code(p.infinite_negative),
        complement=None if p.zero_sign is None else 0 if isinstance(format, Float) else (1 << format.bits) - 1,
    )
    return numbers, tuple(np.uint32(number) for number in coding if number is not None)


def encoded(bits: Lane, p: elements.Rounding, c: Coding, noise: Lane | None = None) -> Lane:
    """The code of float32 bits after the rounding of `elements.rounded`, as 32 bits."""
    magnitude = bits & MAGNITUDE
    if noise is None and p.add is None:
        on_bits, steps = elements.nearest_both(magnitude, p)
        fixed = steps.bits() - p.magic
    else:
        on_bits, steps = elements.noisy_both(bits, magnitude, noise, p)
        fixed = steps.truncated()
    return _finish(bits, magnitude, magnitude.below(p.min_normal).pick(fixed, (on_bits >> p.shift) - c.bias), p, c)


def encoded_number(bits: Lane, p: elements.Rounding, c: Coding) -> Lane:
    """The code, in the low 8 bits, of float32 bits without NaN, rounded to nearest, for floats that saturate and treat
    both signs alike.

    A float32 sum with 1.5 times the power of two whose last bit is a step leaves the number of steps in its low bits,
    and a magnitude clamped to the largest needs no further checks. The difference between the binade's own code and its
    position is an even number of steps, which the sum subtracts too.
    """
    magnitude = (bits & MAGNITUDE).min(p.largest)
    binade = (magnitude & INFINITY).max(p.min_normal)
    below = p.magic.constant(256) - ((p.min_normal >> p.shift) & 0xFF)
    beside = binade + (p.magic - p.min_normal + (1 << 22) + below)
    steps = (magnitude.float() + beside.float()).bits() + (binade >> p.shift)
    sign = c.sign_shift.constant(SIGN) >> c.sign_shift
    return (steps & (sign - 1)) | ((bits >> c.sign_shift) & sign)


def _finish(bits: Lane, magnitude: Lane, code: Lane, p: elements.Rounding, c: Coding) -> Lane:
    code, sign = elements.within(bits, magnitude, code, c, p.nan_above, c.nan), (bits & SIGN) >> c.sign_shift
    if c.complement is None:
        return code | sign
    twos = (bits > MAGNITUDE).pick(code.constant(0) - code, code) & c.complement
    signed = code | code.equals(0).pick((bits & p.zero_sign) >> c.sign_shift, sign)
    return c.complement.equals(0).pick(signed, twos)


# ---- decoding ----------------------------------------------------------------------------------------------------


class Decoding(NamedTuple):
    """The constants that turn a code into float32 bits."""

    sign_shift: Any
    shift: Any
    offset: Any
    """Added to the magnitude's bits after they are shifted to float32's position."""
    min_normal: Any
    """Smaller codes count fixed steps."""
    step: Any
    largest: Any
    over: Any
    """The value of the code after the largest: infinity or NaN. Higher codes are NaN."""
    nan: Any
    """A code, sign included, that is NaN."""
    half: Any
    """Codes up to this one, without sign, are the upper bits of a float16, apart from its larger exponent range; 0
    where none are."""


@cache
def decoding_scalars(format: Format, dtype: torch.dtype | None = None) -> Any:
    """The `Decoding` of a float that `scalars` supports; for an integer, the number of bits above its sign, and its
    step. With a `dtype`, None where a value is not decoded by arithmetic, or would need rounding to the dtype."""
    if dtype is not None and (
        format.bits > 16 or elements.scalars(format, "nearest_even", "ieee", dtype, torch.float64) is None
    ):
        return None
    if isinstance(format, Integer):
        return np.uint32(32 - format.bits if format.low else 0), np.uint32(elements.float_bits(format.smallest))
    assert isinstance(format, Float)
    magnitude = (1 << format.bits - 1) - 1
    infinity = (1 << format.exponent_bits) - 1 << format.mantissa_bits
    same = format.min_exponent == -126
    numbers = Decoding(
        sign_shift=32 - format.bits,
        shift=23 - format.mantissa_bits,
        offset=127 - format.bias << 23,
        min_normal=0 if same else 1 << format.mantissa_bits,
        step=elements.float_bits(1.0 if same else format.min_subnormal),
        largest={"ieee": infinity - 1, "fn": magnitude - 1}.get(format.specials, magnitude),
        over=INFINITY if format.has_infinity else NAN,
        nan=1 << format.bits - 1 if format.specials == "fnuz" else elements._ALL,
        half=_half_codes(format, infinity, magnitude),
    )
    return tuple(np.uint32(number & elements._ALL) for number in numbers)


def are_halves(format: Float) -> bool:
    """Whether `half_of` supports codes of the format."""
    return format.exponent_bits <= 5 and format.bits <= 8 and format.specials != "fnuz"


def _half_codes(format: Float, infinity: int, magnitude: int) -> int:
    """The largest code that `half_of` supports. With float16's exponents, only codes with the same meaning as in
    float16."""
    if not are_halves(format):
        return 0
    if format.exponent_bits == 5:
        return magnitude if format.specials == "ieee" else infinity - 1
    return {"ieee": infinity - 1, "fn": magnitude - 1}.get(format.specials, magnitude)


def half_of(code: Lane, d: Decoding) -> Lane:
    """The value of a one-byte code over 2^(15 - bias), a float32; not for codes above `d.half`."""
    at_top = code.to(16) << (d.sign_shift - 16).to(16)
    fewer = (d.sign_shift - d.shift - 3).to(16)  # bits of exponent than float16's
    kept = at_top.constant(0x7FFF) >> fewer | 0x8000
    return (at_top.shift_signed(fewer) & kept).half_to_float()


def decoded(code: Lane, numbers: list[Lane]) -> Lane:
    """The float32 bits of a 32-bit code, with the constants of `decoding_scalars`."""
    if len(numbers) == 2:
        shift, step = numbers
        return ((code << shift).shift_signed(shift).value_as_float() * step.float()).bits()
    d = Decoding(*numbers)
    shifted = code << d.sign_shift
    magnitude = (shifted & MAGNITUDE) >> d.sign_shift
    fixed = (magnitude.value_as_float() * d.step.float()).bits()
    value = magnitude.below(d.min_normal).pick(fixed, (magnitude << d.shift) + d.offset)
    value = magnitude.above(d.largest).pick(d.over, value)
    nan = magnitude.above(d.largest + 1)
    value = nan.pick(value.constant(NAN), value) | (shifted & SIGN)
    return code.equals(d.nan).pick(value.constant(NAN), value)


@cache
def table(format: Format, dtype: torch.dtype) -> torch.Tensor:
    """The values of all codes, in order of code, in `dtype`."""
    return torch.tensor([format.decode(code) for code in format.codes()], dtype=torch.float64, device="cpu").to(dtype)


# ---- codebooks ---------------------------------------------------------------------------------------------------


@cache
def cut_points(format: Format, with_values: bool) -> Any:
    """A codebook's cut points as float32, rounded toward -inf so that y > cut holds exactly where it does for the exact
    cut point; followed by its values if `with_values`. None for other formats."""
    if not isinstance(format, Codebook):
        return None
    cuts = [np.float32(b) for b in format.boundaries()]
    cuts = [
        np.nextafter(c, np.float32(-np.inf)) if float(c) > b else c
        for c, b in zip(cuts, format.boundaries(), strict=True)
    ]
    return tuple(cuts) + (tuple(np.float32(v) for v in format.values()) if with_values else ())


def order_of(format: Format) -> tuple[int, int] | None:
    """The codes of a 4-bit codebook in order of value, 4 bits each, in two words; None where they count up."""
    order = [min(c for c in format.codes() if format.decode(c) == value) for value in format.values()]
    low, high = (sum(code << 4 * i for i, code in enumerate(part)) for part in (order[:8], order[8:]))
    return None if order == list(range(16)) else (low, high)


def searched(y: Lane, cuts: list[Lane], order: list[Lane] | None) -> Lane:
    """The code of y: the number of cut points below y, mapped by `order`, if given."""
    place = (y > cuts[0]).to(32)
    for cut in cuts[1:]:
        place = place + (y > cut).to(32)
    if order is None:
        return place.to(8)
    half = (place > 7).pick(order[1], order[0])
    return ((half >> ((place & 7) << 2)) & 15).to(8)


def looked_up(y: Lane, cuts: list[Lane]) -> Lane:
    """The codebook's value nearest to y; `cuts` holds the cut points, then the values."""
    count = len(cuts) // 2
    value = cuts[count]
    for cut, above in zip(cuts[:count], cuts[count + 1 :], strict=True):
        value = (y > cut).pick(above, value)
    return value
