"""Matrices through random Hadamard transforms (`quant.rotate`), and rounded in tiles along them, in one pass.

Along rows, a program holds a matrix of which each row is a block of the rotation. Down columns it holds a tuple of
vectors, one for each of a block's rows, so that all of a column's block lies in one thread: sums, maxima and scales.
"""

import triton
import triton.language as tl

from halfstep.kernels.gpu.jit.elements import code_of, together, value_of, written
from halfstep.kernels.gpu.jit.numbers import as_bits, as_float, constant, noise, noise_by, noise_keys, widened
from halfstep.kernels.gpu.jit.scales import over, scales, tensor_scale_of
from halfstep.kernels.gpu.jit.tiles import keep_scales, spread, store, tile_maxima


@triton.jit
def whole_scale(tensor, found, R: tl.constexpr):
    """The tensor's scale of two levels, which the first program stores; None where nothing was found before."""
    scale = None
    if found is not None:
        scale = tensor_scale_of(tl.load(found), R)
        if tensor is not None and tl.program_id(0) == 0:
            tl.store(tensor, scale.to(tl.int32, bitcast=True))
    return scale


@triton.jit
def raise_to(raised, amax):
    """Raise what was found to the largest of the tiles without an infinity or NaN."""
    amax = amax.to(tl.int32, bitcast=True)
    tl.atomic_max(raised, tl.max(tl.where(amax < 0x7F800000, amax, 0)))


@triton.jit
def multiplied(number, FACTOR: tl.constexpr, PART: tl.constexpr):
    """The bits of what a rotation's steps left, times its factor, and that times the part that a rule takes."""
    number = number * constant(FACTOR)
    if PART is not None:
        number = number * constant(PART)
    return as_bits(number)


@triton.jit
def times_of(multiplier, tensor_scale, R: tl.constexpr, APART: tl.constexpr):
    """What a tile's values are multiplied by: with the tensor's scale, unless that stays apart."""
    if R.kind == "two_level" and not APART:
        multiplier = multiplier * tensor_scale
    return multiplier


# ---- along rows ------------------------------------------------------------------------------------------------------


