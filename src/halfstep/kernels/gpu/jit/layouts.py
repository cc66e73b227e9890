"""A matrix quantized in two layouts in one pass: as it is and transposed, each with scales along its own rows.

A program quantizes a square of the matrix strip by strip, so that registers hold one strip; a strip that is needed
again is loaded again, from the L1 cache.
"""

import triton
import triton.language as tl

from halfstep.kernels.gpu.jit.elements import both_scales_kept, code_of, kept_codes, kept_words, scales
from halfstep.kernels.gpu.jit.instruction import converted, larger, pairs_widened
from halfstep.kernels.gpu.jit.numbers import as_bits, as_float, coded, constant, read, seed_of, widened
from halfstep.kernels.gpu.jit.tiles import (
    corner,
    found_before,
    keep_scales,
    largest_in,
    largest_of,
    loaded,
    masked,
    noise_of,
    over_scale,
    scales_of,
    spread,
    store_codes,
    tile_maxima,
)


@triton.jit
def store_both(
    code, codes, turned, first, top, left, row, column, rows, columns,
    Q: tl.constexpr, ALONG: tl.constexpr, DOWN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Store the codes of a strip to the first copy (ALONG), and transposed to the second (DOWN)."""
    if ALONG:
        store_codes(codes, code, first, row, left, rows, columns, Q, MASKED)
    if DOWN:
        place = (column.to(tl.int64) * rows)[:, None]
        store_codes(turned, tl.trans(code), place, column, top, columns, rows, Q, MASKED)


@triton.jit
def factor_of(factor, found, R: tl.constexpr):
    """The factor for the whole tensor; NaN where its amax is not finite."""
    if found is not None:
        amax = tl.load(found).to(tl.uint32, bitcast=True)
        _, _, formed, _ = scales(amax, None, R, None)
        formed = tl.where(amax >= 0x7F800000, constant(0x7FC00000), formed)
    if factor is None:
        number = formed
    else:
        number = tl.load(factor).to(tl.float32, bitcast=True)
        if found is not None:
            number = tl.where(number == 0.0, formed, number)
    return number


@triton.jit
def square(
    x, codes, scale, turned, turned_scale, tensor_scale, turned_tensor_scale, found, turned_found, factor, amax,
    top, left, rows, columns, low, high, strides, turned_strides,
    R: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, SOURCE: tl.constexpr, FORM: tl.constexpr,
    NOISY: tl.constexpr, H: tl.constexpr, W: tl.constexpr, TALL: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Both copies of one square of the matrix. With square tiles, or one scale per tensor, both copies have the same
    codes."""
    column = left + tl.arange(0, COLUMNS)
    shared: tl.constexpr = H == W
    most = tl.zeros((ROWS, COLUMNS), tl.int32)
    if shared and factor is None and (H == 0 or H > ROWS):
        if H:
            largest = largest_of(x, top, column, rows, columns, SOURCE, H, W, ROWS, MASKED)
        else:
            largest = found_before(found, column, column, rows, columns, H, W)
        stored, multiplier, element_scale, keep = scales(largest, tensor_scale, R, E)
        keep_scales(scale, stored, multiplier, top, left, rows, columns, strides, R, H, W, FORM, False)
        keep_scales(turned_scale, stored, multiplier, top, left, rows, columns, turned_strides, R, H, W, FORM, True)
    below = tl.zeros((1, COLUMNS), tl.int32)
    for strip in range(TALL // ROWS):
        start = top + strip * ROWS
        row = start + tl.arange(0, ROWS)
        first = (row.to(tl.int64) * columns)[:, None]
        bits = loaded(x, first, row, column, rows, columns, SOURCE, MASKED)
        random_bits = noise_of(low, high, first + left, tl.arange(0, COLUMNS)[None, :]) if NOISY else None
        if factor is not None:
            most = tl.maximum(most, (bits & 0x7FFFFFFF).to(tl.int32, bitcast=True))
            P: tl.constexpr = Q.rounding
            C: tl.constexpr = Q.coding
            OWN: tl.constexpr = Q.instruction
            times = as_bits(as_float(bits) * factor)
            by_bits: tl.constexpr = OWN is None or NOISY
            code = coded(times, random_bits, P, C) if by_bits else converted(times, OWN)  # NaN, too
        else:
            if not shared or (H > 0 and H <= ROWS):
                largest = largest_in(bits, found, row, column, rows, columns, H, W)
                stored, multiplier, element_scale, keep = scales_of(bits, largest, tensor_scale, R, E, H, W)
                keep_scales(scale, stored, multiplier, start, left, rows, columns, strides, R, H, W, FORM, False)
                if shared:
                    keep_scales(
                        turned_scale, stored, multiplier, start, left, rows, columns, turned_strides, R, H, W, FORM,
                        True,
                    )  # fmt: skip
            code = code_of(over_scale(bits, element_scale, keep, R), random_bits, None, Q)
        store_both(code, codes, turned, first, start, left, row, column, rows, columns, Q, True, shared, MASKED)
        if not shared:
            if W > ROWS:
                below = tl.maximum(below, tile_maxima(bits, ROWS, 1).to(tl.int32, bitcast=True))
            else:
                largest = largest_in(bits, turned_found, row, column, rows, columns, W, 1)
                stored, multiplier, element_scale, keep = scales_of(bits, largest, turned_tensor_scale, R, E, W, 1)
                keep_scales(
                    turned_scale, stored, multiplier, start, left, rows, columns, turned_strides, R, W, 1, FORM, True
                )  # fmt: skip
                code = code_of(over_scale(bits, element_scale, keep, R), None, None, Q)
                store_both(code, codes, turned, first, start, left, row, column, rows, columns, Q, False, True, MASKED)
    if amax is not None:
        tl.atomic_max(amax, tl.max(most), sem="relaxed")
    if not shared and W > ROWS:
        stored, multiplier, element_scale, keep = scales(below.to(tl.uint32, bitcast=True), turned_tensor_scale, R, E)
        keep_scales(turned_scale, stored, multiplier, top, left, rows, columns, turned_strides, R, W, 1, FORM, True)
        for strip in range(TALL // ROWS):
            start = top + strip * ROWS
            row = start + tl.arange(0, ROWS)
            first = (row.to(tl.int64) * columns)[:, None]
            bits = loaded(x, first, row, column, rows, columns, SOURCE, MASKED)
            code = code_of(over_scale(bits, element_scale, keep, R), None, None, Q)
            store_both(code, codes, turned, first, start, left, row, column, rows, columns, Q, False, True, MASKED)


@triton.jit(
    do_not_specialize=["row_units", "units", "low", "high", "held", "down", "across", "turned_down", "turned_across"]
)
def both(
    x, codes, scale, tensor, found, turned, turned_scale, turned_tensor, turned_found, factor, amax,
    row_units, units, low, high, held, down, across, turned_down, turned_across,
    R: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, SOURCE: tl.constexpr, FORM: tl.constexpr, NOISY: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, ROW_UNIT: tl.constexpr, UNIT: tl.constexpr, TALL: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write codes and scales of a matrix of row_units * ROW_UNIT rows and units * UNIT columns, and of its transpose.

    FORM "whole": the codes of x times the value at `factor`; where that is 0 or None, times the rule's factor for the
    amax at `found`. `scale` becomes 1 / factor, and `amax` is raised to max |x|.
    """
    rows, columns = row_units * ROW_UNIT, units * UNIT
    top, left = corner(columns, TALL, COLUMNS)
    if NOISY:
        low, high = seed_of(low, high, held)
    tensor_scale, turned_tensor_scale = None, None
    if FORM == "whole":
        factor = factor_of(factor, found, R)
        if tl.program_id(0) == 0:
            tl.store(scale, tl.div_rn(1.0, factor).to(tl.int32, bitcast=True))
    elif R.kind == "two_level":
        tensor_scale, turned_tensor_scale = both_scales_kept(found, tensor, turned_found, turned_tensor, R)
    strides, turned_strides = (down, across), (turned_down, turned_across)
    if top + TALL <= rows and left + COLUMNS <= columns:
        square(
            x, codes, scale, turned, turned_scale, tensor_scale, turned_tensor_scale, found, turned_found, factor, amax,
            top, left, rows, columns, low, high, strides, turned_strides,
            R, Q, E, SOURCE, FORM, NOISY, H, W, TALL, ROWS, COLUMNS, False,
        )  # fmt: skip
    else:
        square(
            x, codes, scale, turned, turned_scale, tensor_scale, turned_tensor_scale, found, turned_found, factor, amax,
            top, left, rows, columns, low, high, strides, turned_strides,
            R, Q, E, SOURCE, FORM, NOISY, H, W, TALL, ROWS, COLUMNS, True,
        )  # fmt: skip


# ---- one-byte codes: each copy in a pass of its own over a square ----------------------------------------------------
# The second pass loads the square from the L1 cache. A thread holds elements that share a scale: 32 rows of a few
# columns in one pass, 32 columns of a row in the other. So maxima need few exchanges between threads, few threads
# compute the same scale, and four consecutive codes come from one thread, so that whole words are transposed through
# shared memory.


_HELD: tl.constexpr = tl.constexpr(32)


@triton.jit
def interleaved(parts):
    """Four or eight tensors (rows, columns) stacked along a new last dimension."""
    if len(parts) == 4:
        made = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
    else:
        even = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))
        odd = tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7]))
        made = tl.join(even, odd)
    return tl.reshape(made, (parts[0].shape[0], parts[0].shape[1], len(parts)))


@triton.jit
def bits_of(stored, Q: tl.constexpr, SOURCE: tl.constexpr):
    """The float32 bits of loaded values."""
    pairs: tl.constexpr = Q.instruction is not None and SOURCE != "float32"
    return pairs_widened(stored, SOURCE) if pairs else widened(stored, SOURCE)


@triton.jit
def largest_at(parts, Q: tl.constexpr, SOURCE: tl.constexpr):
    """The float32 bits of the elementwise largest magnitude of several loaded tensors; NaN is above infinity."""
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
    """Store the transposed copy of a square, and the scales of its tiles of H rows."""
    UP: tl.constexpr = TALL // _HELD
    row, column = top + _HELD * tl.arange(0, UP), left + tl.arange(0, COLUMNS)
    place = x + (row.to(tl.int64) * columns)[:, None] + column[None, :]
    parts = tl.tuple(())
    for i in tl.static_range(_HELD):
        inside = masked(row + i // 16 * 16, column, rows, columns, MASKED)
        parts += (read(place + columns.to(tl.int64) * i, inside),)
    largest = largest_in(largest_at(parts, Q, SOURCE), found, column, column, rows, columns, H // _HELD, 1)
    stored, multiplier, element_scale, keep = scales(largest, None, R, None)
    keep_scales(scale, stored, multiplier, top, left, rows, columns, strides, R, H, 1, FORM, True)
    words = tl.tuple(())
    for i in tl.static_range(0, _HELD, 4):
        a = over_scale(bits_of(parts[i], Q, SOURCE), element_scale, None, R)
        b = over_scale(bits_of(parts[i + 1], Q, SOURCE), element_scale, None, R)
        c = over_scale(bits_of(parts[i + 2], Q, SOURCE), element_scale, None, R)
        d = over_scale(bits_of(parts[i + 3], Q, SOURCE), element_scale, None, R)
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
    """Store the first copy's codes of a strip of the square, and the scales of its tiles of W columns."""
    ACROSS: tl.constexpr = COLUMNS // 4
    row = top + tl.arange(0, ROWS)
    first = (row.to(tl.int64) * columns)[:, None]
    parts = tl.tuple(())
    for i in tl.static_range(4):
        column = left + tl.arange(0, ACROSS) // 8 * 32 + tl.arange(0, ACROSS) % 8 + 8 * i
        inside = masked(row, column, rows, columns, MASKED)
        parts += (read(x + first + column[None, :], inside),)
    largest = largest_in(largest_at(parts, Q, SOURCE), found, row, row, rows, columns, 1, W // 4)
    stored, multiplier, element_scale, keep = scales(largest, None, R, None)
    keep_scales(scale, stored, multiplier, top, left, rows, columns, strides, R, 1, W, FORM, False)
    made = tl.tuple(())
    for i in tl.static_range(4):
        bits = over_scale(bits_of(parts[i], Q, SOURCE), element_scale, None, R)
        made += (kept_codes(bits, spread(keep, ROWS, ACROSS), Q),)
    code = tl.permute(tl.reshape(interleaved(made), (ROWS, ACROSS // 8, 8, 4)), (0, 1, 3, 2))
    column = left + tl.arange(0, COLUMNS)
    inside = masked(row, column, rows, columns, MASKED)
    tl.store(codes + first + column[None, :], tl.reshape(code, (ROWS, COLUMNS)), mask=inside)


@triton.jit
def square_by_passes(
    x, codes, scale, found, turned, turned_scale, turned_found, top, left, rows, columns, strides, turned_strides,
    R: tl.constexpr, Q: tl.constexpr, SOURCE: tl.constexpr, FORM: tl.constexpr, W: tl.constexpr, TALL: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Both copies of a square: first the transposed one, for which the whole square is loaded at once."""
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
    """`both` for one-byte codes, rounded to nearest, in tiles of one row, and sizes that are multiples of 16."""
    rows, columns = row_units * ROW_UNIT, units * UNIT
    top, left = corner(columns, TALL, COLUMNS)
    strides, turned_strides = (down, across), (turned_down, turned_across)
    if top + TALL <= rows and left + COLUMNS <= columns:
        square_by_passes(
            x, codes, scale, found, turned, turned_scale, turned_found, top, left, rows, columns, strides,
            turned_strides, R, Q, SOURCE, FORM, W, TALL, ROWS, COLUMNS, False,
        )  # fmt: skip
    else:
        square_by_passes(
            x, codes, scale, found, turned, turned_scale, turned_found, top, left, rows, columns, strides,
            turned_strides, R, Q, SOURCE, FORM, W, TALL, ROWS, COLUMNS, True,
        )  # fmt: skip
