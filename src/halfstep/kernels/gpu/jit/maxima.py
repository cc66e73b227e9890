"""The largest magnitude of each row of a matrix or column, or of its finite tiles: as bits, in which NaN is largest."""

import triton
import triton.language as tl

from halfstep.kernels.gpu.jit.tiles import largest_of, loaded, tile_maxima


@triton.jit
def raised(
    x, found, across, top, left, rows, columns, SOURCE: tl.constexpr, FINITE: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Raise what was found to a block's largest magnitudes."""
    row, column = top + tl.arange(0, ROWS), left + tl.arange(0, COLUMNS)
    if FINITE and H > ROWS:
        tiles = largest_of(x, top, column, rows, columns, SOURCE, H, W, ROWS, MASKED).to(tl.int32, bitcast=True)
    else:
        bits = loaded(x, (row.to(tl.int64) * columns)[:, None], row, column, rows, columns, SOURCE, MASKED)
        if FINITE:
            tiles = tile_maxima(bits, H, W).to(tl.int32, bitcast=True)
        else:
            tiles = (bits & 0x7FFFFFFF).to(tl.int32, bitcast=True)
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
    """Raise `found`, of zeros: a number a row (W 0) or a column (H 0), or one. FINITE: of the tiles without an infinity
    or NaN. Beside rows, columns too where there is a place for theirs (`across`)."""
    flat: tl.constexpr = UNIT == COLUMNS
    tall: tl.constexpr = H if H > ROWS else ROWS
    columns = COLUMNS if flat else units * UNIT
    wide = 1 if flat else (columns + COLUMNS - 1) // COLUMNS
    top, left = tl.program_id(0) // wide * tall, tl.program_id(0) % wide * COLUMNS
    if top + tall <= rows and left + COLUMNS <= columns:
        raised(x, found, across, top, left, rows, columns, SOURCE, FINITE, H, W, ROWS, COLUMNS, False)
    else:
        raised(x, found, across, top, left, rows, columns, SOURCE, FINITE, H, W, ROWS, COLUMNS, True)
