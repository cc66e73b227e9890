"""Random Hadamard transforms in float32: `quant.rotate` along the rows or columns of a matrix, bit for bit."""

import math
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from torch import Tensor

from halfstep.kernels.cpu.arrays import array, plain
from halfstep.kernels.cpu.compiled import Kernel, inner, none, specialized_inlined, whole_lines
from halfstep.kernels.cpu.lanes import SIGN, Given, as_bits, bits_of, emitted, lanes
from halfstep.kernels.cpu.runs import multiply, place_of, places_of, spread
from halfstep.quant.quantizer import matrix_shape


WIDTH = 128  # columns that a thread takes at a time, so that the data stays in the L1 cache
LANES = 16  # float32 elements of a register
NEAR = 1 << 12  # elements of rows that are rotated at a time
LEVELS = {2: 1, 4: 2, 8: 3, 16: 4, 32: 5, 64: 6}


def run(x: Tensor, signs: Tensor, dim: int) -> Tensor | None:
    """`quant.rotate(x, signs, dim)`: float32, padded to whole blocks. None where no kernel supports it: x must be a
    contiguous CPU tensor (fp32, bf16, fp16), rotated along its last dimension or a matrix's first."""
    if not plain(x) or not x.numel() or not x.dim() or len(signs) not in LEVELS or not plain(signs, torch.float32):
        return None
    size, dim = len(signs), dim % x.dim()
    if dim != x.dim() - 1 and (dim or x.dim() != 2):
        return None
    shape = list(x.shape)
    shape[dim] += -shape[dim] % size
    out = torch.empty(shape, dtype=torch.float32, device="cpu")
    if along := dim == x.dim() - 1:
        x = in_blocks(x, size)
    (rows, columns), (signs_of, scale, levels, _) = matrix_shape(tuple(x.shape)), rotation(signs)
    given = array(x), rows, columns, signs_of, scale, out.view(-1).numpy(), levels
    (_along if along else _down)(x.numel(), *given)
    return out


def in_blocks(x: Tensor, size: int) -> Tensor:
    """x with each row padded with zeros to whole blocks."""
    short = -x.shape[-1] % size
    return torch.nn.functional.pad(x, (0, short)) if short else x


def rotation(signs: Tensor, part: float = 1.0) -> tuple[Any, ...]:
    """The kernels' arguments for a rotation: signs, the factor 1 / sqrt(size), the binary logarithm of a block's size
    as the length of a tuple, and the factor on rotated values."""
    size = len(signs)
    return array(signs), np.float32(math.sqrt(1 / size)), (np.uint32(0),) * LEVELS[size], np.float32(part)


# ---- lanes ---------------------------------------------------------------------------------------------------------


@lanes(types.float32)
def _signed(value, sign):
    return bits_of(value).float() * sign.float()


@lanes(types.float32)
def _zero(sign):
    """The padding of a short block: 0 times its sign."""
    return (sign & SIGN).float()


@emitted(wide=True)
def transform(
    context: Any, builder: Any, x: Given, start: Given, scale: Given, out: Given, to: Given, levels: Given
) -> None:
    """In kernels: write the transform of a block of x from `start` on, times `scale`, to `out` from `to` on.

    The partner of each element is the one whose index differs in one bit: the lane of a gets a + b, the sum of both
    lanes; the lane of b gets a - b, the partner plus the lane's own value with its sign flipped.
    """
    size = 1 << len(levels.type)
    floats, words = ir.VectorType(ir.FloatType(), size), ir.VectorType(ir.IntType(32), size)
    pointer, align = place_of(context, builder, x, start.value, size)
    found = builder.load(pointer, align=align)
    for h in (1 << level for level in range(len(levels.type))):
        pairs = ir.Constant(words, [i ^ h for i in range(size)])
        signs = ir.Constant(words, [SIGN if i & h else 0 for i in range(size)])
        own = builder.bitcast(builder.xor(builder.bitcast(found, words), signs), floats)
        found = builder.fadd(builder.shuffle_vector(found, found, pairs), own)
    found = builder.fmul(found, spread(builder, scale.value, size))
    builder.store(found, *place_of(context, builder, out, to.value, size))


@emitted(wide=True)
def transform_down(
    context: Any, builder: Any, x: Given, start: Given, stride: Given, scale: Given, out: Given, to: Given,
    out_stride: Given, levels: Given,
) -> None:  # fmt: skip
    """In kernels: the same along as many columns as a register holds, from rows of x that are `stride` apart."""
    size = 1 << len(levels.type)
    found = [
        builder.load(row, align=align) for row, align in places_of(context, builder, x, start, stride, size, LANES)
    ]
    for h in (1 << level for level in range(len(levels.type))):
        for i in (i for i in range(size) if not i & h):
            one, other = found[i], found[i + h]
            found[i], found[i + h] = builder.fadd(one, other), builder.fsub(one, other)
    times = spread(builder, scale.value, LANES)
    for value, row in zip(found, places_of(context, builder, out, to, out_stride, size, LANES), strict=True):
        builder.store(builder.fmul(value, times), *row)


