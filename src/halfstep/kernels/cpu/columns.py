"""Blocks that run down the columns of a matrix, rounded to values that are written along rows: transposed in registers.

What a product needs of an operand whose shared dimension is its first: `blocks` of the transposed matrix, bit for bit,
without a transposed copy of the input, which takes as long as the rounding.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from halfstep.formats import Format
from halfstep.kernels.cpu import blocks, element_codes, powers
from halfstep.kernels.cpu.arrays import array
from halfstep.kernels.cpu.compiled import Kernel, inner
from halfstep.kernels.cpu.divided import element
from halfstep.kernels.cpu.lanes import vectorise_fully
from halfstep.kernels.cpu.powers import FAR, TINY, note_scales, stepped
from halfstep.kernels.cpu.scales import larger_stored, power_scalars
from halfstep.quant.quantizer import Quantizer
from halfstep.quant.scales import Scales


_WIDTH, _TALL = 128, 512  # what a thread takes at a time: the results go to few rows, and fill whole lines of the cache


def supports_values(x: Tensor, out: Tensor, quantizer: Quantizer) -> bool:
    """Whether `run_values` can round `x` into `out`: a matrix's transposed view, by scales that are powers of two."""
    return (
        x.dim() == 2
        and x.numel() > 0
        and quantizer.rounding == "nearest_even"
        and quantizer.scales is not None
        and quantizer.scales.rule.exact
        and blocks.knows(quantizer, x.shape[1])
        and blocks.takes_values(x.t(), out)
        and x.shape == out.shape
    )


def run_values(x: Tensor, out: Tensor, format: Format, scales: Scales) -> bool:
    """Write what x, rounded in these blocks, stands for to `out`.

    Returns whether some may be below 2^-126, but not 0.
    """
    columns, rows = x.shape
    levels = blocks.levels(scales.tile)
    found = np.zeros(-(-columns // _WIDTH) * -(-rows // _TALL), np.uint32)
    rule = power_scalars(format, scales.rule)
    numbers: Any = element_codes.scalars(format, "nearest_even", "saturate")[0]
    steps = powers.scalars(format)
    _power(x.numel(), array(x.t()), columns, levels, rule, steps, found, array(out), numbers, _WIDTH, _TALL)
    return bool((found & TINY).any())


@intrinsic
def _turn(
    context: Any, array: Any, start: Any, stride: Any, out: Any, out_start: Any, out_stride: Any, levels: Any
) -> Any:
    """In kernels: write a square of `array`, a row every `stride` elements from `start` on, transposed to `out`.

    Its side is a register's lanes, or the block. Taking turns in pairing rows i and i + half, lane by lane, rotates the
    bits of (row, lane); after as many rounds as either has bits, they have changed places.
    """
    itemsize = array.dtype.bitwidth // 8
    side = min(1 << len(levels), 64 // itemsize)
    masks = [[i // 2 + half + i % 2 * side for i in range(side)] for half in (0, side // 2)]

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        vectorise_fully(builder.function)
        vector = ir.VectorType(context.get_data_type(array.dtype), side)

        def rows(number: int, what: Any, first: Any, step: Any) -> Any:
            data = context.make_array(what)(context, builder, values[number]).data
            for i in range(side):
                offset = builder.add(first, builder.mul(step, ir.Constant(step.type, i)))
                yield builder.bitcast(builder.gep(data, [offset]), vector.as_pointer())

        found = [builder.load(row, align=itemsize) for row in rows(0, array, values[1], values[2])]
        pairs = [ir.Constant(ir.VectorType(ir.IntType(32), side), mask) for mask in masks]
        for _ in range(side.bit_length() - 1):
            halves = zip(found[: side // 2], found[side // 2 :], strict=True)
            found = [builder.shuffle_vector(one, two, pair) for one, two in halves for pair in pairs]
        for value, row in zip(found, rows(3, out, values[4], values[5]), strict=True):
            builder.store(value, row, align=itemsize)
        return context.get_dummy_value()

    return types.void(array, start, stride, out, out_start, out_stride, levels), code


# ---- a strip: the blocks of some columns, side by side -------------------------------------------------------------
# Indices are unsigned, and loops over rows stand beside those over columns: numba then knows that an index does not
# count from the end, makes no array for each row, and the loops vectorise.


@inner
def _note(x, first, columns, levels, largest, rule, steps, scale, shift):
    size = np.uintp(largest.size)
    for i in range(size):
        largest[i] = 0
    for r in range(np.uintp(1 << len(levels))):
        row = np.uintp(first) + r * np.uintp(columns)
        for i in range(size):
            largest[i] = larger_stored(largest[i], x[row + i])
    return note_scales(largest, rule, steps, scale, shift)


@inner
def stepped_strip(x, first, columns, levels, shift, steps, values):
    size = np.uintp(shift.size)
    for r in range(np.uintp(1 << len(levels))):
        row, to = np.uintp(first) + r * np.uintp(columns), r * size
        for i in range(size):
            values[to + i] = stepped(x[row + i], shift[i], steps, values[to + i])


@inner
def divided_strip(x, first, columns, levels, scale, numbers, values):
    size = np.uintp(scale.size)
    for r in range(np.uintp(1 << len(levels))):
        row, to = np.uintp(first) + r * np.uintp(columns), r * size
        for i in range(size):
            values[to + i] = element(x[row + i], scale[i], numbers, None, None, None, i, values[to + i])


@inner
def transpose(values, levels, out, start, rows):
    block = 1 << len(levels)
    size = values.size // block
    side = min(block, 64 // values.itemsize)
    whole = size // side * side
    for c in range(0, whole, side):
        for r in range(0, block, side):
            _turn(values, r * size + c, size, out, start + c * rows + r, rows, levels)
    for c in range(whole, size):
        for r in range(block):
            out[start + c * rows + r] = values[r * size + c]


@inner
def _strips(x, columns, a, size, row, end, levels, rule, steps, out, numbers):
    """Round the columns from a on, `size` of them, of the rows from `row` to `end`."""
    block, rows = 1 << len(levels), x.size // columns
    largest, scale, shift = np.empty(size, x.dtype), np.empty(size, np.uint32), np.empty(size, np.uint32)
    values = np.empty(size * block, out.dtype)
    found = np.uint32(0)
    for r in range(row, end, block):
        first = r * columns + a
        noted = _note(x, first, columns, levels, largest, rule, steps, scale, shift)
        found |= noted
        if noted & FAR:
            divided_strip(x, first, columns, levels, scale, numbers, values)
        else:
            stepped_strip(x, first, columns, levels, shift, steps, values)
        transpose(values, levels, out, a * rows + r, rows)
    return found


@Kernel
def _power(x, columns, levels, rule, steps, found, out, numbers, width, tall):
    rows = x.size // columns
    pieces = (rows + tall - 1) // tall
    for part in numba.prange(found.size):
        a, row = part // pieces * width, part % pieces * tall
        size, end = min(width, columns - a), min(row + tall, rows)
        found[part] = _strips(x, columns, a, size, row, end, levels, rule, steps, out, numbers)
