"""A matrix in codes of a byte twice, as it lies and transposed: each copy in a pass of its own over a square of it.

As `jit.layouts` otherwise. The second pass reads the square from the nearest cache. A thread holds what shares a scale:
32 rows of a few columns in the one pass, 32 columns of a row in the other. So maxima take few exchanges between
threads, few threads form the same scale, and four codes that lie one after another come from one thread: whole words
are transposed through shared memory.
"""

import triton
import triton.language as tl

from halfstep.kernels.gpu.jit.elements import kept_codes, kept_words
from halfstep.kernels.gpu.jit.instruction import larger, pairs_widened
from halfstep.kernels.gpu.jit.numbers import widened
from halfstep.kernels.gpu.jit.scales import scales
from halfstep.kernels.gpu.jit.tiles import found_before, keep_scales, over_scale, spread, tile_maxima


_HELD: tl.constexpr = tl.constexpr(32)


@triton.jit
def interleaved(parts):
    """Four or eight tensors (rows, columns) as one of another dimension, the last."""
    ROWS: tl.constexpr = parts[0].shape[0]
    COLUMNS: tl.constexpr = parts[0].shape[1]
    if len(parts) == 4:
        made = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
    else:
        even = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))
        odd = tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7]))
        made = tl.join(even, odd)
    return tl.reshape(made, (ROWS, COLUMNS, len(parts)))


@triton.jit
def masked(row, column, rows, columns, MASKED: tl.constexpr):
    """Which places of a block are in the matrix; None where all are."""
    inside = None
    if MASKED:
        inside = (row < rows)[:, None] & (column < columns)[None, :]
    return inside


@triton.jit
def bits_of(stored, Q: tl.constexpr, SOURCE: tl.constexpr):
    """The float32 bits of what was loaded."""
    if Q.instruction is not None and SOURCE != "float32":
        bits = pairs_widened(stored, SOURCE)
    else:
        bits = widened(stored, SOURCE)
    return bits


@triton.jit
def largest_at(parts, Q: tl.constexpr, SOURCE: tl.constexpr):
    """The float32 bits of the largest magnitude at each place of tensors that were loaded; NaN is above infinity."""
    mask: tl.constexpr = 0x7FFFFFFF if SOURCE == "float32" else 0x7FFF
    if Q.instruction is not None and SOURCE != "float32":
        most = parts[0]
        for i in tl.static_range(1, len(parts)):
            most = larger(most, parts[i], SOURCE)
        most = most & mask
    else:
        most = parts[0] & mask
        for i in tl.static_range(1, len(parts)):
            most = tl.maximum(most, parts[i] & mask)
    return widened(most, SOURCE)


