"""Moments as they are kept, read as float32 and written: numbers, or codes with a scale a tile of the flat tensor, or
one of the whole.

`F` is the `Form` of `kernels.gpu.kinds`.
"""

import triton
import triton.language as tl

from halfstep.kernels.gpu.jit import one_scale
from halfstep.kernels.gpu.jit.expansion import elements, scales, values
from halfstep.kernels.gpu.jit.masters import nearest
from halfstep.kernels.gpu.jit.numbers import as_bits, as_float, coded, constant, decoded, held, widened


@triton.jit
def address(row, COLUMN: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """The integer pointer to numbers of a dtype, or to bytes, that a row of the table names."""
    if KIND == "float32":
        place = tl.load(row + COLUMN).to(tl.pointer_type(tl.int32))
    elif KIND == "uint8":
        place = tl.load(row + COLUMN).to(tl.pointer_type(tl.uint8))
    else:
        place = tl.load(row + COLUMN).to(tl.pointer_type(tl.int16))
    if ALIGNED:
        place = tl.multiple_of(place, 16)
    return place


@triton.jit
def read(place, inside):
    """What is there, 0 outside; all of it is inside where that is None."""
    if inside is None:
        return tl.load(place)
    else:
        return tl.load(place, mask=inside, other=0)


@triton.jit
def beside(row, COLUMN: tl.constexpr, group, inside):
    """A number of each tile, as a column."""
    return as_float(read(address(row, COLUMN, "float32", False) + group, inside).to(tl.uint32, bitcast=True))[:, None]


@triton.jit
def opened(
    row, COLUMN: tl.constexpr, old, block, index, inside, size, known,
    F: tl.constexpr, ALIGNED: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The float32 values of a block: under the scale at `old` where there is one. What is `known` of a codebook are its
    values, then its cuts."""
    KIND: tl.constexpr = F.kind
    D: tl.constexpr = F.decoding
    CONTAINER: tl.constexpr = F.container
    if F.rule is not None:
        return one_scale.values(read(address(row, COLUMN, CONTAINER, ALIGNED) + index, inside), tl.load(old), F)
    elif F.tile == 0:
        return as_float(widened(read(address(row, COLUMN, KIND, ALIGNED) + index, inside), KIND))
    else:
        code = read(address(row, COLUMN, "uint8", ALIGNED) + index, inside)
        if F.kind == "places":
            element = tl.load(known + code.to(tl.int32))
        else:
            element = as_float(decoded(code.to(tl.uint32), D))
        element = tl.reshape(element, (B // F.tile, F.tile))
        group = block * (B // F.tile) + tl.arange(0, B // F.tile)
        scale = beside(row, COLUMN + 1, group, group * F.tile < size)
        if F.kind == "expanded":
            exponent = beside(row, COLUMN + 2, group, group * F.tile < size)
            center = beside(row, COLUMN + 3, group, group * F.tile < size)
            value = held(values(element, scale, exponent, center))
        else:
            value = tl.where(scale == 0.0, 0.0, held(element * scale))
        return tl.reshape(value, (B,))


@triton.jit
def keep_beside(row, COLUMN: tl.constexpr, group, inside, number):
    """Write a number of each tile."""
    tl.store(address(row, COLUMN, "float32", False) + group, as_bits(number).to(tl.int32, bitcast=True), mask=inside)


@triton.jit
def close(
    row, COLUMN: tl.constexpr, most, AT: tl.constexpr, block, index, inside, size, known, number,
    F: tl.constexpr, HALF: tl.constexpr, ALIGNED: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Write a block of a moment; codes of tiles with an infinity or NaN are 0 and their scale is NaN. Where the tensor
    has one scale, `most` has the bits of its largest magnitude."""
    KIND: tl.constexpr = F.kind
    P: tl.constexpr = F.rounding
    C: tl.constexpr = F.coding
    CONTAINER: tl.constexpr = F.container
    if F.rule is not None:
        scale, meets, keep = one_scale.new_scale(tl.load(most + AT), F)
        code = one_scale.codes(number, meets, keep, F, HALF)
        tl.store(address(row, COLUMN, CONTAINER, ALIGNED) + index, code, mask=inside)
        keep_beside(row, COLUMN + 1, block, block == 0, scale)
    elif F.tile == 0:
        tl.store(address(row, COLUMN, KIND, ALIGNED) + index, nearest(number, KIND, HALF), mask=inside)
    else:
        bits = as_bits(number)
        if inside is not None:
            bits = tl.where(inside, bits, 0)
        tiles = tl.reshape(bits, (B // F.tile, F.tile))
        group = block * (B // F.tile) + tl.arange(0, B // F.tile)
        if F.kind == "expanded":
            scale, exponent, center = scales(tiles, F)
            keep_beside(row, COLUMN + 2, group, group * F.tile < size, exponent)
            keep_beside(row, COLUMN + 3, group, group * F.tile < size, center)
            over = elements(tiles, scale[:, None], exponent[:, None], center[:, None])
        else:
            most = tl.max((tiles & 0x7FFFFFFF).to(tl.int32, bitcast=True), 1).to(tl.uint32, bitcast=True)
            most = as_float(tl.where(most >= 0x7F800000, 0x7FC00000, most))
            scale = tl.div_rn(most, constant(F.largest) + most * 0.0)
            divisor = tl.where(scale > 0.0, scale, 1.0)[:, None] + tl.full(tiles.shape, 0.0, tl.float32)
            over = as_bits(tl.where(scale[:, None] > 0.0, tl.div_rn(as_float(tiles), divisor), 0.0))
        keep_beside(row, COLUMN + 1, group, group * F.tile < size, scale)
        if F.kind == "places":
            code = searched(as_float(over), known + 256)
        else:
            code = coded(over, None, P, C)
        code = tl.reshape(code.to(tl.uint8), (B,))
        tl.store(address(row, COLUMN, "uint8", ALIGNED) + index, code, mask=inside)


@triton.jit
def searched(number, cuts):
    """How many of 255 rising cuts a number is above."""
    place = tl.full(number.shape, 0, tl.int32)
    for k in tl.static_range(8):
        place += tl.where(number > tl.load(cuts + place + ((128 >> k) - 1)), 128 >> k, 0)
    return place
