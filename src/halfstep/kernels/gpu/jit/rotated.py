"""Matrices through random Hadamard transforms (`quant.rotate`), and rounded in tiles along them, in one pass.

A program holds a matrix of which each row is a block of the rotation, and so whole tiles: numbers of a row of what is
rotated, or of a column. What was read in rows and is summed in columns changes threads once on the way.
"""

import triton
import triton.language as tl

from halfstep.kernels.gpu.jit.elements import code_of
from halfstep.kernels.gpu.jit.numbers import as_bits, as_float, constant, noise, noise_anywhere, seed_of, widened
from halfstep.kernels.gpu.jit.scales import tensor_scale_of
from halfstep.kernels.gpu.jit.tiles import (
    keep_scales,
    noise_of,
    over_scale,
    scales_of,
    store_codes,
    tile_maxima,
    values_of,
)


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
def rotated(number, signs, FACTOR: tl.constexpr, PART: tl.constexpr, LEVELS: tl.constexpr):
    """The bits of blocks through the transform, times its factor, and that times the part that a rule takes."""
    number = number * tl.load(signs + tl.arange(0, number.shape[1])).to(tl.float32, bitcast=True)[None, :]
    for level in tl.static_range(LEVELS):
        number = step(number, 1 << level)
    number = number * constant(FACTOR)
    if PART is not None:
        number = number * constant(PART)
    return as_bits(number)


@triton.jit
def block(
    x, out, scale, tensor_scale, raised, signs, top, left, rows, columns, given, low, high,
    R: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, SOURCE: tl.constexpr, TARGET: tl.constexpr,
    OUT: tl.constexpr, APART: tl.constexpr, NOISE: tl.constexpr, FACTOR: tl.constexpr, PART: tl.constexpr,
    LEVELS: tl.constexpr, DOWN: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """ROWS blocks of COLUMNS numbers each, from (top, left) on of a matrix (rows, columns) of whole blocks: of the
    transposed one, where they lie DOWN, else with one block a row. `given` is the length of what blocks fill."""
    row, place = top + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    first = (row.to(tl.int64) * columns)[:, None]
    if DOWN:
        lies = ((left + place).to(tl.int64) * rows)[None, :] + row[:, None]  # of each number, before and after
        source, inside = lies, (row < rows)[:, None]
        within = inside & (left + place < given)[None, :]
    else:
        each = (given + COLUMNS - 1) // COLUMNS
        lies = first + place[None, :]
        column = (row % each)[:, None] * COLUMNS + place[None, :]
        inside = (row < rows)[:, None]
        source, within = lies, inside
        if MASKED:
            source, within = (row // each).to(tl.int64)[:, None] * given + column, inside & (column < given)
    if MASKED:
        stored = tl.load(x + source, mask=within, other=0)
    else:
        stored = tl.load(x + source)
    bits = rotated(as_float(widened(stored, SOURCE)), signs, FACTOR, PART, LEVELS)
    made = bits.to(tl.int32, bitcast=True)
    if R is not None:
        amax = tile_maxima(bits, 1, W)
        if raised is not None:
            most = amax.to(tl.int32, bitcast=True)
            tl.atomic_max(raised, tl.max(tl.where(most < 0x7F800000, most, 0)), sem="relaxed")
        else:
            kept, multiplier, meets, keep = scales_of(bits, amax, tensor_scale, R, E, 1, W)
            drawn = None
            if NOISE == "rows" and DOWN:
                drawn = noise_of(low, high, ((left + place).to(tl.int64) * rows + top)[None, :], (row - top)[:, None])
            elif NOISE == "turned":
                drawn = noise_anywhere(low, high, first + left + place[None, :])
            elif NOISE == "rows":
                drawn = noise(low, high, top.to(tl.int64) * COLUMNS, (row - top)[:, None] * COLUMNS + place[None, :])
            bits = over_scale(bits, meets, keep, R)
            if TARGET is None:
                strides = (columns // W, 1)
                keep_scales(scale, kept, multiplier, top, left, rows, columns, strides, R, 1, W, "stored", False)
                store_codes(out, code_of(bits, drawn, None, Q), first, row, left, rows, columns, Q, MASKED)
            else:
                made = values_of(bits, drawn, None, multiplier, tensor_scale, R, Q, TARGET, OUT, APART)
    if raised is None and (R is None or TARGET is not None):
        if MASKED:
            tl.store(out + lies, made, mask=inside)
        else:
            tl.store(out + lies, made)


@triton.jit(do_not_specialize=["rows", "units", "low", "high", "held"])
def rotate(
    x, out, scale, tensor, found, raised, signs, rows, units, low, high, held,
    R: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, SOURCE: tl.constexpr, TARGET: tl.constexpr, OUT: tl.constexpr,
    APART: tl.constexpr, NOISE: tl.constexpr, FACTOR: tl.constexpr, PART: tl.constexpr, LEVELS: tl.constexpr,
    DOWN: tl.constexpr, W: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rotate a matrix of `rows` rows and units * UNIT columns in blocks of COLUMNS numbers of a row, or DOWN columns,
    the last filled with zeros: to codes (TARGET None) and scales, DOWN the transposed matrix's; to values, or float32
    (R None), that lie as the matrix does; or to raise the largest magnitude `raised` of the tiles without an infinity
    or NaN. NOISE goes by places of the matrix (rows), or of the transposed one (turned)."""
    columns = units * UNIT
    if NOISE is not None:
        low, high = seed_of(low, high, held)
    tensor_scale = None
    if found is not None:
        tensor_scale = tensor_scale_of(tl.load(found), R)
        if tensor is not None and tl.program_id(0) == 0:
            tl.store(tensor, tensor_scale.to(tl.int32, bitcast=True))
    if DOWN:
        programs, long = (columns + ROWS - 1) // ROWS, (rows + COLUMNS - 1) // COLUMNS * COLUMNS
        top, left = tl.program_id(0) % programs * ROWS, tl.program_id(0) // programs * COLUMNS
        whole, blocks, given = (left + COLUMNS <= rows) & (top + ROWS <= columns), columns, rows
    else:
        top, left, long, given = tl.program_id(0) * ROWS, 0, COLUMNS, columns
        blocks = rows * ((columns + COLUMNS - 1) // COLUMNS)
        whole = (top + ROWS <= blocks) & (columns % COLUMNS == 0)
    if whole:
        block(
            x, out, scale, tensor_scale, raised, signs, top, left, blocks, long, given, low, high,
            R, Q, E, SOURCE, TARGET, OUT, APART, NOISE, FACTOR, PART, LEVELS, DOWN, W, ROWS, COLUMNS, False,
        )  # fmt: skip
    else:
        block(
            x, out, scale, tensor_scale, raised, signs, top, left, blocks, long, given, low, high,
            R, Q, E, SOURCE, TARGET, OUT, APART, NOISE, FACTOR, PART, LEVELS, DOWN, W, ROWS, COLUMNS, True,
        )  # fmt: skip
