"""Moments as they are kept, read and written: numbers, or codes under a scale a tile of the flat tensor, or one scale.

`F` is the `Form` of `kernels.gpu.kinds`.
"""

import triton
import triton.language as tl

from halfstep.kernels.gpu.jit import expansion, one_scale
from halfstep.kernels.gpu.jit.elements import code_of, element_of
from halfstep.kernels.gpu.jit.masters import nearest
from halfstep.kernels.gpu.jit.numbers import as_bits, as_float, held, read, widened
from halfstep.kernels.gpu.jit.places import value_at
from halfstep.kernels.gpu.jit.scales import scales
from halfstep.kernels.gpu.jit.tiles import over_scale, tile_maxima


INFINITY: tl.constexpr = tl.constexpr(float("inf"))


@triton.jit
def address(row, COLUMN: tl.constexpr, start, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """The integer pointer to numbers of a dtype, or to bytes, from one of them on, of what a row of the table names."""
    if KIND == "float32":
        place = tl.load(row + COLUMN).to(tl.pointer_type(tl.int32))
    elif KIND == "uint8":
        place = tl.load(row + COLUMN).to(tl.pointer_type(tl.uint8))
    else:
        place = tl.load(row + COLUMN).to(tl.pointer_type(tl.int16))
    place += start
    if ALIGNED:  # and so is the first of every block
        place = tl.multiple_of(place, 16)
    return place


@triton.jit
def beside(row, COLUMN: tl.constexpr, start, group, inside):
    """A number of each tile from one on, as a column."""
    found = read(address(row, COLUMN, start, "float32", False) + group, inside)
    return as_float(found.to(tl.uint32, bitcast=True))[:, None]


@triton.jit
def opened(
    row, COLUMN: tl.constexpr, old, block, index, inside, size, known,
    F: tl.constexpr, ALIGNED: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The float32 values of a block: under the scale at `old` where there is one. What is `known` of a codebook is
    `places.table`."""
    KIND: tl.constexpr = F.kind
    D: tl.constexpr = F.decoding
    OWN: tl.constexpr = F.instruction
    CONTAINER: tl.constexpr = F.container
    if F.rule is not None:
        return one_scale.values(
            read(address(row, COLUMN, block * B, CONTAINER, ALIGNED) + index, inside), tl.load(old), F
        )
    elif F.tile == 0:
        return as_float(widened(read(address(row, COLUMN, block * B, KIND, ALIGNED) + index, inside), KIND))
    else:
        code = read(address(row, COLUMN, block * B, "uint8", ALIGNED) + index, inside)
        if F.kind == "places":
            element = value_at(code, known)
        else:
            element = element_of(code, D, OWN)
        element = tl.reshape(element, (B // F.tile, F.tile))
        start, group = block * (B // F.tile), tl.arange(0, B // F.tile)
        there = (start + group) * F.tile < size
        scale = beside(row, COLUMN + 1, start, group, there)
        if F.kind == "expanded":
            exponent = beside(row, COLUMN + 2, start, group, there)
            center = beside(row, COLUMN + 3, start, group, there)
            value = held(expansion.values(element, scale, exponent, center))
        else:
            value = tl.where(scale == 0.0, 0.0, held(element * scale))
        return tl.reshape(value, (B,))


@triton.jit
def is_lost(number, F: tl.constexpr):
    """Where a moment that is codes would be an infinity or NaN, and take others under its scale with it."""
    if F.rule is not None or F.tile != 0:
        return ~(tl.abs(number) < INFINITY)
    else:
        return tl.full(number.shape, 0, tl.int1)


@triton.jit
def keep_beside(row, COLUMN: tl.constexpr, start, group, inside, number):
    """Write a number of each tile from one on."""
    place = address(row, COLUMN, start, "float32", False) + group
    tl.store(place, as_bits(number).to(tl.int32, bitcast=True), mask=inside)


@triton.jit
def keep_scale(row, COLUMN: tl.constexpr, block, scale):
    """Write the scale of a tensor, once."""
    place = address(row, COLUMN, 0, "float32", False)
    tl.store(place, as_bits(scale).to(tl.int32, bitcast=True), mask=block == 0)


@triton.jit
def close(
    row, COLUMN: tl.constexpr, most, AT: tl.constexpr, block, index, inside, size, known, number,
    F: tl.constexpr, HALF: tl.constexpr, ALIGNED: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Write a block of a moment; codes of tiles with an infinity or NaN are 0 and their scale is NaN. Where the tensor
    has one scale, `most` has the bits of its largest magnitude."""
    KIND: tl.constexpr = F.kind
    R: tl.constexpr = F.quotient
    Q: tl.constexpr = F.element
    CONTAINER: tl.constexpr = F.container
    if F.rule is not None:
        scale, meets, keep = one_scale.new_scale(tl.load(most + AT), F)
        code = one_scale.codes(number, meets, keep, F, HALF)
        tl.store(address(row, COLUMN, block * B, CONTAINER, ALIGNED) + index, code, mask=inside)
        keep_scale(row, COLUMN + 1, block, scale)
    elif F.tile == 0:
        tl.store(address(row, COLUMN, block * B, KIND, ALIGNED) + index, nearest(number, KIND, HALF), mask=inside)
    else:
        bits = as_bits(number)
        if inside is not None:
            bits = tl.where(inside, bits, 0)
        tiles = tl.reshape(bits, (B // F.tile, F.tile))
        start, group = block * (B // F.tile), tl.arange(0, B // F.tile)
        there = (start + group) * F.tile < size
        if F.kind == "expanded":
            scale, exponent, center = expansion.scales(tiles, F)
            keep_beside(row, COLUMN + 2, start, group, there, exponent)
            keep_beside(row, COLUMN + 3, start, group, there, center)
            over = expansion.elements(tiles, scale[:, None], exponent[:, None], center[:, None])
            keep_beside(row, COLUMN + 1, start, group, there, scale)
        else:
            _, scale, meets, keep = scales(tile_maxima(tiles, 1, F.tile), None, R, None)
            over = over_scale(tiles, meets, keep, R)
            keep_beside(row, COLUMN + 1, start, group[:, None], there[:, None], scale)
        code = code_of(over, None, known, Q)
        code = tl.reshape(code.to(tl.uint8), (B,))
        tl.store(address(row, COLUMN, block * B, "uint8", ALIGNED) + index, code, mask=inside)
