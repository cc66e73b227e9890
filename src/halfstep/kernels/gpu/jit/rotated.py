"""Random Hadamard transforms of matrices (`quant.rotate`), and quantization in tiles along them, in one pass.

A program holds a matrix whose rows are blocks of the rotation, each with whole tiles: parts of a row of the input, or
of a column. Data loaded along rows but summed along columns is exchanged between threads once.
"""

import triton
import triton.language as tl

from halfstep.kernels.gpu.jit.elements import both_scales_kept, code_of, scales, tensor_scale_kept
from halfstep.kernels.gpu.jit.numbers import as_bits, as_float, constant, noise, noise_anywhere, read, seed_of, widened
from halfstep.kernels.gpu.jit.tiles import (
    corner,
    keep_scales,
    loaded,
    noise_of,
    over_scale,
    scales_of,
    store_codes,
    tile_maxima,
    values_of,
)


@triton.jit
def step(number, H: tl.constexpr):
    """Each pair (a, b) of values H apart replaced by (a + b, a - b), rounded once each. A pair's other value is found
    exactly, in whichever thread it is, as the integer sum of both values' bits minus the own bits."""
    ROWS: tl.constexpr = number.shape[0]
    SIZE: tl.constexpr = number.shape[1]
    own = tl.reshape(as_bits(number), (ROWS * SIZE // (2 * H), 2, H))
    other = tl.sum(own, 1, keep_dims=True) - own
    sign = (tl.arange(0, 2).to(tl.uint32) << 31)[None, :, None]
    return tl.reshape(as_float(other) + as_float(own ^ sign), (ROWS, SIZE))


@triton.jit
def rotated(number, signs, FACTOR: tl.constexpr, PART: tl.constexpr, LEVELS: tl.constexpr):
    """The bits of blocks after the transform, times FACTOR, and times PART, the share of amax that a rule scales
    for."""
    number = number * tl.load(signs + tl.arange(0, number.shape[1])).to(tl.float32, bitcast=True)[None, :]
    for level in tl.static_range(LEVELS):
        number = step(number, 1 << level)
    number = number * constant(FACTOR)
    if PART is not None:
        number = number * constant(PART)
    return as_bits(number)


@triton.jit
def note(raised, maxima):
    """Raise the value at `raised` to the largest amax of tiles without infinity or NaN."""
    most = maxima.to(tl.int32, bitcast=True)
    tl.atomic_max(raised, tl.max(tl.where(most < 0x7F800000, most, 0)), sem="relaxed")


@triton.jit
def block(
    x, out, scale, tensor_scale, raised, signs, top, left, rows, columns, given, low, high,
    R: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, SOURCE: tl.constexpr, TARGET: tl.constexpr,
    OUT: tl.constexpr, APART: tl.constexpr, NOISE: tl.constexpr, FACTOR: tl.constexpr, PART: tl.constexpr,
    LEVELS: tl.constexpr, DOWN: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Rotate ROWS blocks of COLUMNS values each from (top, left) on, in a matrix (rows, columns) of whole blocks: in
    the transpose if DOWN, else in a matrix with one block per row. `given` is the unpadded length along the
    rotation."""
    row, place = top + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    first = (row.to(tl.int64) * columns)[:, None]
    if DOWN:
        lies = ((left + place).to(tl.int64) * rows)[None, :] + row[:, None]  # offsets, of input and output
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
    stored = read(x + source, within if MASKED else None)
    bits = rotated(as_float(widened(stored, SOURCE)), signs, FACTOR, PART, LEVELS)
    made = bits.to(tl.int32, bitcast=True)
    if R is not None:
        amax = tile_maxima(bits, 1, W)
        if raised is not None:
            note(raised, amax)
        else:
            kept, multiplier, element_scale, keep = scales_of(bits, amax, tensor_scale, R, E, 1, W)
            random_bits = None
            if NOISE == "rows" and DOWN:
                random_bits = noise_of(
                    low, high, ((left + place).to(tl.int64) * rows + top)[None, :], (row - top)[:, None]
                )
            elif NOISE == "turned":
                random_bits = noise_anywhere(low, high, first + left + place[None, :])
            elif NOISE == "rows":
                random_bits = noise(
                    low, high, top.to(tl.int64) * COLUMNS, (row - top)[:, None] * COLUMNS + place[None, :]
                )
            bits = over_scale(bits, element_scale, keep, R)
            if TARGET is None:
                strides = (columns // W, 1)
                keep_scales(scale, kept, multiplier, top, left, rows, columns, strides, R, 1, W, "stored", False)
                store_codes(out, code_of(bits, random_bits, None, Q), first, row, left, rows, columns, Q, MASKED)
            else:
                made = values_of(bits, random_bits, None, multiplier, tensor_scale, R, Q, TARGET, OUT, APART)
    if raised is None and (R is None or TARGET is not None):
        tl.store(out + lies, made, mask=inside if MASKED else None)


@triton.jit(do_not_specialize=["rows", "units", "low", "high", "held"])
def rotate(
    x, out, scale, tensor, found, raised, signs, rows, units, low, high, held,
    R: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, SOURCE: tl.constexpr, TARGET: tl.constexpr, OUT: tl.constexpr,
    APART: tl.constexpr, NOISE: tl.constexpr, FACTOR: tl.constexpr, PART: tl.constexpr, LEVELS: tl.constexpr,
    DOWN: tl.constexpr, W: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rotate a matrix of `rows` rows and units * UNIT columns in blocks of COLUMNS values along rows, or along columns
    if DOWN, the last block padded with zeros. The result is codes (TARGET None) and scales, of the transpose if DOWN;
    or values, or float32 (R None), in the matrix's layout; or, if `raised` is given, only the largest amax of tiles
    without infinity or NaN, written there. NOISE is indexed by position in the matrix (rows) or in its transpose
    (turned)."""
    columns = units * UNIT
    if NOISE is not None:
        low, high = seed_of(low, high, held)
    tensor_scale = tensor_scale_kept(found, tensor, R) if found is not None else None
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


# ---- a matrix quantized as it is, and its rotated transpose quantized ------------------------------------------------


@triton.jit
def copy(
    codes, scale, bits, amax, tensor_scale, top, left, rows, columns, low, high, strides,
    R: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, FORM: tl.constexpr, NOISY: tl.constexpr, W: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Store codes and scales of a block of a matrix (rows, columns), in tiles along its rows."""
    row, place = top + tl.arange(0, bits.shape[0]), tl.arange(0, bits.shape[1])
    first = (row.to(tl.int64) * columns)[:, None]
    stored, multiplier, element_scale, keep = scales(amax, tensor_scale, R, E)
    random_bits = noise_of(low, high, first + left, place[None, :]) if NOISY else None
    keep_scales(scale, stored, multiplier, top, left, rows, columns, strides, R, 1, W, FORM, False)
    code = code_of(over_scale(bits, element_scale, keep, R), random_bits, None, Q)
    store_codes(codes, code, first, row, left, rows, columns, Q, MASKED)


@triton.jit
def strip(
    x, codes, scale, turned, turned_scale, tensor_scale, turned_tensor_scale, raised, signs, top, left, rows, columns,
    low, high, turned_low, turned_high, strides, turned_strides,
    R: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, SOURCE: tl.constexpr, FORM: tl.constexpr, NOISY: tl.constexpr,
    FACTOR: tl.constexpr, LEVELS: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Store both copies of a strip; or raise the first and second value at `raised` to the amaxes of their tiles."""
    row, column = top + tl.arange(0, ROWS), left + tl.arange(0, COLUMNS)
    bits = loaded(x, (row.to(tl.int64) * columns)[:, None], row, column, rows, columns, SOURCE, MASKED)
    size: tl.constexpr = 1 << LEVELS
    apart = tl.reshape(tl.trans(as_float(bits)), (COLUMNS * ROWS // size, size))
    spun = tl.reshape(rotated(apart, signs, FACTOR, None, LEVELS), (COLUMNS, ROWS))
    amax, turned_amax = tile_maxima(bits, 1, W), tile_maxima(spun, 1, W)
    if raised is not None:
        note(raised, amax)
        note(raised + 1, turned_amax)
    else:
        copy(
            codes, scale, bits, amax, tensor_scale, top, left, rows, columns, low, high, strides,
            R, Q, E, FORM, NOISY, W, MASKED,
        )  # fmt: skip
        copy(
            turned, turned_scale, spun, turned_amax, turned_tensor_scale, left, top, columns, rows, turned_low,
            turned_high, turned_strides, R, Q, E, FORM, NOISY, W, MASKED,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "row_units", "units", "low", "high", "held", "turned_low", "turned_high", "turned_held",
        "down", "across", "turned_down", "turned_across",
    ]
)  # fmt: skip
def both_turned(
    x, codes, scale, tensor, turned, turned_scale, turned_tensor, found, raised, signs,
    row_units, units, low, high, held, turned_low, turned_high, turned_held, down, across, turned_down, turned_across,
    R: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, SOURCE: tl.constexpr, FORM: tl.constexpr, NOISY: tl.constexpr,
    FACTOR: tl.constexpr, LEVELS: tl.constexpr, W: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write codes and scales of a matrix of row_units * UNIT rows (whole blocks of the rotation) and units * UNIT
    columns, and of its rotated transpose. With two levels of scales, a launch with `raised` has found the amaxes
    before."""
    rows, columns = row_units * UNIT, units * UNIT
    top, left = corner(columns, ROWS, COLUMNS)
    if NOISY:
        low, high = seed_of(low, high, held)
        turned_low, turned_high = seed_of(turned_low, turned_high, turned_held)
    tensor_scale, turned_tensor_scale = None, None
    if found is not None:
        tensor_scale, turned_tensor_scale = both_scales_kept(found, tensor, found + 1, turned_tensor, R)
    strides, turned_strides = (down, across), (turned_down, turned_across)
    if top + ROWS <= rows and left + COLUMNS <= columns:
        strip(
            x, codes, scale, turned, turned_scale, tensor_scale, turned_tensor_scale, raised, signs, top, left, rows,
            columns, low, high, turned_low, turned_high, strides, turned_strides,
            R, Q, E, SOURCE, FORM, NOISY, FACTOR, LEVELS, W, ROWS, COLUMNS, False,
        )  # fmt: skip
    else:
        strip(
            x, codes, scale, turned, turned_scale, tensor_scale, turned_tensor_scale, raised, signs, top, left, rows,
            columns, low, high, turned_low, turned_high, strides, turned_strides,
            R, Q, E, SOURCE, FORM, NOISY, FACTOR, LEVELS, W, ROWS, COLUMNS, True,
        )  # fmt: skip
