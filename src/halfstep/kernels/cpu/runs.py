"""Runs of lanes: what is done to many neighbours of an array at a time, each step of it written once for all of them.

A loop that is left to LLVM does one register after the other, and where every operation waits for the one before, so
does the processor. A run is several registers, whose operations stand side by side and are under way together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from halfstep.kernels.cpu.compiled import inner_overload
from halfstep.kernels.cpu.lanes import WIDTHS, Lane, vectorise_fully


LONGEST = 128
"""Elements: of float32 numbers, eight of the widest registers that there are."""


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


def length(levels: Any) -> Any:
    """In kernels: how many elements of blocks of 2^len(levels) a run takes."""
    raise NotImplementedError


@inner_overload(length)
def _length_overload(levels):
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


def _widest_registers(context: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        vectorise_fully(builder.function)
        return context.get_dummy_value()

    return types.void(), code


widest_registers: Any = intrinsic(_widest_registers)
"""In kernels: `vectorise_fully` for a function that has lanes only in what is inlined into it."""
