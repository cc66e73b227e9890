"""Quantization in tiles that share a scale, to codes and scales or to values: one block of a matrix per program.

A tile has `H` rows and `W` columns, powers of two, and a block holds whole tiles. 0 stands for the whole dimension:
then amaxes come from an earlier pass (`found`). Tiles at the matrix's edges are padded with zeros.
"""

import triton
import triton.language as tl

from halfstep.kernels.gpu.jit.elements import code_of, over, scales, tensor_scale_kept, together, value_of, written
from halfstep.kernels.gpu.jit.numbers import as_bits, as_float, noise_by, noise_keys, read, rounded, seed_of, widened


@triton.jit
def tile_maxima(bits, H: tl.constexpr, W: tl.constexpr):
    """The bits of the amax of each tile of a block; NaN is above infinity."""
    ROWS: tl.constexpr = bits.shape[0]
    COLUMNS: tl.constexpr = bits.shape[1]
    found = (bits & 0x7FFFFFFF).to(tl.int32, bitcast=True)
    if W == COLUMNS:
        found = tl.max(found, 1, keep_dims=True)
    elif W > 1:
        found = tl.max(tl.reshape(found, (ROWS, COLUMNS // W, W)), 2)
    if H == ROWS:
        found = tl.max(found, 0, keep_dims=True)
    elif H > 1:
        found = tl.max(tl.reshape(found, (ROWS // H, H, COLUMNS // W)), 1)
    return found.to(tl.uint32, bitcast=True)


@triton.jit
def spread(numbers, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One value per tile, repeated for each of its elements."""
    R: tl.constexpr = numbers.shape[0]
    C: tl.constexpr = numbers.shape[1]
    if R > 1 and R < ROWS:
        numbers = tl.reshape(tl.broadcast_to(tl.expand_dims(numbers, 1), (R, ROWS // R, C)), (ROWS, C))
    if C > 1 and C < COLUMNS:
        D: tl.constexpr = numbers.shape[0]
        numbers = tl.reshape(tl.broadcast_to(tl.expand_dims(numbers, 2), (D, C, COLUMNS // C)), (D, COLUMNS))
    return tl.broadcast_to(numbers, (ROWS, COLUMNS))


@triton.jit
def tile_sums(numbers, H: tl.constexpr, W: tl.constexpr):
    """The float64 sum of each tile; any order gives the same result where sums are exact."""
    found = tl.sum(tl.reshape(numbers, (numbers.shape[0], numbers.shape[1] // W, W)), 2)
    return tl.sum(tl.reshape(found, (found.shape[0] // H, H, found.shape[1])), 1)


@triton.jit
def over_scale(bits, element_scale, keep, R: tl.constexpr):
    """The bits of a block's elements divided by the scale of their tile, by `elements.over`.

    With R.corrections, the division is by the reciprocal: from a quotient that is off by a few units in the last place,
    each correction subtracts the remainder, which `fma` computes exactly, and the result is correctly rounded. One is
    enough for bf16 and fp16 (8 and 11 bits) before codes of E4M3 and E5M2, to nearest: the quotients that it rounds
    wrong do not lie midway between two codes. Scales are brought into [1, 2), so that nothing overflows; quotients that
    underflow are zeros in any code. Elements are negated first, so that -0 keeps its sign.

    Without `keep`, elements of tiles with scale 0, infinity or NaN become arbitrary values.
    """
    ROWS: tl.constexpr = bits.shape[0]
    COLUMNS: tl.constexpr = bits.shape[1]
    if keep is not None:
        keep = spread(keep, ROWS, COLUMNS)
    if R.corrections == 0 or R.kind == "power" or R.kind == "reciprocal":
        made = over(bits, spread(element_scale, ROWS, COLUMNS), keep, R)
    else:
        power = as_float(((254 - tl.maximum(as_bits(element_scale) >> 23, 1)) << 23).to(tl.uint32))
        divisor = element_scale * power
        inverse = spread(tl.div_rn(-1.0, divisor), ROWS, COLUMNS)
        divisor = spread(divisor, ROWS, COLUMNS)
        bits = bits if keep is None else bits & keep
        negative = as_float(bits) * spread(-power, ROWS, COLUMNS)
        quotient = negative * inverse
        TIMES: tl.constexpr = R.corrections
        for _ in tl.static_range(TIMES):
            quotient = tl.fma(tl.fma(quotient, divisor, negative), inverse, quotient)
        made = as_bits(quotient)
    return made


@triton.jit
def errors(bits, element_scale, keep, R: tl.constexpr):
    """How far a block's elements are from their rounded values with these scales: float64."""
    NEAREST: tl.constexpr = R.nearest
    scale, kept = spread(element_scale, bits.shape[0], bits.shape[1]), spread(keep, bits.shape[0], bits.shape[1])
    element = as_float(rounded(over(bits, scale, kept, R), None, NEAREST))
    return tl.abs(element.to(tl.float64) * scale.to(tl.float64) - as_float(bits).to(tl.float64))


@triton.jit
def scales_of(bits, amax, tensor_scale, R: tl.constexpr, E: tl.constexpr, H: tl.constexpr, W: tl.constexpr):
    """The `scales` of a block's tiles. If the rule has a second one, a tile takes that where its sum of errors, which
    is exact, is smaller (`quant.scaling.two_level.FourOverSix`)."""
    stored, multiplier, element_scale, keep = scales(amax, tensor_scale, R, E)
    if R.second is not None:
        SECOND: tl.constexpr = R.second
        second, its_multiplier, its_element_scale, its_keep = scales(amax, tensor_scale, SECOND, E)
        worse = (
            tile_sums(errors(bits, element_scale, keep, R) - errors(bits, its_element_scale, its_keep, R), H, W) > 0.0
        )
        stored, multiplier = tl.where(worse, second, stored), tl.where(worse, its_multiplier, multiplier)
        element_scale, keep = tl.where(worse, its_element_scale, element_scale), tl.where(worse, its_keep, keep)
    return stored, multiplier, element_scale, keep


@triton.jit
def noise_of(low, high, first, place):
    """Noise for the elements first + place: a column of int64 and a row of int32 below 2^14."""
    one, two = noise_keys(low, high, first >> 14)
    next_one, next_two = noise_keys(low, high, (first >> 14) + 1)
    index = (first & 0x3FFF).to(tl.int32) + place
    beyond = index > 0x3FFF
    return noise_by(tl.where(beyond, next_one, one), tl.where(beyond, next_two, two), index & 0x3FFF)


@triton.jit
def scale_place(row, column, across, strides, SWIZZLED: tl.constexpr):
    """The offset of a tile's scale, in a copy with `across` tiles per row: by strides, or in the layout of Blackwell's
    tensor cores, blocks of 128 rows and 4 columns (32_4_4)."""
    if SWIZZLED:
        block = (row >> 7).to(tl.int64) * ((across + 3) >> 2) + (column >> 2)
        place = (block << 9) + ((row & 31) << 4 | (row >> 5 & 3) << 2 | column & 3)
    else:
        place = row.to(tl.int64) * strides[0] + column.to(tl.int64) * strides[1]
    return place


@triton.jit
def corner(columns, TALL: tl.constexpr, WIDE: tl.constexpr):
    """Row and column of the first element of a program's block; blocks are numbered along rows."""
    across = (columns + WIDE - 1) // WIDE
    return tl.program_id(0) // across * TALL, tl.program_id(0) % across * WIDE


@triton.jit
def masked(row, column, rows, columns, MASKED: tl.constexpr):
    """The mask of the elements of a block that are inside the matrix; None without MASKED."""
    inside = None
    if MASKED:
        inside = (row < rows)[:, None] & (column < columns)[None, :]
    return inside


@triton.jit
def loaded(x, first, row, column, rows, columns, SOURCE: tl.constexpr, MASKED: tl.constexpr):
    """The float32 bits of a block of a matrix; 0 beyond its edges."""
    return widened(read(x + first + column[None, :], masked(row, column, rows, columns, MASKED)), SOURCE)


@triton.jit
def largest_of(
    x, top, column, rows, columns, SOURCE: tl.constexpr, H: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The amaxes of one row of tiles that are taller than a block, read strip by strip: (1, tiles)."""
    found = tl.zeros((1, column.shape[0] // W), tl.int32)
    for strip in range(H // ROWS):
        row = top + strip * ROWS + tl.arange(0, ROWS)
        bits = loaded(x, (row.to(tl.int64) * columns)[:, None], row, column, rows, columns, SOURCE, MASKED)
        found = tl.maximum(found, tile_maxima(bits, ROWS, W).to(tl.int32, bitcast=True))
    return found.to(tl.uint32, bitcast=True)


@triton.jit
def found_before(found, row, column, rows, columns, H: tl.constexpr, W: tl.constexpr):
    """The amaxes of a block's rows (W 0), its columns (H 0), or the tensor (both), from an earlier pass."""
    if H == 0 and W == 0:
        amax = tl.full((1, 1), 0, tl.int32) + tl.load(found)
    elif H == 0:
        amax = tl.load(found + column, mask=column < columns, other=0)[None, :]
    else:
        amax = tl.load(found + row, mask=row < rows, other=0)[:, None]
    return amax.to(tl.uint32, bitcast=True)


@triton.jit
def largest_in(bits, found, row, column, rows, columns, H: tl.constexpr, W: tl.constexpr):
    """The amaxes of a block's tiles; from an earlier pass where tiles span a dimension."""
    return tile_maxima(bits, H, W) if H and W else found_before(found, row, column, rows, columns, H, W)


@triton.jit
def keep_scales(
    scale, stored, multiplier, top, left, rows, columns, strides,
    R: tl.constexpr, H: tl.constexpr, W: tl.constexpr, FORM: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """Store the scales of tiles, the first of which contains the element (top, left). FORM: `stored`; `swizzled`,
    repeated for each row of a tile; or `number`, the multiplier. DOWN: for the transposed copy."""
    if FORM == "number" or R.kind == "quotient" or R.kind == "reciprocal":
        kept = multiplier.to(tl.int32, bitcast=True)
    elif R.kind == "narrow":
        kept = (stored >> 16).to(tl.uint16).to(tl.int16, bitcast=True)
    else:
        kept = stored.to(tl.uint8)
    # For square tiles tensor cores take one scale for each row of a copy.
    UP: tl.constexpr = H if FORM == "swizzled" and H > 1 and not DOWN else 1
    BESIDE: tl.constexpr = W if FORM == "swizzled" and H > 1 and DOWN else 1
    HIGH: tl.constexpr = H // UP
    WIDE: tl.constexpr = W // BESIDE
    if UP * BESIDE > 1:
        kept = spread(kept, kept.shape[0] * UP, kept.shape[1] * BESIDE)
    down = ((top // HIGH if HIGH else 0) + tl.arange(0, kept.shape[0]))[:, None]
    across = ((left // WIDE if WIDE else 0) + tl.arange(0, kept.shape[1]))[None, :]
    high = HIGH if HIGH else rows
    wide = WIDE if WIDE else columns
    tall, long = (rows + high - 1) // high, (columns + wide - 1) // wide
    inside = (down < tall) & (across < long)
    if H == 0:
        inside = inside & (top == 0)
    if W == 0:
        inside = inside & (left == 0)
    row, column, beside = (across, down, tall) if DOWN else (down, across, long)
    tl.store(scale + scale_place(row, column, beside, strides, FORM == "swizzled"), kept, mask=inside)


@triton.jit
def store(out, made, first, row, left, rows, columns, WIDE: tl.constexpr, BYTES: tl.constexpr, MASKED: tl.constexpr):
    """Store a block's rows: each entry stands for WIDE elements and is stored as BYTES single bytes (None: as it
    is)."""
    across = left // WIDE + tl.arange(0, made.shape[1])
    place = first // WIDE + across[None, :]
    inside = masked(row, across, rows, columns // WIDE, MASKED)
    if BYTES is None:
        tl.store(out + place, made, mask=inside)
    else:
        for i in tl.static_range(BYTES):
            tl.store(out + place * BYTES + i, (made >> (8 * i)).to(tl.uint8), mask=inside)


@triton.jit
def store_codes(out, code, first, row, left, rows, columns, Q: tl.constexpr, MASKED: tl.constexpr):
    """Store the codes of a block's rows, packed."""
    made = together(code, Q)
    wide: tl.constexpr = code.shape[1] // made.shape[1]
    store(out, made, first, row, left, rows, columns, wide, 3 if Q.bits == 6 else 1, MASKED)


@triton.jit
def values_of(
    bits, random_bits, known, multiplier, tensor_scale,
    R: tl.constexpr, Q: tl.constexpr, TARGET: tl.constexpr, OUT: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Elements rounded and multiplied by their tile's multiplier, and by the tensor's scale unless APART, as bits to
    store."""
    times = multiplier * tensor_scale if R.kind == "two_level" and not APART else multiplier
    return written(value_of(bits, random_bits, known, Q), spread(times, bits.shape[0], bits.shape[1]), R, OUT, TARGET)


@triton.jit
def block(
    x, out, scale, tensor_scale, found, known, top, left, rows, columns, low, high,
    R: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, SOURCE: tl.constexpr, TARGET: tl.constexpr,
    OUT: tl.constexpr, APART: tl.constexpr, NOISY: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Quantize a block of a matrix, or all blocks of a taller tile: to codes (TARGET None) and scales, or to values."""
    column = left + tl.arange(0, COLUMNS)
    strides = ((columns + W - 1) // W if W else 1, 1)
    strips: tl.constexpr = H // ROWS if H > ROWS else 1
    if strips > 1:
        amax = largest_of(x, top, column, rows, columns, SOURCE, H, W, ROWS, MASKED)
        stored, multiplier, element_scale, keep = scales(amax, tensor_scale, R, E)
        if TARGET is None:
            keep_scales(scale, stored, multiplier, top, left, rows, columns, strides, R, H, W, "stored", False)
    for strip in range(strips):
        row = top + strip * ROWS + tl.arange(0, ROWS)
        first = (row.to(tl.int64) * columns)[:, None]
        bits = loaded(x, first, row, column, rows, columns, SOURCE, MASKED)
        if strips == 1:
            amax = largest_in(bits, found, row, column, rows, columns, H, W)
            stored, multiplier, element_scale, keep = scales_of(bits, amax, tensor_scale, R, E, H, W)
            if TARGET is None:
                keep_scales(scale, stored, multiplier, top, left, rows, columns, strides, R, H, W, "stored", False)
        random_bits = noise_of(low, high, first + left, tl.arange(0, COLUMNS)[None, :]) if NOISY else None
        bits = over_scale(bits, element_scale, keep, R)
        if TARGET is None:
            store_codes(out, code_of(bits, random_bits, known, Q), first, row, left, rows, columns, Q, MASKED)
        else:
            made = values_of(bits, random_bits, known, multiplier, tensor_scale, R, Q, TARGET, OUT, APART)
            store(out, made, first, row, left, rows, columns, 1, None, MASKED)


@triton.jit(do_not_specialize=["rows", "units", "low", "high", "held"])
def quantise(
    x, out, scale, tensor, found, known, rows, units, low, high, held,
    R: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, SOURCE: tl.constexpr, TARGET: tl.constexpr, OUT: tl.constexpr,
    APART: tl.constexpr, NOISY: tl.constexpr, H: tl.constexpr, W: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Quantize a matrix of `rows` rows and units * UNIT columns in tiles; with UNIT = COLUMNS one block spans a row."""
    tall: tl.constexpr = H if H > ROWS else ROWS
    columns = COLUMNS if UNIT == COLUMNS else units * UNIT
    top, left = corner(columns, tall, COLUMNS)
    if NOISY:
        low, high = seed_of(low, high, held)
    tensor_scale = tensor_scale_kept(found, tensor, R) if R.kind == "two_level" else None
    if top + tall <= rows and left + COLUMNS <= columns:
        block(
            x, out, scale, tensor_scale, found, known, top, left, rows, columns, low, high,
            R, Q, E, SOURCE, TARGET, OUT, APART, NOISY, H, W, ROWS, COLUMNS, False,
        )  # fmt: skip
    else:
        block(
            x, out, scale, tensor_scale, found, known, top, left, rows, columns, low, high,
            R, Q, E, SOURCE, TARGET, OUT, APART, NOISY, H, W, ROWS, COLUMNS, True,
        )  # fmt: skip


# ---- amaxes, before the pass that rounds -----------------------------------------------------------------------------


@triton.jit
def raised(
    x, found, across, top, left, rows, columns, SOURCE: tl.constexpr, FINITE: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Raise the amaxes at `found` by one block."""
    row, column = top + tl.arange(0, ROWS), left + tl.arange(0, COLUMNS)
    if FINITE and H > ROWS:
        tiles = largest_of(x, top, column, rows, columns, SOURCE, H, W, ROWS, MASKED)
    else:
        bits = loaded(x, (row.to(tl.int64) * columns)[:, None], row, column, rows, columns, SOURCE, MASKED)
        tiles = tile_maxima(bits, H, W) if FINITE else bits & 0x7FFFFFFF
    tiles = tiles.to(tl.int32, bitcast=True)
    if FINITE:
        tl.atomic_max(found, tl.max(tl.where(tiles < 0x7F800000, tiles, 0)), sem="relaxed")
    elif W == 0:
        tl.atomic_max(found + row, tl.max(tiles, 1), mask=row < rows, sem="relaxed")
        if across is not None:
            tl.atomic_max(across + column, tl.max(tiles, 0), mask=column < columns, sem="relaxed")
    else:
        tl.atomic_max(found + column, tl.max(tiles, 0), mask=column < columns, sem="relaxed")


@triton.jit(do_not_specialize=["rows", "units"])
def maxima(
    x, found, across, rows, units, SOURCE: tl.constexpr, FINITE: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Raise `found`, which holds zeros, to the amaxes of rows (W 0) or columns (H 0), or, with FINITE, to the largest
    amax of tiles without infinity or NaN. With rows, also those of columns if `across` is given."""
    tall: tl.constexpr = H if H > ROWS else ROWS
    columns = COLUMNS if UNIT == COLUMNS else units * UNIT
    top, left = corner(columns, tall, COLUMNS)
    if top + tall <= rows and left + COLUMNS <= columns:
        raised(x, found, across, top, left, rows, columns, SOURCE, FINITE, H, W, ROWS, COLUMNS, False)
    else:
        raised(x, found, across, top, left, rows, columns, SOURCE, FINITE, H, W, ROWS, COLUMNS, True)
