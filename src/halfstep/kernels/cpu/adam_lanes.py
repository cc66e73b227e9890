"""What Adam's kernel does to one element, in lanes: how numbers are read and written, and the update itself."""

from __future__ import annotations

from numba import types

from halfstep.kernels.cpu.lanes import (
    INFINITY,
    MAGNITUDE,
    NAN,
    UPPER,
    bf16_of,
    bits_of,
    lanes,
    rounded_up_half,
    stored_as,
)
from halfstep.kernels.cpu.noise import noise


@lanes(types.float32)
def decode(value):
    """The float32 value of a stored number."""
    return bits_of(value).float()


@lanes(types.float32)
def first_moment(m, g, beta1, rest1):
    return m * beta1 + g * rest1


@lanes(types.float32)
def second_moment(v, g, beta2, rest2):
    return v * beta2 + g * g * rest2


@lanes(types.float32)
def kept_moment(new, old, most):
    """A new moment; the old one where the bits of `most` are an infinity's or NaN's."""
    return (most < INFINITY).pick(new, old)


@lanes(types.float32)
def moved_weight(weight, m, v, keep, step_size, rescale, eps):
    return weight * keep - m / (v.sqrt() * rescale + eps) * step_size


# A NaN that arithmetic returns is quiet: its upper half alone is one too, so it is enough not to round it.


@lanes("like")
def encode(value, like):
    """A computed float32 rounded to nearest-even into the type of `like`."""
    if like == types.uint16:
        return (_rounded(value) >> 16).to(16)
    return stored_as(value.bits(), like)


def _rounded(value):
    bits = value.bits()
    return value.is_nan().pick(bits, rounded_up_half(bits))


@lanes(types.uint16)
def encode_stochastic(value, index, keys):
    """A float32 rounded to bfloat16, up with the probability of the remainder: add 16 noise bits, then truncate."""
    bits = value.bits()
    infinite = (bits & MAGNITUDE).equals(INFINITY)
    return bf16_of(bits, infinite.pick(bits, bits + (noise(keys, index) >> 16)))


@lanes(types.float32)
def nearest_bf16_value(value):
    """A computed float32 rounded to the nearest bfloat16, in float32."""
    return (_rounded(value) & UPPER).float()


@lanes(types.float32)
def bf16_sum(one, other):
    """The sum of two bfloat16 numbers in float32, rounded to the nearest bfloat16.

    A NaN needs no care: it is one of theirs or the processor's own, whose lower half is zero, and nothing is carried.
    """
    return (rounded_up_half((one + other).bits()) & UPPER).float()


@lanes(types.float32)
def bf16_difference(one, other):
    """The difference of two bfloat16 numbers in float32, rounded to the nearest bfloat16."""
    return (rounded_up_half((one - other).bits()) & UPPER).float()


@lanes(types.uint16)
def as_bf16(value):
    """A float32 that is a bfloat16 number, as such."""
    return (value.bits() >> 16).to(16)


@lanes(types.float32)
def joined(high, low):
    """The float32 of a rounded upper half and the signed rest (`quant.masters.split`)."""
    upper = high.to(32) << 16
    joined = (upper + (low.to(32) << 16).shift_signed(16)).float()
    return joined.is_nan().pick(upper.float(), joined)


@lanes(types.uint16)
def upper_half(value):
    """The upper half of a float32's bits, rounded to nearest with ties away; a NaN's payload may not carry."""
    bits = value.bits()
    return (value.is_nan().pick(bits.constant(NAN), bits + 0x8000) >> 16).to(16)


@lanes(types.uint16)
def lower_half(value):
    return value.bits().to(16)
