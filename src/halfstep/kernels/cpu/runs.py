"""Loops over elements, in lanes; and runs: operations on many neighbouring elements at a time, step by step.

LLVM's own vectorised loop handles one register after the other, so where every operation depends on the one before, the
processor waits. A run is several registers, whose operations are interleaved and overlap in time.
"""

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from halfstep.kernels.cpu.compiled import inner, specialized, specialized_inlined
from halfstep.kernels.cpu.lanes import WIDTHS, Given, Lane, data_of, emitted, trace


LONGEST = 128
"""The most elements of a run: eight of the widest registers of float32."""


# ---- loops -----------------------------------------------------------------------------------------------------------


def elementwise(body: Callable[..., Lane]) -> Any:
    """Make a function on lanes a loop that kernels call with (out, ...): its result for each element is written to
    `out`, for as many elements as out and the first array among the arguments have.

    Array arguments arrive as lanes of their elements, arrays in tuples too; other arguments as in `lanes.lanes`. A
    parameter named `out` gets the current value of the output element, `index` the element's index, and `like` the
    numba type to return.
    """
    body = getattr(body, "body", body)  # the plain function of one decorated with `lanes.lanes`
    names = list(inspect.signature(body).parameters)

    @emitted(wide=True)
    def element(context: Any, builder: Any, out: Given, i: Given, arguments: Given) -> None:
        place = _spot(context, builder, out, i)
        given = {"index": Lane(builder, i.value, i.type), "like": out.type.dtype}
        if "out" in names:
            given["out"] = Lane(builder, builder.load(place), out.type.dtype)
        rest = iter(_elements(context, builder, arguments, i))
        traced = {name: given[name] if name in given else next(rest) for name in names}
        builder.store(body(**traced).value, place)

    @inner
    def loop(out, *arguments):
        for i in range(_fewest(out, arguments)):
            element(out, i, arguments)

    return loop


def reduction(body: Callable[..., Lane]) -> Any:
    """Make a function on lanes a loop that kernels call with (total, array, ...): for each element it gets the total so
    far, and the arguments as in `elementwise`, and returns the next total."""
    body = getattr(body, "body", body)

    @emitted(lambda total, i, arguments: total, wide=True)
    def element(context: Any, builder: Any, total: Given, i: Given, arguments: Given) -> Any:
        return body(Lane(builder, total.value, total.type), *_elements(context, builder, arguments, i)).value

    @inner
    def loop(total, *arguments):
        for i in range(arguments[0].size):
            total = element(total, i, arguments)
        return total

    return loop


@specialized_inlined
def _fewest(out, arguments):
    """In kernels: the number of elements of `out`, or of the first array among the arguments if that has fewer."""
    first = next((n for n, kind in enumerate(arguments) if isinstance(kind, types.Array)), None)
    if first is None:
        return lambda out, arguments: out.size
    return lambda out, arguments: min(out.size, arguments[first].size)


def _elements(context: Any, builder: Any, arguments: Given, i: Given) -> Any:
    """The element of an array, or of arrays in a tuple, as a lane; others as in `lanes.lanes`."""

    def lane(given: Given) -> Lane:
        if not isinstance(given.type, types.Array):
            return Lane(builder, given.value, given.type)
        return Lane(builder, builder.load(_spot(context, builder, given, i)), given.type.dtype)

    return trace(builder, arguments, lane)


def _spot(context: Any, builder: Any, array: Given, i: Given) -> Any:
    made = context.make_array(array.type)(context, builder, array.value)
    return cgutils.get_item_pointer(context, builder, array.type, made, [i.value])


@elementwise
def add(out, other):
    """In kernels: add float32 arrays in place."""
    return out + other


@elementwise
def multiply(out, factor):
    """In kernels: multiply a float32 array in place by a scalar or by another array."""
    return out * factor


# ---- runs ------------------------------------------------------------------------------------------------------------


class Run(Lane):
    """A vector of lanes: as many as its LLVM vector has elements."""

    def as_many(self, one: Any) -> Any:
        return ir.VectorType(one, self.type.count)

    def number(self, number: float) -> Any:
        return ir.Constant(self.type, [number] * self.type.count)

    def times_plus(self, other: Lane, more: Lane) -> Lane:
        function = declared(self.builder, f"llvm.fma.v{self.type.count}f32", *[self.type] * 4)
        return self._new(self.builder.call(function, [self.value, other.value, more.value]))


