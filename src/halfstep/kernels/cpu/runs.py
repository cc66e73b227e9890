"""Loops over elements, in lanes; and runs of lanes: what is done to many neighbours at a time, step by step.

A loop that is left to LLVM does one register after the other, and where every operation waits for the one before, so
does the processor. A run is several registers, whose operations stand side by side and are under way together.
"""

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from halfstep.kernels.cpu.compiled import inner, specialized, specialized_inlined
from halfstep.kernels.cpu.lanes import WIDTHS, Lane, intrinsic, trace, vectorise_fully


LONGEST = 128
"""Elements: of float32 numbers, eight of the widest registers that there are."""


# ---- loops -----------------------------------------------------------------------------------------------------------


def elementwise(body: Callable[..., Lane]) -> Any:
    """Make a function on lanes a loop that kernels call with (out, ...): what it gives for each element goes to `out`,
    for as many as that has and the first array among the arguments.

    Arrays among its arguments arrive as lanes of their elements, arrays in tuples too; other arguments as
    `lanes.lanes` has them. Where it names them it also gets `out`, the number that stands there now, and `index`, the
    element's place; and `like`, the numba type that it is to return.
    """
    body = getattr(body, "body", body)  # of one that is under `lanes.lanes`
    names = list(inspect.signature(body).parameters)

    def definition(typing: Any, out: Any, i: Any, arguments: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            vectorise_fully(builder.function)
            place = _spot(context, builder, out, values[0], values[1])
            given = {"index": Lane(builder, values[1], i), "like": out.dtype}
            if "out" in names:
                given["out"] = Lane(builder, builder.load(place), out.dtype)
            rest = iter(_elements(context, builder, arguments, values[2], values[1]))
            traced = {name: given[name] if name in given else next(rest) for name in names}
            builder.store(body(**traced).value, place)
            return context.get_dummy_value()

        return types.void(out, i, arguments), code

    element = intrinsic(definition)

    @inner
    def loop(out, *arguments):
        for i in range(_fewest(out, arguments)):
            element(out, i, arguments)

    return loop


def reduction(body: Callable[..., Lane]) -> Any:
    """Make a function on lanes a loop that kernels call with (total, array, ...): it is given the total so far and what
    else there is as `elementwise` has it, and returns the next total."""
    body = getattr(body, "body", body)

    def definition(typing: Any, total: Any, i: Any, arguments: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            vectorise_fully(builder.function)
            given = _elements(context, builder, arguments, values[2], values[1])
            return body(Lane(builder, values[0], total), *given).value

        return total(total, i, arguments), code

    element = intrinsic(definition)

    @inner
    def loop(total, *arguments):
        for i in range(arguments[0].size):
            total = element(total, i, arguments)
        return total

    return loop


@specialized_inlined
def _fewest(out, arguments):
    """In kernels: how many elements `out` has, or the first array among the arguments where it has fewer."""
    first = next((n for n, kind in enumerate(arguments) if isinstance(kind, types.Array)), None)
    if first is None:
        return lambda out, arguments: out.size
    return lambda out, arguments: min(out.size, arguments[first].size)


def _elements(context: Any, builder: Any, numba_type: Any, value: Any, i: Any) -> Any:
    """An element of an array, or of those in a tuple, as a lane; others as `lanes.lanes` has them."""
    if isinstance(numba_type, types.BaseTuple):
        parts: Any = numba_type
        return [_elements(context, builder, part, builder.extract_value(value, n), i) for n, part in enumerate(parts)]
    if not isinstance(numba_type, types.Array):
        return trace(builder, "", numba_type, value)
    return Lane(builder, builder.load(_spot(context, builder, numba_type, value, i)), numba_type.dtype)


def _spot(context: Any, builder: Any, array: Any, value: Any, i: Any) -> Any:
    return cgutils.get_item_pointer(context, builder, array, context.make_array(array)(context, builder, value), [i])


@elementwise
def add(out, other):
    """In kernels: float32 numbers plus others."""
    return out + other


@elementwise
def multiply(out, factor):
    """In kernels: float32 numbers times a number, or each times its own."""
    return out * factor


# ---- runs ------------------------------------------------------------------------------------------------------------


class Run(Lane):
    """As many lanes as its LLVM vector has elements."""

    def as_many(self, one: Any) -> Any:
        return ir.VectorType(one, self.type.count)

    def number(self, number: float) -> Any:
        return ir.Constant(self.type, [number] * self.type.count)

    def times_plus(self, other: Lane, more: Lane) -> Lane:
        kind, name = self.type, f"llvm.fma.v{self.type.count}f32"
        function = self.builder.module.globals.get(name)
        if function is None:
            function = ir.Function(self.builder.module, ir.FunctionType(kind, [kind] * 3), name)
        return self._new(self.builder.call(function, [self.value, other.value, more.value]))


def _length(levels: Any) -> int:
    return min(LONGEST, 1 << len(levels))


@specialized
def length(levels):
    """In kernels: how many elements of blocks of 2^len(levels) a run takes."""
    count = _length(levels)
    return lambda levels: count


def runs(body: Callable[..., Lane]) -> Any:
    """Make a function on lanes one that numba code calls with (out, start, levels, ...): it writes what it gives for
    the `length(levels)` elements from `start` on to `out`.

    Arrays among its arguments arrive as runs of their elements from `start` on, scalars as runs of one number, and
    tuples of scalars as lists of those; None stays None. The function that calls it should hold the loop, as for
    `lanes.lanes`.
    """
    names = list(inspect.signature(body).parameters)

    def definition(context: Any, out: Any, start: Any, levels: Any, *arguments: Any) -> Any:
        count = _length(levels)

        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            vectorise_fully(builder.function)
            traced = [
                _trace(context, builder, t, v, values[1], count) for t, v in zip(arguments, values[3:], strict=True)
            ]
            result = body(*traced).value
            builder.store(result, *_place(context, builder, out, values[0], values[1], count))
            return context.get_dummy_value()

        return types.void(out, start, levels, *arguments), code

    parameters = [
        inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for n in ["context", "out", "start", "levels", *(f"{name}_" for name in names)]
    ]
    definition.__signature__ = inspect.Signature(parameters)
    definition.__name__ = body.__name__
    definition.__doc__ = body.__doc__
    return intrinsic(definition)


def _trace(context: Any, builder: Any, numba_type: Any, value: Any, start: Any, count: int) -> Any:
    if isinstance(numba_type, types.NoneType):
        return None
    if isinstance(numba_type, types.BaseTuple):
        parts = list(numba_type)  # type: ignore[call-overload]
        return [
            _trace(context, builder, part, builder.extract_value(value, i), start, count)
            for i, part in enumerate(parts)
        ]
    if isinstance(numba_type, types.Array):
        place = _place(context, builder, numba_type, value, start, count)
        return Run(builder, builder.load(place[0], align=place[1]), numba_type.dtype)
    return Run(builder, spread(builder, value, count), numba_type)


def _place(context: Any, builder: Any, array: Any, value: Any, start: Any, count: int) -> tuple[Any, int]:
    """Where a run of an array is, and how it is aligned."""
    data = context.make_array(array)(context, builder, value).data
    element = data.type.pointee
    pointer = builder.bitcast(builder.gep(data, [start]), ir.VectorType(element, count).as_pointer())
    return pointer, element.get_abi_size(context.target_data)


def spread(builder: Any, value: Any, count: int) -> Any:
    vector = ir.VectorType(value.type, count)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(WIDTHS[32], 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(WIDTHS[32], count), None))


@intrinsic
def fill(context: Any, array: Any, start: Any, value: Any, levels: Any) -> Any:
    """In kernels: write `value` to 2^len(levels) elements from `start` on. LLVM would unroll a loop into scalars."""
    count = 1 << len(levels)

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer, align = _place(context, builder, array, values[0], values[1], count)
        builder.store(spread(builder, values[2], count), pointer, align=align)
        return context.get_dummy_value()

    return types.void(array, start, value, levels), code


@intrinsic
def widest_registers(context: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        vectorise_fully(builder.function)
        return context.get_dummy_value()

    return types.void(), code


"""In kernels: `vectorise_fully` for a function that has lanes only in what is inlined into it."""


# ---- squares transposed in registers ---------------------------------------------------------------------------------


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