# ---- kernels -------------------------------------------------------------------------------------------------------


@inner
def _signed_blocks(x, signs, levels, out):
    size = np.uintp(1 << len(levels))
    for block in range(np.uintp(x.size) // size):
        for i in range(size):
            out[block * size + i] = _signed(x[block * size + i], signs[i])


@specialized_inlined
def opened_piece(x, signs, scale, levels, part):
    """In kernels: whole blocks x; with signs, a new array of x rotated, times `part`."""

    def turned(x, signs, scale, levels, part):
        held = np.empty(x.size, np.float32)
        _signed_blocks(x, signs, levels, held)
        for block in range(0, x.size, 1 << len(levels)):
            transform(held, block, scale, held, block, levels)
        multiply(held, part)
        return as_bits(held)

    return (lambda x, signs, scale, levels, part: x) if none(signs) else turned


@Kernel
def _along(x, rows, columns, signs, scale, out, levels):
    for part in prange((x.size + NEAR - 1) // NEAR):
        held = np.empty(NEAR, np.float32)
        a = part * NEAR
        b = min(a + NEAR, x.size)
        _signed_blocks(x[a:b], signs, levels, held)
        for block in range(0, b - a, 1 << len(levels)):
            transform(held, block, scale, out, a + block, levels)


@inner
def signed_panel(x, first, columns, tall, size, width, signs, part):
    """Write `size` rows of `width` columns, times signs, to `part`, whose rows are `WIDTH` long; only `tall` rows exist
    in x.

    Loops over columns are in the same function as those over rows, with unsigned indices: see `panels`.
    """
    for r in range(np.uintp(tall)):
        row, here = np.uintp(first) + r * np.uintp(columns), r * np.uintp(WIDTH)
        for i in range(np.uintp(width)):
            part[here + i] = _signed(x[row + i], signs[r])
    for r in range(tall, size):
        part[r * WIDTH : r * WIDTH + width] = _zero(signs[r])


@inner
def rotated_panel(x, rows, columns, row, a, width, signs, scale, levels):
    """A rotated block of rows, from `row` and column `a` on, as an array with rows `WIDTH` long."""
    size = 1 << len(levels)
    held = whole_lines(size * WIDTH)
    held[:] = 0
    signed_panel(x, row * columns + a, columns, min(size, rows - row), size, width, signs, held)
    for i in range(0, width, LANES):
        transform_down(held, i, WIDTH, scale, held, i, WIDTH, levels)
    return held


@specialized_inlined
def opened(x, rows, columns, row, a, tall, width, signs, scale, levels, part):
    """In kernels: `tall` rows from `row` and column `a` on, with signs rotated and times `part`: an array, where they
    begin in it, the distance between rows, and their number."""

    def upright(x, rows, columns, row, a, tall, width, signs, scale, levels, part):
        return x, row * columns + a, columns, min(tall, rows - row)

    def turned(x, rows, columns, row, a, tall, width, signs, scale, levels, part):
        held = rotated_panel(x, rows, columns, row, a, width, signs, scale, levels)
        multiply(held, part)
        return as_bits(held), 0, WIDTH, tall

    return upright if none(signs) else turned


@inner
def _few_columns(part, start, count, scale, out, to, columns, levels):
    """Transform columns that do not fill a register, in place in `part`, then copy them."""
    for i in range(start, start + count, LANES):
        transform_down(part, i, WIDTH, scale, part, i, WIDTH, levels)
    for r in range(1 << len(levels)):
        for i in range(count):
            out[to + r * columns + i] = part[r * WIDTH + start + i]


@Kernel
def _down(x, rows, columns, signs, scale, out, levels):
    size = 1 << len(levels)
    across = (columns + WIDTH - 1) // WIDTH
    for piece in prange((rows + size - 1) // size * across):
        row, a = piece // across * size, piece % across * WIDTH
        width = min(WIDTH, columns - a)
        part, first = np.zeros(size * WIDTH, np.float32), row * columns + a
        signed_panel(x, first, columns, min(size, rows - row), size, width, signs, part)
        whole = width // LANES * LANES
        for i in range(0, whole, LANES):
            transform_down(part, i, WIDTH, scale, out, first + i, columns, levels)
        if whole < width:
            _few_columns(part, whole, width - whole, scale, out, first + whole, columns, levels)
