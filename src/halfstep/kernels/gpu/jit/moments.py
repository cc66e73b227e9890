"""Moments read and written as they are stored: in a dtype, or as codes with one scale per tile or per tensor.

`F` is the `Form` of `kernels.gpu.kinds`.
"""

import triton
import triton.language as tl

from halfstep.kernels.gpu.jit.elements import code_of, code_with_nan, element_of, scales, value_at
from halfstep.kernels.gpu.jit.masters import nearest
from halfstep.kernels.gpu.jit.numbers import as_bits, as_float, constant, held, read, widened
from halfstep.kernels.gpu.jit.tiles import over_scale, tile_maxima


INFINITY: tl.constexpr = tl.constexpr(float("inf"))


# ---- codes under one scale of the whole tensor, computed from its amax -----------------------------------------------


@triton.jit
def values(stored, scale, F: tl.constexpr):
    """The float32 values of codes under one scale."""
    KIND: tl.constexpr = F.kind
    D: tl.constexpr = F.decoding
    OWN: tl.constexpr = F.instruction
    element = element_of(stored, D, OWN) if F.kind == "codes" else as_float(widened(stored, KIND))
    return element * scale if F.rule.kind == "power" else tl.where(scale == 0.0, 0.0, held(element * scale))


@triton.jit
def note(most, number, inside):
    """Raise the amax bits at `most` to those of a block."""
    magnitude = (as_bits(number) & 0x7FFFFFFF).to(tl.int32, bitcast=True)
    if inside is not None:
        magnitude = tl.where(inside, magnitude, 0)
    tl.atomic_max(most, tl.max(magnitude, 0), sem="relaxed")


@triton.jit
def new_scale(most, F: tl.constexpr):
    """For a tensor with these amax bits: its scale, what elements are multiplied or divided by, and a mask on their
    bits."""
    R: tl.constexpr = F.rule
    most = most.to(tl.uint32, bitcast=True)
    _, scale, element_scale, keep = scales(most, None, R, None)
    if F.rule.kind == "power":  # where amax is not finite all elements become NaN, not 0
        element_scale = as_float(tl.where(most >= 0x7F800000, 0x7FC00000, as_bits(element_scale)).to(tl.uint32))
        keep = most | 0xFFFFFFFF
    return scale, element_scale, keep


@triton.jit
def codes(number, element_scale, keep, F: tl.constexpr, HALF: tl.constexpr):
    """The codes of float32 values under one scale, as bits to store."""
    KIND: tl.constexpr = F.kind
    Q: tl.constexpr = F.element
    if F.rule.kind == "power":
        number = number * element_scale
    else:
        number = as_float(as_bits(number) & keep)
        number = (
            number * element_scale if F.rule.kind == "reciprocal" else tl.div_rn(number, element_scale + number * 0.0)
        )
    return code_with_nan(as_bits(number), Q).to(tl.uint8) if F.kind == "codes" else nearest(number, KIND, HALF)


# ---- range expansion of groups: `quant.scaling.expansion`, on the polynomials of `quant.logarithm` -------------------


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
def expansion_scales(tiles, F: tl.constexpr):
    """Scale, exponent and center of each row of float32 bits; the scale is NaN where the row has an infinity or NaN."""
    magnitude = (tiles & 0x7FFFFFFF).to(tl.int32, bitcast=True)
    most = tl.max(magnitude, 1)
    least = tl.min(tl.where(magnitude == 0, 0x7FFFFFFF, magnitude), 1)
    usual = (most > 0) & (most < 0x7F800000)
    largest = tl.where(usual, most, 0x3F800000).to(tl.float32, bitcast=True)
    smallest = tl.where(usual, least, 0x3F800000).to(tl.float32, bitcast=True)
    floor = largest * 1.1754943508222875e-38
    smallest = tl.where(smallest < floor, floor, smallest)
    span = logarithm(tl.div_rn(largest, smallest))
    exponent = tl.div_rn(1.0 + span * 0.0, span) * constant(F.range)
    exponent = tl.where(exponent > 8.0, 8.0, exponent)
    if F.sixteenths:
        exponent = (exponent * 16.0).to(tl.int32).to(tl.float32) * 0.0625
    exponent = tl.where(exponent < 0.0625, 0.0625, exponent)
    center = smallest * power(span * 0.5)
    scale = power(exponent * logarithm(tl.div_rn(largest, center)) - constant(F.top))
    return as_float(tl.where(most >= 0x7F800000, 0x7FC00000, as_bits(scale))), exponent, center


@triton.jit
def expanded(tiles, scale, exponent, center):
    """The bits of elements with expanded range, to be rounded, one tile per row; 0 where the tile's scale is NaN."""
    size = as_float(tiles & 0x7FFFFFFF)
    ratio = tl.div_rn(size, center + size * 0.0)
    bits = as_bits(power(exponent * logarithm(ratio) - logarithm(scale)))
    bits = tl.where(ratio == 0.0, 0, bits) | (tiles & 0x80000000)
    return tl.where(scale == scale, bits, 0)


@triton.jit
def restored(element, scale, exponent, center):
    """The values of decoded elements with their range restored, one tile per row."""
    bits = as_bits(element)
    size = as_float(bits & 0x7FFFFFFF)
    root = tl.div_rn(1.0 + exponent * 0.0, exponent)
    value = power((logarithm(size) + logarithm(scale)) * root) * center
    value = as_float(as_bits(tl.where(size == 0.0, 0.0, value)) | (bits & 0x80000000))
    lost = (scale != scale) | (element != element)
    return tl.where(lost, as_float(tl.full(bits.shape, 0x7FC00000, tl.uint32)), value)


