"""Squares of a matrix transposed in registers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from halfstep.kernels.cpu.compiled import inner
from halfstep.kernels.cpu.lanes import vectorise_fully


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


@inner
def transpose(values, levels, out, start, rows):
    """Write 2^len(levels) rows, which fill `values`, as columns of `out` from `start` on, each `rows` from the next."""
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
