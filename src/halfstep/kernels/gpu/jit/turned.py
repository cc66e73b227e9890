"""A matrix in codes as it lies, and its columns rotated (`quant.rotate`) in codes as its transpose lies, in one pass.

A program takes a strip of whole blocks of the rotation, and each copy has scales along its own rows.
"""

import triton
import triton.language as tl

from halfstep.kernels.gpu.jit.elements import code_of
from halfstep.kernels.gpu.jit.numbers import as_float, seed_of
from halfstep.kernels.gpu.jit.rotated import rotated
from halfstep.kernels.gpu.jit.scales import scales, tensor_scale_of
from halfstep.kernels.gpu.jit.tiles import keep_scales, loaded, noise_of, over_scale, store_codes, tile_maxima


@triton.jit
def note(raised, maxima):
    """Raise a number to the largest magnitude of the tiles without an infinity or NaN."""
    most = maxima.to(tl.int32, bitcast=True)
    tl.atomic_max(raised, tl.max(tl.where(most < 0x7F800000, most, 0)), sem="relaxed")


@triton.jit
def copy(
    codes, scale, bits, amax, tensor_scale, top, left, rows, columns, low, high, strides,
    R: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, FORM: tl.constexpr, NOISY: tl.constexpr, W: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Codes and scales of a block of a matrix (rows, columns), in tiles along its rows."""
    ROWS: tl.constexpr = bits.shape[0]
    COLUMNS: tl.constexpr = bits.shape[1]
    row = top + tl.arange(0, ROWS)
    first = (row.to(tl.int64) * columns)[:, None]
    stored, multiplier, meets, keep = scales(amax, tensor_scale, R, E)
    drawn = None
    if NOISY:
        drawn = noise_of(low, high, first + left, tl.arange(0, COLUMNS)[None, :])
    keep_scales(scale, stored, multiplier, top, left, rows, columns, strides, R, 1, W, FORM, False)
    code = code_of(over_scale(bits, meets, keep, R), drawn, None, Q)
    store_codes(codes, code, first, row, left, rows, columns, Q, MASKED)


@triton.jit
def strip(
    x, codes, scale, turned, turned_scale, tensor_scale, turned_tensor_scale, raised, signs, top, left, rows, columns,
    low, high, turned_low, turned_high, strides, turned_strides,
    R: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, SOURCE: tl.constexpr, FORM: tl.constexpr, NOISY: tl.constexpr,
    FACTOR: tl.constexpr, LEVELS: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Both copies of a strip; or raise the first and the second number of `raised` to what their tiles hold."""
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
    """Write codes and scales of a matrix of row_units * UNIT rows, whole blocks of the rotation, and units * UNIT
    columns, and of its rotated transpose; two levels have found the largest numbers, when `raised` was given."""
    rows, columns = row_units * UNIT, units * UNIT
    programs = (columns + COLUMNS - 1) // COLUMNS
    top, left = tl.program_id(0) // programs * ROWS, tl.program_id(0) % programs * COLUMNS
    if NOISY:
        low, high = seed_of(low, high, held)
        turned_low, turned_high = seed_of(turned_low, turned_high, turned_held)
    tensor_scale = None
    turned_tensor_scale = None
    if found is not None:
        tensor_scale = tensor_scale_of(tl.load(found), R)
        turned_tensor_scale = tensor_scale_of(tl.load(found + 1), R)
        if tl.program_id(0) == 0:
            tl.store(tensor, tensor_scale.to(tl.int32, bitcast=True))
            tl.store(turned_tensor, turned_tensor_scale.to(tl.int32, bitcast=True))
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