# ---- moments ---------------------------------------------------------------------------------------------------------


@triton.jit
def address(row, COLUMN: tl.constexpr, start, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """The integer pointer to element `start` of the tensor whose address is in this column of a table's row."""
    KEPT_AS: tl.constexpr = tl.int32 if KIND == "float32" else tl.uint8 if KIND == "uint8" else tl.int16
    place = tl.load(row + COLUMN).to(tl.pointer_type(KEPT_AS)) + start
    if ALIGNED:  # `start` is a multiple of the block's size
        place = tl.multiple_of(place, 16)
    return place


@triton.jit
def beside(row, COLUMN: tl.constexpr, start, group, inside):
    """One float32 per tile, such as its scale, from tile `start` on, as a column."""
    found = read(address(row, COLUMN, start, "float32", False) + group, inside)
    return as_float(found.to(tl.uint32, bitcast=True))[:, None]


@triton.jit
def opened(
    row, COLUMN: tl.constexpr, old, block, index, inside, size, known,
    F: tl.constexpr, ALIGNED: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The float32 values of a block of a moment; `old` points to its scale if it has one scale. `known` is a codebook's
    `quantizers.table`."""
    KIND: tl.constexpr = F.kind
    D: tl.constexpr = F.decoding
    OWN: tl.constexpr = F.instruction
    CONTAINER: tl.constexpr = F.container
    if F.rule is not None:
        return values(read(address(row, COLUMN, block * B, CONTAINER, ALIGNED) + index, inside), tl.load(old), F)
    elif F.tile == 0:
        return as_float(widened(read(address(row, COLUMN, block * B, KIND, ALIGNED) + index, inside), KIND))
    else:
        code = read(address(row, COLUMN, block * B, "uint8", ALIGNED) + index, inside)
        element = value_at(code, known) if F.kind == "places" else element_of(code, D, OWN)
        element = tl.reshape(element, (B // F.tile, F.tile))
        start, group = block * (B // F.tile), tl.arange(0, B // F.tile)
        there = (start + group) * F.tile < size
        scale = beside(row, COLUMN + 1, start, group, there)
        if F.kind == "expanded":
            exponent = beside(row, COLUMN + 2, start, group, there)
            center = beside(row, COLUMN + 3, start, group, there)
            value = held(restored(element, scale, exponent, center))
        else:
            value = tl.where(scale == 0.0, 0.0, held(element * scale))
        return tl.reshape(value, (B,))


@triton.jit
def is_lost(number, F: tl.constexpr):
    """Where a moment stored as codes would be infinity or NaN, and so invalidate the others under its scale."""
    coded: tl.constexpr = F.rule is not None or F.tile != 0
    return ~(tl.abs(number) < INFINITY) if coded else tl.full(number.shape, 0, tl.int1)


@triton.jit
def keep_beside(row, COLUMN: tl.constexpr, start, group, inside, number):
    """Write one float32 per tile, from tile `start` on."""
    place = address(row, COLUMN, start, "float32", False) + group
    tl.store(place, as_bits(number).to(tl.int32, bitcast=True), mask=inside)


@triton.jit
def keep_scale(row, COLUMN: tl.constexpr, block, scale):
    """Write the one scale of a tensor; only block 0 does."""
    place = address(row, COLUMN, 0, "float32", False)
    tl.store(place, as_bits(scale).to(tl.int32, bitcast=True), mask=block == 0)


@triton.jit
def close(
    row, COLUMN: tl.constexpr, most, AT: tl.constexpr, block, index, inside, size, known, number,
    F: tl.constexpr, HALF: tl.constexpr, ALIGNED: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Write a block of a moment. Codes of tiles with infinity or NaN are 0 and their scale is NaN. With one scale per
    tensor, `most` holds the bits of its amax."""
    KIND: tl.constexpr = F.kind
    R: tl.constexpr = F.quotient
    Q: tl.constexpr = F.element
    CONTAINER: tl.constexpr = F.container
    if F.rule is not None:
        scale, element_scale, keep = new_scale(tl.load(most + AT), F)
        code = codes(number, element_scale, keep, F, HALF)
        tl.store(address(row, COLUMN, block * B, CONTAINER, ALIGNED) + index, code, mask=inside)
        keep_scale(row, COLUMN + 1, block, scale)
    elif F.tile == 0:
        tl.store(address(row, COLUMN, block * B, KIND, ALIGNED) + index, nearest(number, KIND, HALF), mask=inside)
    else:
        bits = as_bits(number) if inside is None else tl.where(inside, as_bits(number), 0)
        tiles = tl.reshape(bits, (B // F.tile, F.tile))
        start, group = block * (B // F.tile), tl.arange(0, B // F.tile)
        there = (start + group) * F.tile < size
        if F.kind == "expanded":
            scale, exponent, center = expansion_scales(tiles, F)
            keep_beside(row, COLUMN + 2, start, group, there, exponent)
            keep_beside(row, COLUMN + 3, start, group, there, center)
            over = expanded(tiles, scale[:, None], exponent[:, None], center[:, None])
            keep_beside(row, COLUMN + 1, start, group, there, scale)
        else:
            _, scale, element_scale, keep = scales(tile_maxima(tiles, 1, F.tile), None, R, None)
            over = over_scale(tiles, element_scale, keep, R)
            keep_beside(row, COLUMN + 1, start, group[:, None], there[:, None], scale)
        code = code_of(over, None, known, Q)
        code = tl.reshape(code.to(tl.uint8), (B,))
        tl.store(address(row, COLUMN, block * B, "uint8", ALIGNED) + index, code, mask=inside)