@triton.jit
def down_columns(
    x, turned, scale, found, top, left, rows, columns, strides,
    R: tl.constexpr, Q: tl.constexpr, SOURCE: tl.constexpr, FORM: tl.constexpr, H: tl.constexpr, TALL: tl.constexpr,
    COLUMNS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Store the transposed copy of a square and the scales of its tiles of H rows."""
    UP: tl.constexpr = TALL // _HELD
    row, column = top + _HELD * tl.arange(0, UP), left + tl.arange(0, COLUMNS)
    place = x + (row.to(tl.int64) * columns)[:, None] + column[None, :]
    parts = tl.tuple(())
    for i in tl.static_range(_HELD):
        inside = masked(row + i // 16 * 16, column, rows, columns, MASKED)
        parts += (tl.load(place + columns.to(tl.int64) * i, mask=inside, other=0 if MASKED else None),)
    if H:
        largest = tile_maxima(largest_at(parts, Q, SOURCE), H // _HELD, 1)
    else:
        largest = found_before(found, column, column, rows, columns, 0, 1)
    stored, multiplier, meets, keep = scales(largest, None, R, None)
    keep_scales(scale, stored, multiplier, top, left, rows, columns, strides, R, H, 1, FORM, True)
    words = tl.tuple(())
    for i in tl.static_range(0, _HELD, 4):
        a = over_scale(bits_of(parts[i], Q, SOURCE), meets, None, R)
        b = over_scale(bits_of(parts[i + 1], Q, SOURCE), meets, None, R)
        c = over_scale(bits_of(parts[i + 2], Q, SOURCE), meets, None, R)
        d = over_scale(bits_of(parts[i + 3], Q, SOURCE), meets, None, R)
        words += (kept_words(a, b, c, d, spread(keep, UP, COLUMNS), Q),)
    word = tl.reshape(tl.permute(interleaved(words), (1, 0, 2)), (COLUMNS, TALL // 4)).to(tl.int32, bitcast=True)
    across = top // 4 + tl.arange(0, TALL // 4)
    place = (column.to(tl.int64) * (rows // 4))[:, None] + across[None, :]
    out = turned.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(out + place, word, mask=masked(column, across, columns, rows // 4, MASKED))


@triton.jit
def along_rows(
    x, codes, scale, found, top, left, rows, columns, strides,
    R: tl.constexpr, Q: tl.constexpr, SOURCE: tl.constexpr, FORM: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Store the codes of a strip of the square as it lies, and the scales of its tiles of W columns."""
    ACROSS: tl.constexpr = COLUMNS // 4
    row = top + tl.arange(0, ROWS)
    first = (row.to(tl.int64) * columns)[:, None]
    parts = tl.tuple(())
    for i in tl.static_range(4):
        column = left + tl.arange(0, ACROSS) // 8 * 32 + tl.arange(0, ACROSS) % 8 + 8 * i
        inside = masked(row, column, rows, columns, MASKED)
        parts += (tl.load(x + first + column[None, :], mask=inside, other=0 if MASKED else None),)
    if W:
        largest = tile_maxima(largest_at(parts, Q, SOURCE), 1, W // 4)
    else:
        largest = found_before(found, row, row, rows, columns, 1, 0)
    stored, multiplier, meets, keep = scales(largest, None, R, None)
    keep_scales(scale, stored, multiplier, top, left, rows, columns, strides, R, 1, W, FORM, False)
    made = tl.tuple(())
    for i in tl.static_range(4):
        bits = over_scale(bits_of(parts[i], Q, SOURCE), meets, None, R)
        made += (kept_codes(bits, spread(keep, ROWS, ACROSS), Q),)
    code = tl.permute(tl.reshape(interleaved(made), (ROWS, ACROSS // 8, 8, 4)), (0, 1, 3, 2))
    column = left + tl.arange(0, COLUMNS)
    inside = masked(row, column, rows, columns, MASKED)
    tl.store(codes + first + column[None, :], tl.reshape(code, (ROWS, COLUMNS)), mask=inside)


@triton.jit
def square(
    x, codes, scale, found, turned, turned_scale, turned_found, top, left, rows, columns, strides, turned_strides,
    R: tl.constexpr, Q: tl.constexpr, SOURCE: tl.constexpr, FORM: tl.constexpr, W: tl.constexpr, TALL: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Both copies of a square: the transposed one first, for which all of it is loaded at once."""
    down_columns(
        x, turned, turned_scale, turned_found, top, left, rows, columns, turned_strides, R, Q, SOURCE, FORM, W, TALL,
        COLUMNS, MASKED,
    )  # fmt: skip
    for strip in range(TALL // ROWS):
        along_rows(
            x, codes, scale, found, top + strip * ROWS, left, rows, columns, strides, R, Q, SOURCE, FORM, W, ROWS,
            COLUMNS, MASKED,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["row_units", "units", "low", "high", "held", "down", "across", "turned_down", "turned_across"]
)
def both_by_passes(
    x, codes, scale, tensor, found, turned, turned_scale, turned_tensor, turned_found, factor, amax,
    row_units, units, low, high, held, down, across, turned_down, turned_across,
    R: tl.constexpr, Q: tl.constexpr, SOURCE: tl.constexpr, FORM: tl.constexpr, W: tl.constexpr,
    ROW_UNIT: tl.constexpr, UNIT: tl.constexpr, TALL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`layouts.both` of codes of a byte to nearest in tiles of one row, of sides that are multiples of 16."""
    rows, columns = row_units * ROW_UNIT, units * UNIT
    programs = (columns + COLUMNS - 1) // COLUMNS
    top, left = tl.program_id(0) // programs * TALL, tl.program_id(0) % programs * COLUMNS
    strides, turned_strides = (down, across), (turned_down, turned_across)
    if top + TALL <= rows and left + COLUMNS <= columns:
        square(
            x, codes, scale, found, turned, turned_scale, turned_found, top, left, rows, columns, strides,
            turned_strides, R, Q, SOURCE, FORM, W, TALL, ROWS, COLUMNS, False,
        )  # fmt: skip
    else:
        square(
            x, codes, scale, found, turned, turned_scale, turned_found, top, left, rows, columns, strides,
            turned_strides, R, Q, SOURCE, FORM, W, TALL, ROWS, COLUMNS, True,
        )  # fmt: skip
