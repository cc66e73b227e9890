"""Range expansion of groups of numbers: `quant.scaling.expansion`, on the polynomials of `quant.logarithm`.

`M` is the `Moment` of `kernels.gpu.kinds`.
"""

import triton
import triton.language as tl

from halfstep.kernels.gpu.jit.numbers import as_bits, as_float, constant


@triton.jit
def logarithm(x):
    """`quant.logarithm.log2`."""
    bits = as_bits(x)
    exponent = (bits - 0x3F3504F3).to(tl.int32, bitcast=True) >> 23
    t = as_float(bits - (exponent << 23).to(tl.uint32, bitcast=True)) - 1.0
    total = (t * 0.12926436960697174 - 0.20893390476703644) * t
    total = (total + 0.21521227061748505) * t
    total = (total - 0.23867566883563995) * t
    total = (total + 0.2879391014575958) * t
    total = (total - 0.3607162535190582) * t
    total = (total + 0.4809102714061737) * t
    total = (total - 0.7213472127914429) * t
    return exponent.to(tl.float32) + (total + 1.4426950216293335) * t


@triton.jit
def power(x):
    """`quant.logarithm.exp2`."""
    shifted = x + 12582912.0
    two = as_float((as_bits(shifted) - (0x4B400000 - 127)) << 23)
    f = x - (shifted - 12582912.0)
    total = (f * 0.0001534581242594868 + 0.0013399930903688073) * f
    total = (total + 0.009618489071726799) * f
    total = (total + 0.05550328642129898) * f
    total = (total + 0.24022646248340607) * f
    total = (total + 0.6931471824645996) * f
    return (total + 1.0) * two


@triton.jit
def scales(tiles, M: tl.constexpr):
    """Scale, exponent and center of each row of float32 bits; the scale of one with an infinity or NaN is NaN."""
    magnitude = (tiles & 0x7FFFFFFF).to(tl.int32, bitcast=True)
    most = tl.max(magnitude, 1)
    least = tl.min(tl.where(magnitude == 0, 0x7FFFFFFF, magnitude), 1)
    usual = (most > 0) & (most < 0x7F800000)
    largest = tl.where(usual, most, 0x3F800000).to(tl.float32, bitcast=True)
    smallest = tl.where(usual, least, 0x3F800000).to(tl.float32, bitcast=True)
    floor = largest * 1.1754943508222875e-38
    smallest = tl.where(smallest < floor, floor, smallest)
    span = logarithm(tl.div_rn(largest, smallest))
    exponent = tl.div_rn(1.0 + span * 0.0, span) * constant(M.range)
    exponent = tl.where(exponent > 8.0, 8.0, exponent)
    if M.sixteenths:
        exponent = (exponent * 16.0).to(tl.int32).to(tl.float32) * 0.0625
    exponent = tl.where(exponent < 0.0625, 0.0625, exponent)
    center = smallest * power(span * 0.5)
    scale = power(exponent * logarithm(tl.div_rn(largest, center)) - constant(M.top))
    return as_float(tl.where(most >= 0x7F800000, 0x7FC00000, as_bits(scale))), exponent, center


@triton.jit
def elements(tiles, scale, exponent, center):
    """The bits of what is rounded, of each row with its numbers as columns; 0 in rows that are lost."""
    size = as_float(tiles & 0x7FFFFFFF)
    ratio = tl.div_rn(size, center + size * 0.0)
    bits = as_bits(power(exponent * logarithm(ratio) - logarithm(scale)))
    bits = tl.where(ratio == 0.0, 0, bits) | (tiles & 0x80000000)
    return tl.where(scale == scale, bits, 0)


@triton.jit
def values(element, scale, exponent, center):
    """The numbers that float32 elements stand for, of each row with its numbers as columns."""
    bits = as_bits(element)
    size = as_float(bits & 0x7FFFFFFF)
    root = tl.div_rn(1.0 + exponent * 0.0, exponent)
    value = power((logarithm(size) + logarithm(scale)) * root) * center
    value = as_float(as_bits(tl.where(size == 0.0, 0.0, value)) | (bits & 0x80000000))
    lost = (scale != scale) | (element != element)
    return tl.where(lost, as_float(tl.full(bits.shape, 0x7FC00000, tl.uint32)), value)
