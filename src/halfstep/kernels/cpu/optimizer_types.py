"""The types of an optimizer's kernel: a rule, known by its operations, and the tuples that moments come in."""

from functools import cache
from hashlib import sha256
from itertools import count
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import impl_ret_borrowed
from numba.extending import NativeValue, models, register_model, unbox
from numba.np.arrayobj import populate_array

from halfstep.kernels.arithmetic import Part
from halfstep.kernels.cpu.compiled import specialized_inlined
from halfstep.kernels.cpu.lanes import WIDTHS, Given, data_of, emitted, parts_of


# ---- rules -----------------------------------------------------------------------------------------------------------


class RuleType(types.Opaque):
    """The type of a `Rule`: kernels are compiled for its operations."""

    def __init__(self, element: Part) -> None:
        self.element = element
        super().__init__(f"rule {sha256(repr(element).encode()).hexdigest()[:32]}")


class Rule:
    """The operations of an update rule on one element, as kernels are given them."""

    def __init__(self, element: Part) -> None:
        self._numba_type_ = RuleType(element)


@cache
def rule_of(element: Part) -> Rule:
    """The same one for the same operations."""
    return Rule(element)


register_model(RuleType)(models.OpaqueModel)


@unbox(RuleType)
def _unboxed(numba_type: Any, rule: Any, c: Any) -> Any:
    return NativeValue(c.context.get_dummy_value())


# ---- tuples of moments -----------------------------------------------------------------------------------------------


@specialized_inlined
def zeros(moments):
    """In kernels: for each moment the bits of 0."""
    none = (np.uint32(0),) * len(moments)
    return lambda moments: none


@emitted(lambda tiles: types.boolean)
def readable(context: Any, builder: Any, tiles: Given) -> Any:
    """In kernels: whether what the codes of all these tiles are multiplied by is no NaN."""
    found = ir.Constant(ir.IntType(1), 1)
    for tile in parts_of(builder, tiles):
        times = builder.extract_value(tile.value, 1)
        found = builder.and_(found, builder.fcmp_ordered("==", times, times))
    return found


def _bare_type(numba_type: Any) -> Any:
    if isinstance(numba_type, types.Array):
        return types.CPointer(numba_type.dtype)
    if isinstance(numba_type, types.BaseTuple):
        kinds: Any = numba_type
        return types.Tuple.from_types([_bare_type(part) for part in kinds])
    return numba_type


def _bare(context: Any, builder: Any, given: Given) -> Any:
    if isinstance(given.type, types.Array):
        return data_of(context, builder, given)
    if isinstance(given.type, types.BaseTuple):
        parts = [_bare(context, builder, part) for part in parts_of(builder, given)]
        return context.make_tuple(builder, _bare_type(given.type), parts)
    return given.value


bare = emitted(_bare_type)(_bare)
"""In kernels: a tuple, tuples within it too, with pointers in the place of arrays."""


@emitted(lambda like, rows, row: like)
def placed(context: Any, builder: Any, like: Given, rows: Given, row: Given) -> Any:
    """In kernels: a tuple like this one, tuples within it too, whose arrays lie where a row of `rows` says: the
    address and the size of each. What is written to them counts no references."""
    numbers = context.make_array(rows.type)(context, builder, rows.value)
    columns = builder.extract_value(numbers.shape, 1)
    cells = builder.gep(numbers.data, [builder.mul(row.value, columns)])
    found = count()

    def cell() -> Any:
        return builder.load(builder.gep(cells, [ir.Constant(WIDTHS[64], next(found))]))

    return _placed(context, builder, like, cell)


def _placed(context: Any, builder: Any, like: Given, cell: Any) -> Any:
    if isinstance(like.type, types.Array):
        made = context.make_array(like.type)(context, builder)
        item = ir.Constant(WIDTHS[64], context.get_abi_sizeof(context.get_data_type(like.type.dtype)))
        data, shape = builder.inttoptr(cell(), made.data.type), cgutils.pack_array(builder, [cell()])
        populate_array(made, data, shape, cgutils.pack_array(builder, [item]), item, None)
        return made._getvalue()
    if isinstance(like.type, types.BaseTuple):
        parts = [_placed(context, builder, part, cell) for part in parts_of(builder, like)]
        return context.make_tuple(builder, like.type, parts)
    return like.value


class Held(types.Type):
    """A tuple of tuples as one value: loops over chunks take no tuples with others inside."""

    def __init__(self, parts: Any) -> None:
        self.parts = parts
        super().__init__(f"held {parts}")


@register_model(Held)
class _HeldModel(models.StructModel):
    def __init__(self, manager: Any, numba_type: Held) -> None:
        super().__init__(manager, numba_type, [("parts", numba_type.parts)])


@emitted(Held)
def held(context: Any, builder: Any, parts: Given) -> Any:
    """In kernels: a tuple as one value."""
    struct = ir.Constant(context.get_value_type(Held(parts.type)), ir.Undefined)
    struct = builder.insert_value(struct, parts.value, 0)
    return impl_ret_borrowed(context, builder, Held(parts.type), struct)


@emitted(lambda held: held.parts)
def parts(context: Any, builder: Any, held: Given) -> Any:
    """In kernels: the tuple again."""
    return impl_ret_borrowed(context, builder, held.type.parts, builder.extract_value(held.value, 0))