def declared(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """An LLVM intrinsic, declared in the module once."""
    found = builder.module.globals.get(name)
    return ir.Function(builder.module, ir.FunctionType(result, arguments), name) if found is None else found


def _length(levels: Any) -> int:
    return min(LONGEST, 1 << len(levels))


@specialized
def length(levels):
    """In kernels: the number of elements of a run, for blocks of 2^len(levels)."""
    count = _length(levels)
    return lambda levels: count


def runs(body: Callable[..., Lane]) -> Any:
    """Make a function on lanes callable from numba code with (out, start, levels, (...)): its results for the
    `length(levels)` elements from `start` on are written to `out`.

    Arguments are given as a tuple: arrays arrive as runs of their elements from `start` on, scalars as runs of one
    value, and tuples of scalars as lists of those; None stays None. The function that calls it should contain the loop,
    as for `lanes.lanes`.
    """

    @emitted(wide=True)
    def run(context: Any, builder: Any, out: Given, start: Given, levels: Given, arguments: Given) -> None:
        count = _length(levels.type)

        def lane(given: Given) -> Run:
            if not isinstance(given.type, types.Array):
                return Run(builder, spread(builder, given.value, count), given.type)
            pointer, align = place_of(context, builder, given, start.value, count)
            return Run(builder, builder.load(pointer, align=align), given.type.dtype)

        result = body(*trace(builder, arguments, lane)).value
        builder.store(result, *place_of(context, builder, out, start.value, count))

    return run


def place_of(context: Any, builder: Any, array: Given, start: Any, count: int) -> tuple[Any, int]:
    """A vector pointer to `count` elements of an array from `start` on, and its alignment."""
    data = data_of(context, builder, array)
    pointer = builder.bitcast(builder.gep(data, [start]), ir.VectorType(data.type.pointee, count).as_pointer())
    return pointer, data.type.pointee.get_abi_size(context.target_data)


def places_of(context: Any, builder: Any, array: Given, start: Given, stride: Given, rows: int, count: int) -> Any:
    """The same for `rows` runs that are `stride` apart."""
    for row in range(rows):
        offset = builder.mul(stride.value, ir.Constant(stride.value.type, row))
        yield place_of(context, builder, array, builder.add(start.value, offset), count)


def spread(builder: Any, value: Any, count: int) -> Any:
    """A vector with the same value in all lanes."""
    vector = ir.VectorType(value.type, count)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(WIDTHS[32], 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(WIDTHS[32], count), None))


@emitted()
def fill(context: Any, builder: Any, array: Given, start: Given, value: Given, levels: Given) -> None:
    """In kernels: write `value` to 2^len(levels) elements from `start` on. LLVM would unroll a loop into scalar
    stores."""
    count = 1 << len(levels.type)
    pointer, align = place_of(context, builder, array, start.value, count)
    builder.store(spread(builder, value.value, count), pointer, align=align)


@emitted(wide=True)
def widest_registers(context: Any, builder: Any) -> None:
    """In kernels: `vectorise_fully` for a function whose lanes are all in functions inlined into it."""


# ---- squares transposed in registers ---------------------------------------------------------------------------------


@emitted(wide=True)
def _turn(
    context: Any, builder: Any, array: Given, start: Given, stride: Given, out: Given, to: Given, out_stride: Given,
    levels: Given,
) -> None:  # fmt: skip
    """In kernels: write a square of `array`, whose rows are `stride` apart from `start` on, transposed to `out`.

    Its side is the number of lanes of a register, or the block's if that is less. Interleaving rows i and i + half
    rotates the bits of (row, lane); after as many rounds as either has bits, rows and lanes are exchanged.
    """
    side = min(1 << len(levels.type), 64 // (array.type.dtype.bitwidth // 8))
    masks = [[i // 2 + half + i % 2 * side for i in range(side)] for half in (0, side // 2)]
    rows = places_of(context, builder, array, start, stride, side, side)
    found = [builder.load(row, align=align) for row, align in rows]
    pairs = [ir.Constant(ir.VectorType(WIDTHS[32], side), mask) for mask in masks]
    for _ in range(side.bit_length() - 1):
        halves = zip(found[: side // 2], found[side // 2 :], strict=True)
        found = [builder.shuffle_vector(one, two, pair) for one, two in halves for pair in pairs]
    for value, row in zip(found, places_of(context, builder, out, to, out_stride, side, side), strict=True):
        builder.store(value, *row)


@inner
def transpose(values, levels, out, start, rows):
    """Write the 2^len(levels) rows that fill `values` as columns of `out` from `start` on, whose rows are `rows`
    long."""
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
