"""Dequantizes packed codes with the scales of their tiles (`quant.Quantized.dequantize`)."""

import triton
import triton.language as tl

from halfstep.kernels.gpu.jit.elements import power_of, value_at, written
from halfstep.kernels.gpu.jit.numbers import as_float, constant, decoded, held, read
from halfstep.kernels.gpu.jit.tiles import corner, masked, spread


@triton.jit
def meant(code, known, M: tl.constexpr):
    """The float32 values of 32-bit codes; `M` is a `Meaning` of `kernels.gpu.quantizers`, `known` its lookup table."""
    if M.looked_up:
        value = value_at(code, known)
    elif M.whole is not None:
        number = (code << M.whole[0]).to(tl.int32, bitcast=True) >> M.whole[0]
        value = number.to(tl.float32) * constant(M.whole[1])
    else:
        D: tl.constexpr = M.decoding
        value = as_float(decoded(code, D).to(tl.uint32))
    return value


@triton.jit
def codes_apart(codes, first, row, column, left, rows, columns, M: tl.constexpr, MASKED: tl.constexpr):
    """The unpacked codes of a block, one per element."""
    ROWS: tl.constexpr = row.shape[0]
    COLUMNS: tl.constexpr = column.shape[0]
    WIDE: tl.constexpr = 2 if M.bits == 4 else (4 if M.bits == 6 else 1)
    BYTES: tl.constexpr = 3 if M.bits == 6 else 1
    across = left // WIDE + tl.arange(0, COLUMNS // WIDE)
    place = first // WIDE + across[None, :]
    inside = masked(row, across, rows, columns // WIDE, MASKED)
    whole = read(codes + place * BYTES, inside).to(tl.uint32)
    for i in tl.static_range(1, BYTES):
        whole |= read(codes + place * BYTES + i, inside).to(tl.uint32) << (8 * i)
    if M.bits == 4:
        one, two = whole & 15, whole >> 4
        whole = tl.reshape(tl.join(two, one) if M.high_first else tl.join(one, two), (ROWS, COLUMNS))
    elif M.bits == 6:
        pairs = tl.reshape(tl.join(whole & 0xFFF, whole >> 12), (ROWS, COLUMNS // 2))
        whole = tl.reshape(tl.join(pairs & 63, pairs >> 6), (ROWS, COLUMNS))
    return whole


@triton.jit
def multipliers(
    scale, tensor, group, scale_known, row, column, top, left, rows, columns,
    R: tl.constexpr, E: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """The multiplier of each tile of a block, from the stored scales."""
    tall: tl.constexpr = row.shape[0] // H if H > 0 and row.shape[0] > H else 1  # tiles of the block
    long: tl.constexpr = column.shape[0] // W if W else 1
    high = H if H else rows
    wide = W if W else columns
    down = (top // high + tl.arange(0, tall))[:, None]
    across = (left // wide + tl.arange(0, long))[None, :]
    whole = (columns + wide - 1) // wide
    inside = (down < (rows + high - 1) // high) & (across < whole)
    place = down.to(tl.int64) * whole + across
    stored = tl.load(scale + place, mask=inside, other=0)
    if R.kind == "power":
        multiplier = power_of(stored.to(tl.uint32))
        if R.part is not None:
            multiplier = tl.div_rn(multiplier, constant(R.part))
    elif R.kind == "two_level":
        multiplier = as_float(decoded(stored.to(tl.uint32), E).to(tl.uint32)) * tl.load(tensor).to(
            tl.float32, bitcast=True
        )
    elif R.kind == "double":
        largest = tl.load(group + place // R.group, mask=inside, other=0).to(tl.float32, bitcast=True)
        multiplier = held(value_at(stored, scale_known) * largest + tl.load(tensor).to(tl.float32, bitcast=True))
    elif R.kind == "narrow":
        multiplier = as_float(stored.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
    else:
        multiplier = stored.to(tl.float32, bitcast=True)
    return multiplier


@triton.jit
def values(
    codes, scale, tensor, group, known, scale_known, out, top, left, row, column, first, rows, columns,
    R: tl.constexpr, M: tl.constexpr, E: tl.constexpr, TARGET: tl.constexpr, OUT: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Write the values of a block."""
    code = codes_apart(codes, first, row, column, left, rows, columns, M, MASKED)
    multiplier = multipliers(scale, tensor, group, scale_known, row, column, top, left, rows, columns, R, E, H, W)
    made = written(meant(code, known, M), spread(multiplier, row.shape[0], column.shape[0]), R, OUT, TARGET)
    tl.store(out + first + column[None, :], made, mask=masked(row, column, rows, columns, MASKED))


@triton.jit(do_not_specialize=["rows", "units"])
def restore(
    codes, scale, tensor, group, known, scale_known, out, rows, units,
    R: tl.constexpr, M: tl.constexpr, E: tl.constexpr, TARGET: tl.constexpr, OUT: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the values of a matrix of `rows` rows and units * UNIT columns; with UNIT = COLUMNS one block spans a
    row."""
    columns = COLUMNS if UNIT == COLUMNS else units * UNIT
    top, left = corner(columns, ROWS, COLUMNS)
    row, column = top + tl.arange(0, ROWS), left + tl.arange(0, COLUMNS)
    first = (row.to(tl.int64) * columns)[:, None]
    if top + ROWS <= rows and left + COLUMNS <= columns:
        values(
            codes, scale, tensor, group, known, scale_known, out, top, left, row, column, first, rows, columns,
            R, M, E, TARGET, OUT, H, W, False,
        )  # fmt: skip
    else:
        values(
            codes, scale, tensor, group, known, scale_known, out, top, left, row, column, first, rows, columns,
            R, M, E, TARGET, OUT, H, W, True,
        )  # fmt: skip
