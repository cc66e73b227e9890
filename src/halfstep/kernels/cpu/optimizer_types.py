"""The types of an optimizer's kernel: a rule, known by its operations, and the tuples that moments come in."""

from functools import cache
from hashlib import sha256
from itertools import count
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import impl_ret_borrowed
from numba.extending import NativeValue, models, register_model, unbox
from numba.np.arrayobj import populate_array

from halfstep.kernels.arithmetic import Part
from halfstep.kernels.cpu.lanes import WIDTHS, intrinsic


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


@intrinsic
def zeros(typing: Any, moments: Any) -> Any:
    """In kernels: for each moment the bits of 0."""
    returned = types.UniTuple(types.uint32, len(moments))

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return context.make_tuple(builder, returned, [ir.Constant(WIDTHS[32], 0)] * len(moments))

    return returned(moments), code


@intrinsic
def nothing(typing: Any, *given: Any) -> Any:
    """In kernels: ()."""
    returned = types.Tuple(())

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return context.make_tuple(builder, returned, [])

    return returned(*given), code


@intrinsic
def readable(typing: Any, tiles: Any) -> Any:
    """In kernels: whether what the codes of all these tiles are multiplied by is no NaN."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        found = ir.Constant(ir.IntType(1), 1)
        for n in range(len(tiles)):
            times = builder.extract_value(builder.extract_value(values[0], n), 1)
            found = builder.and_(found, builder.fcmp_ordered("==", times, times))
        return found

    return types.boolean(tiles), code


@intrinsic
def bare(typing: Any, given: Any) -> Any:
    """In kernels: a tuple, tuples within it too, with pointers in the place of arrays."""
    returned = _bare_type(given)

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _bare(context, builder, given, values[0])

    return returned(given), code


def _bare_type(numba_type: Any) -> Any:
    if isinstance(numba_type, types.Array):
        return types.CPointer(numba_type.dtype)
    if isinstance(numba_type, types.BaseTuple):
        kinds: Any = numba_type
        return types.Tuple.from_types([_bare_type(part) for part in kinds])
    return numba_type


def _bare(context: Any, builder: Any, numba_type: Any, value: Any) -> Any:
    if isinstance(numba_type, types.Array):
        return context.make_array(numba_type)(context, builder, value).data
    if isinstance(numba_type, types.BaseTuple):
        kinds: Any = numba_type
        parts = [_bare(context, builder, part, builder.extract_value(value, n)) for n, part in enumerate(kinds)]
        return context.make_tuple(builder, _bare_type(numba_type), parts)
    return value


@intrinsic
def placed(typing: Any, like: Any, rows: Any, row: Any) -> Any:
    """In kernels: a tuple like this one, tuples within it too, whose arrays lie where a row of `rows` says: the
    address and the size of each. What is written to them counts no references."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        numbers = context.make_array(rows)(context, builder, values[1])
        columns = builder.extract_value(numbers.shape, 1)
        cells = builder.gep(numbers.data, [builder.mul(values[2], columns)])
        found = count()

        def cell() -> Any:
            return builder.load(builder.gep(cells, [ir.Constant(WIDTHS[64], next(found))]))

        return _placed(context, builder, like, values[0], cell)

    return like(like, rows, row), code


def _placed(context: Any, builder: Any, numba_type: Any, value: Any, cell: Any) -> Any:
    if isinstance(numba_type, types.Array):
        made = context.make_array(numba_type)(context, builder)
        item = ir.Constant(WIDTHS[64], context.get_abi_sizeof(context.get_data_type(numba_type.dtype)))
        data, shape = builder.inttoptr(cell(), made.data.type), cgutils.pack_array(builder, [cell()])
        populate_array(made, data, shape, cgutils.pack_array(builder, [item]), item, None)
        return made._getvalue()
    if isinstance(numba_type, types.BaseTuple):
        kinds: Any = numba_type
        parts = [_placed(context, builder, part, builder.extract_value(value, n), cell) for n, part in enumerate(kinds)]
        return context.make_tuple(builder, numba_type, parts)
    return value


class Held(types.Type):
    """A tuple of tuples as one value: loops over chunks take no tuples with others inside."""

    def __init__(self, parts: Any) -> None:
        self.parts = parts
        super().__init__(f"held {parts}")


@register_model(Held)
class _HeldModel(models.StructModel):
    def __init__(self, manager: Any, numba_type: Held) -> None:
        super().__init__(manager, numba_type, [("parts", numba_type.parts)])


@intrinsic
def held(typing: Any, parts: Any) -> Any:
    """In kernels: a tuple as one value."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        struct = ir.Constant(context.get_value_type(signature.return_type), ir.Undefined)
        struct = builder.insert_value(struct, values[0], 0)
        return impl_ret_borrowed(context, builder, signature.return_type, struct)

    return Held(parts)(parts), code


@intrinsic
def parts(typing: Any, held: Any) -> Any:
    """In kernels: the tuple again."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return impl_ret_borrowed(context, builder, held.parts, builder.extract_value(values[0], 0))

    return held.parts(held), code