@triton.jit
def step(number, H: tl.constexpr):
    """Each pair (a, b) of numbers H places apart as (a + b, a - b), one rounding each. To know a pair's other number
    exactly, wherever it lies, the bits of both are added up, which is the same for both."""
    ROWS: tl.constexpr = number.shape[0]
    SIZE: tl.constexpr = number.shape[1]
    own = tl.reshape(as_bits(number), (ROWS * SIZE // (2 * H), 2, H))
    other = tl.sum(own, 1, keep_dims=True) - own
    sign = (tl.arange(0, 2).to(tl.uint32) << 31)[None, :, None]
    return tl.reshape(as_float(other) + as_float(own ^ sign), (ROWS, SIZE))


@triton.jit
def along_block(
    x, out, scale, tensor_scale, raised, signs, top, blocks, columns, low, high,
    R: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, SOURCE: tl.constexpr, TARGET: tl.constexpr,
    OUT: tl.constexpr, APART: tl.constexpr, NOISE: tl.constexpr, FACTOR: tl.constexpr, PART: tl.constexpr,
    LEVELS: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """ROWS blocks of COLUMNS numbers each, from number `top` on."""
    row, place = top + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    first = (row.to(tl.int64) * COLUMNS)[:, None]
    if MASKED:
        each = (columns + COLUMNS - 1) // COLUMNS
        column = (row % each)[:, None] * COLUMNS + place[None, :]
        inside = (row < blocks)[:, None] & (column < columns)
        given = tl.load(x + (row // each).to(tl.int64)[:, None] * columns + column, mask=inside, other=0)
    else:
        given = tl.load(x + first + place[None, :])
    number = as_float(widened(given, SOURCE)) * tl.load(signs + place)[None, :]
    for level in tl.static_range(LEVELS):
        number = step(number, 1 << level)
    bits = multiplied(number, FACTOR, PART)
    if R is None:
        store(out, bits.to(tl.int32, bitcast=True), first, row, 0, blocks, COLUMNS, 1, None, MASKED)
    else:
        amax = tile_maxima(bits, 1, W)
        if raised is not None:
            raise_to(raised, amax)
        else:
            stored, multiplier, meets, keep = scales(amax, tensor_scale, R, E)
            drawn = None
            if NOISE is not None:
                index = tl.arange(0, ROWS)[:, None] * COLUMNS + place[None, :]
                drawn = noise(low, high, top.to(tl.int64) * COLUMNS, index)
            bits = over(bits, spread(meets, ROWS, COLUMNS), spread(keep, ROWS, COLUMNS), R)
            if TARGET is None:
                strides = (COLUMNS // W, 1)
                keep_scales(scale, stored, multiplier, top, 0, blocks, COLUMNS, strides, R, 1, W, "stored", False)
                made = together(code_of(bits, drawn, Q), Q)
                wide: tl.constexpr = COLUMNS // made.shape[1]
                store(out, made, first, row, 0, blocks, COLUMNS, wide, 3 if Q.bits == 6 else 1, MASKED)
            else:
                times = spread(times_of(multiplier, tensor_scale, R, APART), ROWS, COLUMNS)
                made = written(value_of(bits, drawn, Q), times, R, OUT, TARGET)
                store(out, made, first, row, 0, blocks, COLUMNS, 1, None, MASKED)


@triton.jit(do_not_specialize=["rows", "units", "low", "high"])
def along(
    x, out, scale, tensor, found, raised, signs, rows, units, low, high,
    R: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, SOURCE: tl.constexpr, TARGET: tl.constexpr, OUT: tl.constexpr,
    APART: tl.constexpr, NOISE: tl.constexpr, FACTOR: tl.constexpr, PART: tl.constexpr, LEVELS: tl.constexpr,
    W: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rotate the rows of a matrix, units * UNIT numbers each, in blocks of COLUMNS, the last of a row filled with
    zeros: to codes (TARGET None) and scales, to values, to float32 (R None), or to raise the largest magnitude
    `raised` of the tiles without an infinity or NaN."""
    columns, top = units * UNIT, tl.program_id(0) * ROWS
    blocks = rows * ((columns + COLUMNS - 1) // COLUMNS)
    tensor_scale = whole_scale(tensor, found, R)
    if (top + ROWS <= blocks) & (columns % COLUMNS == 0):
        along_block(
            x, out, scale, tensor_scale, raised, signs, top, blocks, columns, low, high,
            R, Q, E, SOURCE, TARGET, OUT, APART, NOISE, FACTOR, PART, LEVELS, W, ROWS, COLUMNS, False,
        )  # fmt: skip
    else:
        along_block(
            x, out, scale, tensor_scale, raised, signs, top, blocks, columns, low, high,
            R, Q, E, SOURCE, TARGET, OUT, APART, NOISE, FACTOR, PART, LEVELS, W, ROWS, COLUMNS, True,
        )  # fmt: skip


# ---- down columns ----------------------------------------------------------------------------------------------------


@triton.jit
def rotated_rows(
    x, signs, top, column, rows, columns, SOURCE: tl.constexpr, FACTOR: tl.constexpr, PART: tl.constexpr,
    LEVELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The bits of ROWS rows from `top` on, rotated down their columns."""
    found = ()
    for i in tl.static_range(ROWS):
        inside = (top + i < rows) & (column < columns)
        given = tl.load(x + (top + i).to(tl.int64) * columns + column, mask=inside, other=0)
        found = found + (as_float(widened(given, SOURCE)) * tl.load(signs + i),)
    for level in tl.static_range(LEVELS):
        made = ()
        for i in tl.static_range(ROWS):
            if (i >> level) & 1:
                made = made + (found[i - (1 << level)] - found[i],)
            else:
                made = made + (found[i] + found[i + (1 << level)],)
        found = made
    bits = ()
    for i in tl.static_range(ROWS):
        bits = bits + (multiplied(found[i], FACTOR, PART),)
    return bits


@triton.jit
def row_noise(low, high, first, COLUMNS: tl.constexpr):
    """Noise of COLUMNS elements from `first`, an int64, on; the next chunk's keys are made where that begins there."""
    one, two = noise_keys(low, high, first >> 14)
    next_one, next_two = one, two
    if (first & 0x3FFF) + COLUMNS > 0x4000:
        next_one, next_two = noise_keys(low, high, (first >> 14) + 1)
    index = (first & 0x3FFF).to(tl.int32) + tl.arange(0, COLUMNS)
    beyond = index > 0x3FFF
    return noise_by(tl.where(beyond, next_one, one), tl.where(beyond, next_two, two), index & 0x3FFF)


@triton.jit
def side_by_side(codes, ROWS: tl.constexpr, LEVELS: tl.constexpr):
    """A tuple of ROWS vectors as the columns of a matrix."""
    COLUMNS: tl.constexpr = codes[0].shape[0]
    for level in tl.static_range(LEVELS):
        made = ()
        for i in tl.static_range(ROWS >> (level + 1)):
            pair = tl.join(codes[i], codes[i + (ROWS >> (level + 1))])
            made = made + (tl.reshape(pair, (COLUMNS, 2 << level)),)
        codes = made
    return codes[0]


@triton.jit
def down_block(
    x, out, scale, tensor_scale, raised, signs, top, left, rows, tall, columns, low, high,
    R: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, SOURCE: tl.constexpr, TARGET: tl.constexpr,
    OUT: tl.constexpr, APART: tl.constexpr, NOISE: tl.constexpr, FACTOR: tl.constexpr, PART: tl.constexpr,
    LEVELS: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A block of ROWS numbers in each of COLUMNS columns, from (top, left) on. Whole blocks are masked as well: a mask
    of a multiple of 16 columns leaves accesses wide, and functions of so many registers take long to compile."""
    column = left + tl.arange(0, COLUMNS)
    inside = column < columns
    bits = rotated_rows(x, signs, top, column, rows, columns, SOURCE, FACTOR, PART, LEVELS, ROWS)
    if R is None:
        for i in tl.static_range(ROWS):
            tl.store(out + (top + i).to(tl.int64) * columns + column, bits[i].to(tl.int32, bitcast=True), mask=inside)
    else:
        amax = ()
        for t in tl.static_range(ROWS // W):
            most = bits[t * W] & 0x7FFFFFFF
            for i in tl.static_range(t * W + 1, t * W + W):
                most = tl.maximum(most, bits[i] & 0x7FFFFFFF)
            amax = amax + (most,)
        if raised is not None:
            for t in tl.static_range(ROWS // W):
                raise_to(raised, amax[t])
        else:
            one = None
            two = None
            start = column
            if NOISE == "turned":  # a block ends where a chunk does, or before
                place = column.to(tl.int64) * tall + top
                one, two = noise_keys(low, high, place >> 14)
                start = (place & 0x3FFF).to(tl.int32)
            codes = ()
            for t in tl.static_range(ROWS // W):
                stored, multiplier, meets, keep = scales(amax[t], tensor_scale, R, E)
                times = times_of(multiplier, tensor_scale, R, APART)
                if TARGET is None:
                    keep_scales(
                        scale, stored[None, :], multiplier[None, :], top + t * W, left, tall, columns, (tall // W, 1),
                        R, W, 1, "stored", True,
                    )  # fmt: skip
                for i in tl.static_range(t * W, t * W + W):
                    first = (top + i).to(tl.int64) * columns
                    drawn = None
                    if NOISE == "turned":
                        drawn = noise_by(one, two, start + i)
                    elif NOISE == "rows":
                        drawn = row_noise(low, high, first + left, COLUMNS)
                    scaled = over(bits[i], meets, keep, R)
                    if TARGET is None:
                        codes = codes + (code_of(scaled, drawn, Q),)
                    else:
                        made = written(value_of(scaled, drawn, Q), times, R, OUT, TARGET)
                        tl.store(out + first + column, made, mask=inside)
            if TARGET is None:
                made = together(side_by_side(codes, ROWS, LEVELS), Q)
                wide: tl.constexpr = ROWS // made.shape[1]
                place = (column.to(tl.int64) * tall)[:, None]
                store(out, made, place, column, top, columns, tall, wide, 3 if Q.bits == 6 else 1, True)


@triton.jit(do_not_specialize=["rows", "units", "low", "high"])
def down(
    x, out, scale, tensor, found, raised, signs, rows, units, low, high,
    R: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, SOURCE: tl.constexpr, TARGET: tl.constexpr, OUT: tl.constexpr,
    APART: tl.constexpr, NOISE: tl.constexpr, FACTOR: tl.constexpr, PART: tl.constexpr, LEVELS: tl.constexpr,
    W: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The same down the columns, in blocks of ROWS. Codes and scales are the transposed matrix's; all else lies as the
    matrix does. NOISE goes by places of the matrix (rows), or of the transposed one (turned)."""
    columns, tall = units * UNIT, (rows + ROWS - 1) // ROWS * ROWS
    programs = (columns + COLUMNS - 1) // COLUMNS
    top, left = tl.program_id(0) // programs * ROWS, tl.program_id(0) % programs * COLUMNS
    tensor_scale = whole_scale(tensor, found, R)
    down_block(
        x, out, scale, tensor_scale, raised, signs, top, left, rows, tall, columns, low, high,
        R, Q, E, SOURCE, TARGET, OUT, APART, NOISE, FACTOR, PART, LEVELS, W, ROWS, COLUMNS,
    )  # fmt: skip
