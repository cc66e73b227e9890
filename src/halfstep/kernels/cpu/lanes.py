"""Arithmetic on lanes: a kernel's work on one element, written in Python and traced into the loop that numba compiles.

numba widens uint16 and uint32 arithmetic to 64 bits, which takes four to eight times the vector instructions. A
function under `@lanes(...)` is called once, while numba compiles, with a `Lane` for every argument: `+`, `&`, `<<` and
the rest emit one instruction each, at the width of their operands. Only `plus_square` may be contracted or reordered:
all other float results are IEEE's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import extending, types
from numba.np.arrayobj import populate_array


intrinsic: Any = extending.intrinsic
"""`numba.extending.intrinsic`, whose type annotations wrongly say that decorated functions return nothing."""
WIDTHS = {8: ir.IntType(8), 16: ir.IntType(16), 32: ir.IntType(32), 64: ir.IntType(64)}
_FLOAT, _HALF = ir.FloatType(), ir.HalfType()


def _operator(integer: str | None, float_: str | None = None) -> Callable[[Lane, Lane | float], Lane]:
    """A method that emits one instruction, for integers or for floats."""

    def operation(self: Lane, other: Lane | float) -> Lane:
        name = float_ if self.is_float else integer
        assert name is not None, f"no {integer or float_} of {self.type}"
        return self._new(getattr(self.builder, name)(self.value, self._same(other)))

    return operation


def _comparison(sign: str) -> Callable[[Lane, Lane | float], Lane]:
    """A method that emits a comparison, whose result is a truth value."""

    def compare(self: Lane, other: Lane | float) -> Lane:
        compared = self.builder.fcmp_ordered if self.is_float else self.builder.icmp_unsigned
        return self._new(compared(sign, self.value, self._same(other)))

    return compare


class Lane:
    """An unsigned integer, a float32 or a truth value in a register. Integer operands must have equal widths.

    `stored` is the numba type of an argument, which distinguishes float16 from bfloat16; None for computed values.
    """

    def __init__(self, builder: ir.IRBuilder, value: Any, stored: Any = None) -> None:
        self.builder, self.value, self.stored = builder, value, stored

    @property
    def type(self) -> Any:
        """The LLVM type."""
        return self.value.type

    @property
    def is_float(self) -> bool:
        """Whether it is a float32."""
        return bool(self.type == self.as_many(_FLOAT))

    def as_many(self, one: Any) -> Any:
        """The LLVM type with as many elements of type `one` as this lane has."""
        return one

    def _new(self, value: Any) -> Lane:
        return type(self)(self.builder, value)

    def _same(self, other: Lane | float) -> Any:
        """The LLVM value of `other`; a Python number becomes a constant of this lane's type."""
        if isinstance(other, Lane):
            assert other.type == self.type, f"{other.type} and {self.type}: convert one of them"
            return other.value
        return self.number(other)

    def number(self, number: float) -> Any:
        """An LLVM constant of this lane's type."""
        return ir.Constant(self.type, number)

    def constant(self, number: float) -> Lane:
        """A constant of this lane's type."""
        return self._new(self._same(number))

    __add__, __sub__, __mul__ = _operator("add", "fadd"), _operator("sub", "fsub"), _operator("mul", "fmul")
    __truediv__ = _operator(None, "fdiv")
    __and__, __or__, __xor__ = _operator("and_"), _operator("or_"), _operator("xor")
    __lshift__, __rshift__ = _operator("shl"), _operator("lshr")
    shift_signed = _operator("ashr")
    """Shift right, copying the top bit."""
    __lt__, __le__, __gt__, __ge__ = map(_comparison, ("<", "<=", ">", ">="))
    equals = _comparison("==")
    """Equality, as a truth value (`==` keeps its Python meaning)."""

    def __invert__(self) -> Lane:
        return self._new(self.builder.not_(self.value))

    def sqrt(self) -> Lane:
        """The square root of a float, correctly rounded."""
        return self._new(self.builder.call(self.builder.module.declare_intrinsic("llvm.sqrt", [_FLOAT]), [self.value]))

    def plus_square(self, other: Lane) -> Lane:
        """This float plus another's square; a loop may sum in another order, vectorised, and fuse the
        multiplication."""
        square = self.builder.fmul(other.value, other.value, flags=("contract",))
        return self._new(self.builder.fadd(self.value, square, flags=("reassoc", "nsz", "contract")))

    def times_plus(self, other: Lane, more: Lane) -> Lane:
        """self * other + more, of floats, rounded once (FMA)."""
        return self._new(self.builder.fma(self.value, other.value, more.value))

    def below(self, other: Lane | int) -> Lane:
        """self < other, for integers without their top bit, as a signed comparison: AVX2 has no unsigned one."""
        return self._new(self.builder.icmp_signed("<", self.value, self._same(other)))

    def above(self, other: Lane | int) -> Lane:
        """self > other, for integers without their top bit, as `below`."""
        return self._new(self.builder.icmp_signed(">", self.value, self._same(other)))

    def is_nan(self) -> Lane:
        """Whether a float is NaN, as a truth value."""
        return self._new(self.builder.fcmp_unordered("uno", self.value, self.value))

    def pick(self, if_true: Lane, if_false: Lane | float) -> Lane:
        """`if_true` where this truth value holds, else `if_false`; both are computed."""
        return self._new(self.builder.select(self.value, if_true.value, if_true._same(if_false)))

    def min(self, other: Lane | float) -> Lane:
        """The smaller; for floats, `other` where either is NaN."""
        other = self._new(self._same(other))
        return (self < other).pick(self, other)

    def max(self, other: Lane | float) -> Lane:
        """The larger; for floats, `other` where either is NaN."""
        other = self._new(self._same(other))
        return (self > other).pick(self, other)

    def bits(self) -> Lane:
        """The 32 bits of a float."""
        return self._new(self.builder.bitcast(self.value, self.as_many(WIDTHS[32])))

    def float(self) -> Lane:
        """The float with these 32 bits."""
        return self._new(self.builder.bitcast(self.value, self.as_many(_FLOAT)))

    def to(self, width: int) -> Lane:
        """The same integer in another width; upper bits are dropped, or zero. A truth value becomes 0 or 1."""
        own = getattr(self.type, "element", self.type).width
        if own == width:
            return self
        convert = self.builder.trunc if width < own else self.builder.zext
        return self._new(convert(self.value, self.as_many(WIDTHS[width])))

    def value_as_float(self) -> Lane:
        """A 32-bit integer below 2^31 as a float: converted as signed, which every CPU can."""
        return self._new(self.builder.sitofp(self.value, self.as_many(_FLOAT)))

    def truncated(self) -> Lane:
        """A float in [0, 2^31) as a 32-bit integer, its fraction dropped."""
        return self._new(self.builder.fptosi(self.value, self.as_many(WIDTHS[32])))

    def truncated_wide(self) -> Lane:
        """A float in [0, 2^32) as a 32-bit integer, its fraction dropped."""
        return self._new(self.builder.fptoui(self.value, self.as_many(WIDTHS[32])))

    def half_to_float(self) -> Lane:
        """The float of 16 bits that are a float16."""
        return self._new(
            self.builder.fpext(self.builder.bitcast(self.value, self.as_many(_HALF)), self.as_many(_FLOAT))
        )

    def float_to_half(self) -> Lane:
        """The 16 bits of the nearest float16."""
        return self._new(
            self.builder.bitcast(self.builder.fptrunc(self.value, self.as_many(_HALF)), self.as_many(WIDTHS[16]))
        )


