"""Elements of a tile: scaled, encoded and packed, or scaled, rounded and multiplied by the scale again.

Also a tile's scale from its amax: the stored scale, the multiplier, and what elements are multiplied or divided by.

`Q` is an `Element`, `R` a `Rule` of `kernels.gpu.quantizers`, `E` the rounding and encoding of E4M3: all constants of
the compiled kernel.
"""

import triton
import triton.language as tl

from halfstep.kernels.gpu.jit.instruction import converted, numbers_converted, unconverted, words_converted
from halfstep.kernels.gpu.jit.numbers import (
    as_bits,
    as_float,
    coded,
    constant,
    decoded,
    narrowed,
    nearest_bf16,
    rounded,
)


@triton.jit
def power_byte(amax, R: tl.constexpr):
    """The byte k + 127 of the scale 2^k, from the bits of amax; 0 for a tile of zeros, 255 for infinity or NaN."""
    whole = as_bits(amax.to(tl.float32)) - (149 << 23)  # a subnormal, normalized with an exponent below the smallest
    raised = tl.where(amax < 1 << 23, whole, amax) + R.added
    exponent = (raised.to(tl.int32, bitcast=True) >> 23) - R.exponent
    return tl.where(amax >= 0x7F800000, 255, tl.minimum(tl.maximum(exponent, 0), 254)).to(tl.uint32)


@triton.jit
def power_of(byte):
    """The float32 scale of a byte."""
    bits = tl.where(byte == 0, 0x400000, byte << 23)
    return as_float(tl.where(byte == 255, 0x7FC00000, bits).to(tl.uint32))


@triton.jit
def inverse_power_of(byte):
    """1 / the scale of a byte; finite for 255 too."""
    return as_float(tl.where(byte >= 254, 0x400000, (254 - byte) << 23).to(tl.uint32))


@triton.jit
def known(amax):
    """The float32 with the bits of amax; NaN where it is not finite."""
    return as_float(tl.where(amax >= 0x7F800000, 0x7FC00000, amax).to(tl.uint32))


@triton.jit
def tensor_scale_of(amax, R: tl.constexpr):
    """The tensor's scale in two-level scaling, from the largest amax of its tiles that are finite."""
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
    """`tensor_scale_of` the amax at `found`; program 0 stores it to `tensor`, if that is given."""
    scale = tensor_scale_of(tl.load(found), R)
    if tensor is not None and tl.program_id(0) == 0:
        tl.store(tensor, scale.to(tl.int32, bitcast=True))
    return scale


@triton.jit
def both_scales_kept(found, tensor, turned_found, turned_tensor, R: tl.constexpr):
    """`tensor_scale_kept` for both copies of a matrix."""
    scale, turned_scale = tensor_scale_of(tl.load(found), R), tensor_scale_of(tl.load(turned_found), R)
    if tl.program_id(0) == 0:
        tl.store(tensor, scale.to(tl.int32, bitcast=True))
        tl.store(turned_tensor, turned_scale.to(tl.int32, bitcast=True))
    return scale, turned_scale


@triton.jit
def e4m3_scale(number, quotient, tensor_scale, R: tl.constexpr, E: tl.constexpr):
    """The E4M3 code and value of a tile's scale in two-level scaling; with R.up the next larger one where amax would be
    clipped. `number` is amax, `quotient` the unrounded scale."""
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
    """For tiles with these amaxes: the bits to store as scale; the multiplier; what elements are multiplied or divided
    by; and a mask that zeroes the elements of tiles whose amax is not finite, and of tiles with scale 0.

    With two levels, the multiplier does not include the tensor's scale.
    """
    number = known(amax)
    keep = tl.where(amax >= 0x7F800000, 0, 0xFFFFFFFF).to(tl.uint32)
    if R.kind == "power":
        if R.part is not None:
            amax = as_bits(as_float(amax) * constant(R.part))
        stored = power_byte(amax, R)
        multiplier, element_scale = power_of(stored), inverse_power_of(stored)
        if R.part is not None:
            multiplier, element_scale = tl.div_rn(multiplier, constant(R.part)), element_scale * constant(R.part)
    elif R.kind == "reciprocal":
        element_scale = tl.where(amax == 0, 1.0, tl.div_rn(constant(R.largest), number))
        element_scale = tl.where(as_bits(element_scale) == 0x7F800000, constant(0x7F7FFFFF), element_scale)
        multiplier = tl.div_rn(constant(0x3F800000), element_scale)
        stored = as_bits(multiplier)
        element_scale = tl.where(keep == 0, 1.0, element_scale)
    else:
        multiplier = tl.div_rn(number, constant(R.largest))
        stored, element_scale = as_bits(multiplier), multiplier
        if R.kind == "narrow":
            stored = nearest_bf16(multiplier)
            multiplier, element_scale = as_float(stored), as_float(stored)
        if R.kind == "two_level":
            quotient = tl.div_rn(multiplier, tensor_scale)
            stored, multiplier = e4m3_scale(number, quotient, tensor_scale, R, E)
            element_scale = multiplier * tensor_scale
        keep = tl.where(element_scale > 0.0, 0xFFFFFFFF, 0).to(tl.uint32)
        element_scale = tl.where(element_scale > 0.0, element_scale, 1.0)
    return stored, multiplier, element_scale, keep


