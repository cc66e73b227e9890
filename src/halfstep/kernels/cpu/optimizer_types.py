"""Numba types of the optimizer's kernels: a rule, identified by its operations, and nested tuples of tensors."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import count
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import NativeValue, models, register_model, unbox
from numba.np.arrayobj import populate_array

from halfstep.kernels.arithmetic import Part
from halfstep.kernels.cpu.compiled import specialized_inlined
from halfstep.kernels.cpu.lanes import WIDTHS, Given, data_of, emitted, parts_of


# ---- rules -----------------------------------------------------------------------------------------------------------


class RuleType(types.Opaque):
    """The type of an update rule: kernels are compiled for its operations on one element."""

    element: Part


register_model(RuleType)(models.OpaqueModel)


# ---- tuples of moments -----------------------------------------------------------------------------------------------


@specialized_inlined
def zeros(moments):
    """In kernels: a tuple with the bits of 0 for each moment."""
    none = (np.uint32(0),) * len(moments)
    return lambda moments: none


@emitted(lambda tiles: types.boolean)
def readable(context: Any, builder: Any, tiles: Given) -> Any:
    """In kernels: whether no factor on the codes of these tiles is NaN."""
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
"""In kernels: a nested tuple with its arrays replaced by pointers."""


class LikeType(types.Opaque):
    """The type of a `Like`."""

    parts: Any
    """The tuple type of its rule and its parts."""


@dataclass(frozen=True)
class Like:
    """A rule, and the types of tensors and the scalars that kernels take: a nested tuple of arrays, scalars and None.

    Kernels are compiled for their types and given the address of the scalars. Unboxing arrays and scalars from Python
    objects one by one would be a quarter of what LLVM has to compile.
    """

    _numba_type_: LikeType
    numbers: Any
    """The scalars among the parts, in order, each padded to 8 bytes."""
    address: int


def like_type(element: Part, parts: tuple[Any, ...]) -> LikeType:
    """The type for a rule's operations on one element and such parts; numba needs a millisecond to compute it."""
    rule = RuleType(f"rule {sha256(repr(element).encode()).hexdigest()[:32]}")
    rule.element, found = element, types.Tuple.from_types([rule, *numba.typeof(parts)])
    like = LikeType(f"like {found}")
    like.parts = found
    return like


register_model(LikeType)(models.OpaqueModel)


@unbox(LikeType)
def _address(numba_type: Any, like: Any, c: Any) -> Any:
    number = c.pyapi.object_getattr_string(like, "address")
    address = c.pyapi.long_as_voidptr(number)
    c.pyapi.decref(number)
    return NativeValue(address)


@emitted(lambda like, rows, row: like.parts)
def placed(context: Any, builder: Any, like: Given, rows: Given, row: Given) -> Any:
    """In kernels: the rule and the parts of a `Like`, whose arrays have the addresses and sizes in a row of `rows`.
    They are not reference-counted."""
    numbers = context.make_array(rows.type)(context, builder, rows.value)
    columns = builder.extract_value(numbers.shape, 1)
    cells = builder.gep(numbers.data, [builder.mul(row.value, columns)])
    cell, slot = map(partial(_following, builder), (cells, builder.bitcast(like.value, cells.type)))
    return _placed(context, builder, like.type.parts, cell, slot)


def _following(builder: Any, first: Any) -> Iterator[Any]:
    """Pointers to an integer and to those after it."""
    return (builder.gep(first, [ir.Constant(WIDTHS[64], n)]) for n in count())


def _placed(context: Any, builder: Any, numba_type: Any, cells: Iterator[Any], slots: Iterator[Any]) -> Any:
    if isinstance(numba_type, types.Array):
        made = context.make_array(numba_type)(context, builder)
        item = ir.Constant(WIDTHS[64], context.get_abi_sizeof(context.get_data_type(numba_type.dtype)))
        place, size = (builder.load(next(cells)) for _ in range(2))
        data, shape = builder.inttoptr(place, made.data.type), cgutils.pack_array(builder, [size])
        populate_array(made, data, shape, cgutils.pack_array(builder, [item]), item, None)
        return made._getvalue()
    if isinstance(numba_type, types.BaseTuple):
        kinds: Any = numba_type
        parts = [_placed(context, builder, part, cells, slots) for part in kinds]
        return context.make_tuple(builder, numba_type, parts)
    if isinstance(numba_type, types.Number | types.Boolean):
        number = builder.bitcast(next(slots), context.get_data_type(numba_type).as_pointer())
        return context.unpack_value(builder, numba_type, number)
    return context.get_dummy_value()