class Given(NamedTuple):
    """An argument of a function that emits LLVM code: its numba type and its LLVM value."""

    type: Any
    value: Any


def emitted(returned: Callable[..., Any] | None = None, wide: bool = False, count: int | None = None) -> Any:
    """Make `write(context, builder, *given)`, which emits LLVM code, callable from numba code with one argument per
    `Given`.

    Args:
        returned: from the arguments' numba types to the type of the LLVM value that `write` returns; None where it
            returns nothing.
        wide: whether the function that calls it is to be vectorised fully.
        count: the number of arguments, where `write` does not name them.
    """

    def decorate(write: Callable[..., Any]) -> Any:
        def definition(context: Any, *kinds: Any) -> Any:
            def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                if wide:
                    vectorise_fully(builder.function)
                found = write(context, builder, *map(Given, kinds, values))
                return context.get_dummy_value() if returned is None else found

            return (types.void if returned is None else returned(*kinds))(*kinds), code

        size = len(inspect.signature(write).parameters) - 2 if count is None else count
        parameters = [inspect.Parameter(f"a{n}", inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in range(size + 1)]
        definition.__signature__ = inspect.Signature(parameters)
        definition.__name__, definition.__doc__ = write.__name__, write.__doc__
        return intrinsic(definition)

    return decorate


def lanes(result: Any) -> Callable[[Callable[..., Lane]], Any]:
    """Make a function on lanes callable from numba code.

    Scalar arguments arrive as lanes, tuples as lists of lanes, None as None, and an argument named `like` as its numba
    type. `result` is the numba type of the return value, or the name of an argument that has the same type.

    The function that calls it is not inlined (see `vectorise_fully`), so it should contain the loop.
    """

    def decorate(body: Callable[..., Lane]) -> Any:
        names = list(inspect.signature(body).parameters)

        def returned(*kinds: Any) -> Any:
            kind = kinds[names.index(result)] if isinstance(result, str) else result
            return kind.literal_type if isinstance(kind, types.Literal) else kind

        def write(context: Any, builder: Any, *given: Given) -> Any:
            traced = [g.type if n == "like" else trace(builder, g) for n, g in zip(names, given, strict=True)]
            return body(*traced).value

        made = emitted(returned, wide=True, count=len(names))(write)
        made.body = body
        return made

    return decorate


def vectorise_fully(function: Any) -> None:
    """Let a function's loops use the widest registers: by default LLVM uses half of AVX-512, a third slower here.

    llvmlite knows only LLVM attributes without a value, so this one is added to its set directly. The function is not
    inlined, since it would lose the attribute: it works on a chunk, beside which a call costs nothing. One that is
    inlined everywhere (`compiled.inner_inlined`) has the attribute of its caller.
    """
    if "alwaysinline" not in function.attributes:
        function.attributes.add("noinline")
    set.add(function.attributes, '"prefer-vector-width"="512"')


def trace(builder: Any, given: Given, lane: Callable[[Given], Any] | None = None) -> Any:
    """An argument as lanes: a scalar as one lane, or as `lane` converts it; a tuple as a list, and None as None."""
    if isinstance(given.type, types.NoneType):
        return None
    if isinstance(given.type, types.BaseTuple):
        return [trace(builder, part, lane) for part in parts_of(builder, given)]
    return Lane(builder, given.value, given.type) if lane is None else lane(given)


def parts_of(builder: Any, given: Given) -> list[Given]:
    """The elements of a tuple argument."""
    return [Given(kind, builder.extract_value(given.value, n)) for n, kind in enumerate(given.type)]


def data_of(context: Any, builder: Any, array: Given) -> Any:
    """A pointer to an array's first element."""
    return context.make_array(array.type)(context, builder, array.value).data


def _viewed(dtype: Any) -> Any:
    @emitted(lambda array: array.copy(dtype=dtype))
    def view(context: Any, builder: Any, array: Given) -> Any:
        given = context.make_array(array.type)(context, builder, array.value)
        made = context.make_array(array.type.copy(dtype=dtype))(context, builder)
        data = builder.bitcast(given.data, made.data.type)
        populate_array(made, data, given.shape, given.strides, given.itemsize, given.meminfo, given.parent)
        context.nrt.incref(builder, array.type, array.value)
        return made._getvalue()

    return view


as_bits, as_floats = _viewed(types.uint32), _viewed(types.float32)
"""In kernels: an array of 32-bit elements viewed as uint32, and as float32. `array.view` takes a quarter second to
compile."""


# ---- what every kernel does at its ends --------------------------------------------------------------------------
# A tensor's dtype is encoded in its numpy type, as numpy has no bfloat16: float32 is itself or viewed as uint32,
# bfloat16 is viewed as uint16, float16 as int16.

SIGN, MAGNITUDE, INFINITY, NAN = 0x80000000, 0x7FFFFFFF, 0x7F800000, 0x7FC00000
UPPER = 0xFFFF0000


def bits_of(value: Lane) -> Lane:
    """The float32 bits of a stored float32, bfloat16 or float16."""
    if value.stored == types.uint16:
        return value.to(32) << 16
    if value.stored == types.int16:
        return value.half_to_float().bits()
    return value.bits() if value.stored == types.float32 else value


def stored_as(bits: Lane, stored: Any) -> Lane:
    """Float32 bits converted to the stored type, in which the value is exact; NaN stays NaN."""
    if stored == types.uint16:
        return (bits >> 16).to(16)
    if stored == types.int16:
        return bits.float().float_to_half()
    return bits.float() if stored == types.float32 else bits


def nearest_as(value: Lane, stored: Any) -> Lane:
    """A float32 rounded to nearest even in the stored type."""
    return nearest_bf16(value.bits()) if stored == types.uint16 else stored_as(value.bits(), stored)


def nearest_bf16(bits: Lane) -> Lane:
    """The 16 bits of the bfloat16 nearest to a float32, ties to even."""
    return bf16_of(bits, rounded_up_half(bits))


def rounded_up_half(bits: Lane) -> Lane:
    """Float32 bits plus a carry into the upper half where rounding that to nearest even goes up."""
    return bits + ((bits >> 16) & 1) + 0x7FFF


def bf16_of(bits: Lane, rounded: Lane) -> Lane:
    """The upper half of `rounded`, except that NaN stays NaN: adding to its payload could make it infinity."""
    nan = (bits & MAGNITUDE).above(INFINITY)
    return (nan.pick(bits | 0x400000, rounded) >> 16).to(16)