@triton.jit
def over(bits, element_scale, keep, R: tl.constexpr):
    """The bits of elements divided by their scale, or multiplied by its reciprocal."""
    number = as_float(bits) if keep is None else as_float(bits & keep)
    times: tl.constexpr = R.kind == "power" or R.kind == "reciprocal"
    return as_bits(number * element_scale if times else tl.div_rn(number, element_scale))


@triton.jit
def number_coded(bits, P: tl.constexpr, C: tl.constexpr):
    """The codes of float32 bits without NaN, rounded to nearest: for floats that saturate and treat both signs alike
    (`kernels.cpu.element_codes.encoded_number`); two thirds of the instructions of `coded`."""
    magnitude = tl.minimum(bits & 0x7FFFFFFF, P.largest).to(tl.uint32)
    binade = tl.maximum(magnitude & 0x7F800000, P.min_normal).to(tl.uint32)
    below: tl.constexpr = P.magic - P.min_normal + (1 << 22) + 256 - ((P.min_normal >> P.shift) & 0xFF)
    steps = as_bits(as_float(magnitude) + as_float((binade + (below & 0xFFFFFFFF)).to(tl.uint32))) + (binade >> P.shift)
    sign: tl.constexpr = 0x80000000 >> C.sign_shift
    return (steps & (sign - 1)) | ((bits >> C.sign_shift) & sign)


@triton.jit
def code_with_nan(bits, Q: tl.constexpr):
    """The codes of float32 bits in a float format, NaN allowed, rounded to nearest: 32 bits each, or a byte each."""
    P: tl.constexpr = Q.rounding
    C: tl.constexpr = Q.coding
    OWN: tl.constexpr = Q.instruction
    return converted(bits, OWN) if Q.instruction is not None else coded(bits, None, P, C)


@triton.jit
def code_of(bits, random_bits, known, Q: tl.constexpr):
    """The codes of float32 bits without NaN: 32 bits each, or a byte each. `known` is a codebook's
    `quantizers.table`."""
    P: tl.constexpr = Q.rounding  # triton 3.6 passes a nested tuple on only as a constant of its own
    C: tl.constexpr = Q.coding
    T: tl.constexpr = Q.bins
    OWN: tl.constexpr = Q.instruction
    if Q.bins is not None:
        code = codebook_code(as_float(bits), known, T).to(tl.uint32, bitcast=True)
    elif Q.instruction is not None and random_bits is None:
        code = converted(bits, OWN)
    elif Q.cuts is None:
        alike: tl.constexpr = random_bits is None and Q.coding.complement is None
        code = number_coded(bits, P, C) if alike else coded(bits, random_bits, P, C)
    else:
        code = tl.zeros_like(bits)
        for i in tl.static_range(len(Q.cuts)):
            code = tl.where(as_float(bits) > Q.cuts[i], i + 1, code).to(tl.uint32)
        if Q.order is not None:
            half = tl.where(code > 7, Q.order[1], Q.order[0]).to(tl.uint32)
            code = (half >> ((code & 7) << 2)) & 15
    return code


@triton.jit
def element_of(code, D: tl.constexpr, OWN: tl.constexpr):
    """The float32 values of one-byte float codes, by the GPU's own conversion if OWN names one."""
    return unconverted(code, OWN) if OWN is not None else as_float(decoded(code.to(tl.uint32), D))


