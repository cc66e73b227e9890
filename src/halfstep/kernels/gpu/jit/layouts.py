"""A matrix in codes twice, as it lies and transposed: each with scales along its own rows, in one pass.

A program takes a square of the matrix, strip by strip: a strip is read again where it is needed again, from the nearest
cache, so that registers hold no more than one.
"""

import triton
import triton.language as tl

from halfstep.kernels.gpu.jit.elements import code_of
from halfstep.kernels.gpu.jit.instruction import converted
from halfstep.kernels.gpu.jit.numbers import as_bits, as_float, coded, constant, seed_of
from halfstep.kernels.gpu.jit.scales import scales, tensor_scale_of
from halfstep.kernels.gpu.jit.tiles import (
    found_before,
    keep_scales,
    largest_of,
    loaded,
    noise_of,
    over_scale,
    scales_of,
    store_codes,
    tile_maxima,
)


@triton.jit
def store_both(
    code, codes, turned, first, top, left, row, column, rows, columns,
    Q: tl.constexpr, ALONG: tl.constexpr, DOWN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Store the codes of a strip as it lies (ALONG), and transposed (DOWN)."""
    if ALONG:
        store_codes(codes, code, first, row, left, rows, columns, Q, MASKED)
    if DOWN:
        place = (column.to(tl.int64) * rows)[:, None]
        store_codes(turned, tl.trans(code), place, column, top, columns, rows, Q, MASKED)


@triton.jit
def factor_of(factor, found, R: tl.constexpr):
    """What a tensor is multiplied by as a whole; NaN where its largest magnitude is not finite."""
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
    """A square of the matrix. Square tiles and whole tensors have one code an element for both copies."""
    column = left + tl.arange(0, COLUMNS)
    shared: tl.constexpr = H == W
    most = tl.zeros((ROWS, COLUMNS), tl.int32)
    if shared and factor is None and (H == 0 or H > ROWS):
        if H:
            largest = largest_of(x, top, column, rows, columns, SOURCE, H, W, ROWS, MASKED)
        else:
            largest = found_before(found, column, column, rows, columns, H, W)
        stored, multiplier, meets, keep = scales(largest, tensor_scale, R, E)
        keep_scales(scale, stored, multiplier, top, left, rows, columns, strides, R, H, W, FORM, False)
        keep_scales(turned_scale, stored, multiplier, top, left, rows, columns, turned_strides, R, H, W, FORM, True)
    below = tl.zeros((1, COLUMNS), tl.int32)
    for strip in range(TALL // ROWS):
        start = top + strip * ROWS
        row = start + tl.arange(0, ROWS)
        first = (row.to(tl.int64) * columns)[:, None]
        bits = loaded(x, first, row, column, rows, columns, SOURCE, MASKED)
        drawn = None
        if NOISY:
            drawn = noise_of(low, high, first + left, tl.arange(0, COLUMNS)[None, :])
        if factor is not None:
            most = tl.maximum(most, (bits & 0x7FFFFFFF).to(tl.int32, bitcast=True))
            P: tl.constexpr = Q.rounding
            C: tl.constexpr = Q.coding
            OWN: tl.constexpr = Q.instruction
            times = as_bits(as_float(bits) * factor)
            if Q.instruction is not None and not NOISY:
                code = converted(times, OWN)
            else:
                code = coded(times, drawn, P, C)  # NaN, too
        else:
            if not shared or (H > 0 and H <= ROWS):
                if W:
                    largest = tile_maxima(bits, H, W)
                else:
                    largest = found_before(found, row, column, rows, columns, H, W)
                stored, multiplier, meets, keep = scales_of(bits, largest, tensor_scale, R, E, H, W)
                keep_scales(scale, stored, multiplier, start, left, rows, columns, strides, R, H, W, FORM, False)
                if shared:
                    keep_scales(
                        turned_scale, stored, multiplier, start, left, rows, columns, turned_strides, R, H, W, FORM,
                        True,
                    )  # fmt: skip
            code = code_of(over_scale(bits, meets, keep, R), drawn, None, Q)
        store_both(code, codes, turned, first, start, left, row, column, rows, columns, Q, True, shared, MASKED)
        if not shared:
            if W > ROWS:
                below = tl.maximum(below, tile_maxima(bits, ROWS, 1).to(tl.int32, bitcast=True))
            else:
                if W:
                    largest = tile_maxima(bits, W, 1)
                else:
                    largest = found_before(turned_found, row, column, rows, columns, 0, 1)
                stored, multiplier, meets, keep = scales_of(bits, largest, turned_tensor_scale, R, E, W, 1)
                keep_scales(
                    turned_scale, stored, multiplier, start, left, rows, columns, turned_strides, R, W, 1, FORM, True
                )  # fmt: skip
                code = code_of(over_scale(bits, meets, keep, R), None, None, Q)
                store_both(code, codes, turned, first, start, left, row, column, rows, columns, Q, False, True, MASKED)
    if amax is not None:
        tl.atomic_max(amax, tl.max(most), sem="relaxed")
    if not shared and W > ROWS:
        stored, multiplier, meets, keep = scales(below.to(tl.uint32, bitcast=True), turned_tensor_scale, R, E)
        keep_scales(turned_scale, stored, multiplier, top, left, rows, columns, turned_strides, R, W, 1, FORM, True)
        for strip in range(TALL // ROWS):
            start = top + strip * ROWS
            row = start + tl.arange(0, ROWS)
            first = (row.to(tl.int64) * columns)[:, None]
            bits = loaded(x, first, row, column, rows, columns, SOURCE, MASKED)
            code = code_of(over_scale(bits, meets, keep, R), None, None, Q)
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

    FORM "whole": codes of x times the number in `factor`; where that is 0, or not there, times what the rule makes of
    the largest magnitude that was `found`. `scale` becomes 1 over it, and `amax` is raised."""
    rows, columns = row_units * ROW_UNIT, units * UNIT
    programs = (columns + COLUMNS - 1) // COLUMNS
    top, left = tl.program_id(0) // programs * TALL, tl.program_id(0) % programs * COLUMNS
    if NOISY:
        low, high = seed_of(low, high, held)
    tensor_scale = None
    turned_tensor_scale = None
    if FORM == "whole":
        factor = factor_of(factor, found, R)
        if tl.program_id(0) == 0:
            tl.store(scale, tl.div_rn(1.0, factor).to(tl.int32, bitcast=True))
    elif R.kind == "two_level":
        tensor_scale = tensor_scale_of(tl.load(found), R)
        turned_tensor_scale = tensor_scale_of(tl.load(turned_found), R)
        if tl.program_id(0) == 0:
            tl.store(tensor, tensor_scale.to(tl.int32, bitcast=True))
            tl.store(turned_tensor, turned_tensor_scale.to(tl.int32, bitcast=True))
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
