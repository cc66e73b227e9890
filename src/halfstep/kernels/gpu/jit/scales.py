"""The scale of a tile from its largest magnitude, and back: what is stored, and what elements meet.

`R` is a rule (`kernels.gpu.quantizers.Rule`), `E` the rounding and the coding of E4M3, known when a kernel is compiled.
"""

import triton
import triton.language as tl

from halfstep.kernels.gpu.jit.numbers import as_bits, as_float, coded, constant, nearest_bf16, rounded


@triton.jit
def power_byte(amax, R: tl.constexpr):
    """The byte k + 127 of the scale 2^k; 0 for a tile of zeros, 255 for one with an infinity or NaN."""
    whole = as_bits(amax.to(tl.float32)) - (149 << 23)  # a subnormal's bits as if exponents went on below
    raised = tl.where(amax < 1 << 23, whole, amax) + R.added
    exponent = (raised.to(tl.int32, bitcast=True) >> 23) - R.exponent
    return tl.where(amax >= 0x7F800000, 255, tl.minimum(tl.maximum(exponent, 0), 254)).to(tl.uint32)


@triton.jit
def power_of(byte):
    """The scale of a byte, a float32."""
    bits = tl.where(byte == 0, 0x400000, byte << 23)
    return as_float(tl.where(byte == 255, 0x7FC00000, bits).to(tl.uint32))


@triton.jit
def inverse_power_of(byte):
    """1 / the scale of a byte; a number for 255, too."""
    return as_float(tl.where(byte >= 254, 0x400000, (254 - byte) << 23).to(tl.uint32))


@triton.jit
def known(amax):
    """A largest magnitude's number, NaN for one that is not finite."""
    return as_float(tl.where(amax >= 0x7F800000, 0x7FC00000, amax).to(tl.uint32))


@triton.jit
def tensor_scale_of(amax, R: tl.constexpr):
    """The tensor's scale of two levels, from the largest of its finite tiles' maxima."""
    number = as_float(amax)
    scale = tl.div_rn(number, constant(R.tensor_largest))
    scale = tl.where(scale == 0.0, 1.0, scale)
    if R.up:
        scale = tl.maximum(scale, constant(0x05000000))  # 2^-117
        clipped = tl.div_rn(number, scale * 448.0) > constant(R.largest)
        scale = as_float(as_bits(scale) + clipped.to(tl.uint32))
    return scale


@triton.jit
def tensor_scale_kept(found, tensor, R: tl.constexpr):
    """The same of what was found, which the first program stores where there is a place for it."""
    scale = tensor_scale_of(tl.load(found), R)
    if tensor is not None and tl.program_id(0) == 0:
        tl.store(tensor, scale.to(tl.int32, bitcast=True))
    return scale


@triton.jit
def both_scales_kept(found, tensor, turned_found, turned_tensor, R: tl.constexpr):
    """The same of two copies of a matrix."""
    scale, turned_scale = tensor_scale_of(tl.load(found), R), tensor_scale_of(tl.load(turned_found), R)
    if tl.program_id(0) == 0:
        tl.store(tensor, scale.to(tl.int32, bitcast=True))
        tl.store(turned_tensor, turned_scale.to(tl.int32, bitcast=True))
    return scale, turned_scale


@triton.jit
def e4m3_scale(number, quotient, tensor_scale, R: tl.constexpr, E: tl.constexpr):
    """The code and the number of a tile's scale of two levels: the next one up where the rule wants none clipped."""
    P: tl.constexpr = E.rounding
    C: tl.constexpr = E.coding
    code = coded(as_bits(quotient), None, P, C)
    bits = rounded(as_bits(quotient), None, P)
    scale = as_float(bits)
    if R.up:
        clipped = tl.div_rn(number, scale * tensor_scale) > constant(R.largest)
        step = as_float(tl.maximum(bits & 0x7F800000, E.rounding.min_normal).to(tl.uint32) - (3 << 23))
        scale, code = tl.where(clipped, scale + step, scale), code + clipped.to(tl.uint32)
    return code, scale


@triton.jit
def scales(amax, tensor_scale, R: tl.constexpr, E: tl.constexpr):
    """Of tiles with these largest magnitudes: the bits that are stored, the multiplier, what elements are multiplied by
    or divided by, and the mask that makes zeros of a lost tile's elements, or of a tile's whose scale is 0.

    Of two levels the multiplier is without the tensor's scale.
    """
    number = known(amax)
    keep = tl.where(amax >= 0x7F800000, 0, 0xFFFFFFFF).to(tl.uint32)
    if R.kind == "power":
        if R.part is not None:
            amax = as_bits(as_float(amax) * constant(R.part))
        stored = power_byte(amax, R)
        multiplier, meets = power_of(stored), inverse_power_of(stored)
        if R.part is not None:
            multiplier, meets = tl.div_rn(multiplier, constant(R.part)), meets * constant(R.part)
    elif R.kind == "reciprocal":
        meets = tl.where(amax == 0, 1.0, tl.div_rn(constant(R.largest), number))
        meets = tl.where(as_bits(meets) == 0x7F800000, constant(0x7F7FFFFF), meets)
        multiplier = tl.div_rn(constant(0x3F800000), meets)
        stored = as_bits(multiplier)
        meets = tl.where(keep == 0, 1.0, meets)
    else:
        multiplier = tl.div_rn(number, constant(R.largest))
        stored, meets = as_bits(multiplier), multiplier
        if R.kind == "narrow":
            stored = nearest_bf16(multiplier)
            multiplier, meets = as_float(stored), as_float(stored)
        if R.kind == "two_level":
            quotient = tl.div_rn(multiplier, tensor_scale)
            stored, multiplier = e4m3_scale(number, quotient, tensor_scale, R, E)
            meets = multiplier * tensor_scale
        keep = tl.where(meets > 0.0, 0xFFFFFFFF, 0).to(tl.uint32)
        meets = tl.where(meets > 0.0, meets, 1.0)
    return stored, multiplier, meets, keep


@triton.jit
def over(bits, meets, keep, R: tl.constexpr):
    """The bits of elements over their scale."""
    number = as_float(bits) if keep is None else as_float(bits & keep)
    times: tl.constexpr = R.kind == "power" or R.kind == "reciprocal"
    return as_bits(number * meets if times else tl.div_rn(number, meets))