@triton.jit
def kept_codes(bits, keep, Q: tl.constexpr):
    """The one-byte codes of float32 bits, 0 where the mask `keep` is 0: only there may bits be NaN."""
    OWN: tl.constexpr = Q.instruction
    by_bits: tl.constexpr = Q.instruction is None
    return (
        code_of(bits & keep, None, None, Q).to(tl.uint8) if by_bits else numbers_converted(bits, keep.to(tl.uint8), OWN)
    )


@triton.jit
def kept_words(a, b, c, d, keep, Q: tl.constexpr):
    """`kept_codes` of four tensors, packed in 32-bit words with the codes of the first lowest."""
    OWN: tl.constexpr = Q.instruction
    if Q.instruction is not None:
        word = words_converted(a, b, c, d, keep, OWN)
    else:
        one, two = kept_codes(a, keep, Q).to(tl.uint32), kept_codes(b, keep, Q).to(tl.uint32)
        three, last = kept_codes(c, keep, Q).to(tl.uint32), kept_codes(d, keep, Q).to(tl.uint32)
        word = one | (two << 8) | (three << 16) | (last << 24)
    return word


@triton.jit
def value_of(bits, random_bits, known, Q: tl.constexpr):
    """The float32 bits rounded: the values of the codes of `code_of`."""
    P: tl.constexpr = Q.rounding
    T: tl.constexpr = Q.bins
    if Q.bins is not None:
        value = value_at(codebook_code(as_float(bits), known, T), known)
    elif Q.cuts is None:
        value = as_float(rounded(bits, random_bits, P))
    else:
        found = tl.full(bits.shape, Q.values[0], tl.uint32)
        for i in tl.static_range(len(Q.cuts)):
            found = tl.where(as_float(bits) > Q.cuts[i], Q.values[i + 1], found).to(tl.uint32)
        value = as_float(found)
    return value


@triton.jit
def together(code, Q: tl.constexpr):
    """A block's codes packed along its rows (`quant.pack`): two 4-bit codes in a byte, four 6-bit codes in 24 bits."""
    ROWS: tl.constexpr = code.shape[0]
    COLUMNS: tl.constexpr = code.shape[1]
    if Q.bits == 4:
        one, two = tl.split(tl.reshape(code, (ROWS, COLUMNS // 2, 2)))
        made = (two | (one << 4)) if Q.high_first else (one | (two << 4))
    elif Q.bits == 6:
        even, odd = tl.split(tl.reshape(code, (ROWS, COLUMNS // 2, 2)))
        one, two = tl.split(tl.reshape(even | (odd << 6), (ROWS, COLUMNS // 4, 2)))
        made = one | (two << 12)
    else:
        made = code
    return made


@triton.jit
def written(value, multiplier, R: tl.constexpr, OUT: tl.constexpr, TARGET: tl.constexpr):
    """Rounded elements times the multiplier of their tile, saturated to the finite range of TARGET, as bits to
    store."""
    product = value * multiplier
    if R.kind != "power":
        product = tl.where(multiplier == 0.0, 0.0, product)  # whatever the codes of a tile with scale 0 decode to
    bits = as_bits(product)
    if OUT is not None:
        return narrowed(rounded(bits, None, OUT), TARGET)
    return narrowed(tl.where((bits & 0x7FFFFFFF) == 0x7F800000, bits - 1, bits).to(tl.uint32), TARGET)


# ---- codebooks of 256 increasing values, by the table of `kernels.gpu.quantizers` ------------------------------------


@triton.jit
def value_at(code, known):
    """The float32 values of codes, from the table `known`."""
    return as_float(tl.load(known + code.to(tl.int32)).to(tl.uint32, bitcast=True))


@triton.jit
def codebook_code(number, known, T: tl.constexpr):
    """How many of 255 increasing cut points are below each value, which is not NaN: its code."""
    bits = as_bits(number)
    bin = ((bits & 0x7FFFFFFF) >> T.shift).to(tl.int32) - T.first
    bin = tl.minimum(tl.maximum(bin, 0), T.most - 1) + tl.where(bits > 0x7FFFFFFF, T.most, 0)
    found = known + 256 + 2 * bin
    cut = as_float(tl.load(found).to(tl.uint32, bitcast=True))
    return tl.load(found + 1) + (number > cut).to(tl.int32)
