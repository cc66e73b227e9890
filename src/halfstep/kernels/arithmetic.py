"""Formulas of one element: evaluated on torch tensors, or traced into programs that kernels are generated from.

A formula is a Python function that adds, multiplies, divides and compares, with the functions below. Called with
tensors it is the reference. Called with `Traced` values it gives a `Program`, which `kernels.cpu` emits as LLVM
instructions and `kernels.gpu` as Triton source. Scalars that all elements of a tensor share (a learning rate, a bias
correction) are float64, as Python floats are, and are rounded to float32 where they meet an element, as in torch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


# ---- functions of formulas -------------------------------------------------------------------------------------------


def root(x: Any) -> Any:
    """The square root of x, correctly rounded."""
    if isinstance(x, Traced):
        return x.trace.operation("sqrt", x)
    # Through float64: torch's float32 square root on CPUs is off by an ulp in 0.6 % of the elements of long tensors.
    return torch.sqrt(x.double()).to(x.dtype) if isinstance(x, Tensor) else math.sqrt(x)


def where(condition: Any, one: Any, other: Any) -> Any:
    """`one` where the condition holds, else `other`, elementwise; a Python condition selects one of the two."""
    if isinstance(condition, Traced):
        return condition.trace.operation("where", condition, one, other)
    if isinstance(condition, Tensor):
        return torch.where(condition, one, other)
    taken, left = (one, other) if condition else (other, one)
    return torch.full_like(left, taken) if isinstance(left, Tensor) and not isinstance(taken, Tensor) else taken


def is_nan(x: Any) -> Any:
    """Whether x is NaN, elementwise."""
    return x.trace.operation("is_nan", x) if isinstance(x, Traced) else x != x


def maximum(one: Any, other: Any) -> Any:
    """The larger of two values, elementwise; NaN where either is NaN."""
    return where(is_nan(one), one, where(one > other, one, other))


def norm(x: Any) -> Any:
    """The Euclidean norm of the whole tensor x, in float32: the square root of the float64 sum of its elements'
    squares.

    The order of summation depends on the number of elements alone. Squares are summed in blocks of `SQUARES`, the last
    one padded with zeros: the second half of a block is added to its first half until one value is left. The sums of
    the blocks are arranged in rows of `SQUARES`, padded alike: the rows are added up one after another, and the
    resulting row is halved as a block is. For a DTensor each rank sums its own shard, in torch's order.
    """
    if isinstance(x, Traced):
        return x.trace.norm(x)
    if hasattr(x, "device_mesh"):
        return torch.sqrt(x.double().square().sum()).to(x.dtype)
    total, *rest = _in_blocks(_pairwise_sum(_in_blocks(x.detach().flatten()).square_()))
    for one in rest:
        total = total + one
    return torch.sqrt(_pairwise_sum(total)).to(x.dtype)


SQUARES = 1024
"""The size of a block of squares that `norm` sums by itself: a power of two."""


def _in_blocks(numbers: Tensor) -> Tensor:
    blocks = numbers.new_zeros(max(-(-len(numbers) // SQUARES), 1) * SQUARES, dtype=torch.float64)
    blocks[: len(numbers)] = numbers
    return blocks.view(-1, SQUARES)


def _pairwise_sum(numbers: Tensor) -> Tensor:
    """The sum of each row, whose length is a power of two."""
    while (half := numbers.shape[-1] // 2) > 0:
        numbers = numbers[..., :half] + numbers[..., half:]
    return numbers[..., 0]


def double(x: Any) -> Any:
    """x, a scalar that all elements share, in float64."""
    if isinstance(x, Traced):
        return x.trace.converted(x, "double")
    return x.double() if isinstance(x, Tensor) else float(x)


def single(x: Any) -> Any:
    """x in float32."""
    if isinstance(x, Traced):
        return x.trace.converted(x, "single")
    return x.float() if isinstance(x, Tensor) else float(np.float32(x))


# ---- programs --------------------------------------------------------------------------------------------------------


class Operation(NamedTuple):
    """One operation of a `Part`."""

    name: str
    kind: str
    """The kind of the result: double, single or truth (a boolean)."""
    operands: tuple[int, ...]
    """Indices of inputs, constants or results of earlier operations."""


class Part(NamedTuple):
    """A list of operations. Values are indexed: first the inputs, then the constants, then one result per operation."""

    inputs: int
    constants: tuple[float, ...]
    operations: tuple[Operation, ...]
    results: tuple[int, ...]


NOTHING = Part(0, (), (), ())
"""A part without operations."""


class Program(NamedTuple):
    """A formula in parts: `scalars`, computed once per step and tensor, and `element`, computed for each element."""

    names: tuple[str, ...]
    """The names of the float64 scalars that `scalars` takes."""
    shared: tuple[str, ...]
    """Moments that are one float32 scalar per tensor."""
    moments: tuple[str, ...]
    """Moments with one value per element."""
    scalars: Part
    """From `names` and `shared` to the float32 scalars that `element` takes, then the new values of `shared`."""
    element: Part
    """From those scalars, norms, weight, gradient and `moments` to the new weight and moments, in float32."""
    normed: Part = NOTHING
    """From those scalars, weight, gradient and `moments` to the values whose norms `element` takes."""

    @property
    def taken(self) -> int:
        """How many scalars `element` takes, without the norms."""
        return len(self.scalars.results) - len(self.shared)

    def numbers(self, given: Sequence[float], shared: Sequence[float] = ()) -> tuple[tuple[Any, ...], ...]:
        """Evaluate `scalars` on the host: the float32 scalars that `element` takes in a step, and the new values of
        `shared`."""
        values: list[Any] = [*map(np.float64, given), *map(np.float32, shared), *self.scalars.constants]
        with np.errstate(all="ignore"):
            for name, _, indices in self.scalars.operations:
                operands = list(map(values.__getitem__, indices))
                values.append(operands[2 - bool(operands[0])] if name == "where" else _ON_HOST[name](*operands))
        found = tuple(map(values.__getitem__, self.scalars.results))
        return tuple(map(np.float32, found[: len(found) - len(self.shared)])), found[len(found) - len(self.shared) :]


_ON_HOST: Mapping[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "lt": operator.lt,
    "le": operator.le, "gt": operator.gt, "ge": operator.ge, "abs": operator.abs, "sqrt": np.sqrt, "is_nan": np.isnan,
    "single": np.float32, "double": np.float64,
}  # fmt: skip


# ---- tracing ---------------------------------------------------------------------------------------------------------


class Traced:
    """A symbolic value of a formula that is being traced."""

    def __init__(self, trace: Trace, index: int, kind: str, shared: bool) -> None:
        self.trace, self.index, self.kind, self.shared = trace, index, kind, shared

    def __bool__(self) -> bool:
        raise TypeError(
            "a formula branches on a value that is not known when kernels are compiled. Expected `where` of "
            "halfstep.kernels.arithmetic, or an option that is None, True or False"
        )

    def __float__(self) -> float:
        raise TypeError(
            "a formula converts a traced value to a Python float. Expected floats: convert options in `options`"
        )

    def __getattr__(self, name: str) -> Any:
        raise (AttributeError if name.startswith("__") else TypeError)(_unsupported(f".{name}"))

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        raise TypeError(_unsupported(f"torch's {function.__name__}"))

    def __neg__(self) -> Traced:
        return self.trace.operation("mul", self, -1.0)

    def __abs__(self) -> Traced:
        return self.trace.operation("abs", self)


def _operator(name: str, reflected: bool = False) -> Callable[[Traced, Any], Traced]:
    def apply(self: Traced, other: Any) -> Traced:
        return self.trace.operation(name, *((other, self) if reflected else (self, other)))

    return apply


def _unsupported(found: str) -> str:
    return (
        f"a formula uses {found}. Expected + - * / < <= > >=, abs, and root, where, maximum and is_nan of "
        "halfstep.kernels.arithmetic (x**2 is x * x; x == 0 is abs(x) <= 0), or a rule with an `update` of its own"
    )


def _refused(name: str) -> Callable[..., Any]:
    def apply(self: Traced, *_: Any) -> Any:
        raise TypeError(_unsupported(name))

    return apply


for _name in ("add", "sub", "mul", "truediv", "lt", "le", "gt", "ge"):
    setattr(Traced, f"__{_name}__", _operator("div" if _name == "truediv" else _name))
for _name in ("add", "sub", "mul", "truediv"):
    setattr(Traced, f"__r{_name}__", _operator("div" if _name == "truediv" else _name, reflected=True))
for _name in ("eq", "ne", "pow", "rpow", "mod", "floordiv", "and", "or", "xor", "invert"):
    setattr(Traced, f"__{_name}__", _refused(f"__{_name}__"))


_TRUTHS = {"lt", "le", "gt", "ge", "is_nan"}


class Trace:
    """The operations of a formula, recorded once each."""

    def __init__(self) -> None:
        self.values: list[tuple[Operation | float | None, bool]] = []
        """For each value: None for an input, a float for a constant, else its operation; and whether all elements share
        it."""
        self._made: dict[Any, int] = {}
        self.norms: dict[int, Traced] = {}
        """Norms by the index of the value that each is the norm of."""

    def given(self, kind: str, shared: bool) -> Traced:
        """A new input."""
        self.values.append((None, shared))
        return Traced(self, len(self.values) - 1, kind, shared)

    def operation(self, name: str, *operands: Any) -> Traced:
        """Record an operation, its operands converted to one kind: double if all are shared and double, else single."""
        traced = [o for o in operands if isinstance(o, Traced)]
        shared = all(o.shared for o in traced)
        numbers = [o for o in traced if o.kind != "truth"]
        wide = shared and all(o.kind == "double" for o in numbers) and bool(numbers or name == "where")
        kind = "double" if wide else "single"
        indices = [self._index(o, kind, shared) for o in operands]
        return self._new(Operation(name, "truth" if name in _TRUTHS else kind, tuple(indices)), shared)

    def norm(self, x: Traced) -> Traced:
        """The norm over the whole tensor of x, a value of elements: an input that is known only after a pass over the
        tensor."""
        if x.shared or x.kind != "single":
            raise TypeError("a formula takes the norm of a scalar that all elements share. Expected one per element")
        if x.index not in self.norms:
            self.norms[x.index] = self.given("single", False)
        return self.norms[x.index]

    def converted(self, x: Traced, kind: str) -> Traced:
        """x converted to another kind."""
        if not x.shared and kind == "double":
            raise TypeError("a formula takes an element to float64. Expected float32: only shared scalars are float64")
        return x if x.kind == kind else self._new(Operation(kind, kind, (x.index,)), x.shared)

    def _index(self, operand: Traced | float, kind: str, shared: bool) -> int:
        if not isinstance(operand, Traced):
            return self.constant(float(operand) if kind == "double" else float(np.float32(operand))).index
        if operand.kind != "truth":
            return self.converted(operand, kind).index
        if operand.shared and not shared:  # `element` takes shared values as float32 scalars, so as 1.0 or 0.0
            one, zero, half = (self.constant(number).index for number in (1.0, 0.0, 0.5))
            number = self._new(Operation("where", "single", (operand.index, one, zero)), True)
            return self._new(Operation("gt", "truth", (number.index, half)), False).index
        return operand.index

    def constant(self, number: float) -> Traced:
        """A constant; the same value for double and single."""
        return self._once((number, math.copysign(1.0, number)), number, "single", True)

    def _new(self, operation: Operation, shared: bool) -> Traced:
        return self._once(operation, operation, operation.kind, shared)

    def _once(self, key: Any, value: Operation | float, kind: str, shared: bool) -> Traced:
        index = self._made.get(key)
        if index is None:
            self.values.append((value, shared))
            index = self._made[key] = len(self.values) - 1
        return Traced(self, index, kind, shared)

    def part(self, inputs: Sequence[int], results: Sequence[int]) -> Part:
        """The operations that compute the values `results` from the values `inputs`, both as indices, without unused
        ones."""
        needed = set(results)
        for index in range(len(self.values) - 1, -1, -1):
            operation = self.values[index][0]
            if index in needed and index not in inputs and isinstance(operation, Operation):
                needed.update(operation.operands)
        between = [(index, self.values[index][0]) for index in sorted(needed - set(inputs))]
        if any(value is None for _, value in between):
            raise TypeError(
                "a formula takes a norm of a norm, or computes a scalar moment from elements. Expected norms of "
                "values of weight, gradient and moments, and scalar moments computed from options and scalar moments"
            )
        known = {index: value for index, value in between if isinstance(value, float)}
        made = {index: value for index, value in between if isinstance(value, Operation)}
        order = [*inputs, *known, *made]
        at = dict(zip(order, range(len(order)), strict=True))
        operations = [o._replace(operands=tuple(at[index] for index in o.operands)) for o in made.values()]
        return Part(len(inputs), tuple(known.values()), tuple(operations), tuple(at[index] for index in results))


def traced(
    formula: Callable[[Any, Any, dict[str, Any], dict[str, Any]], tuple[Any, dict[str, Any]]],
    names: Sequence[str],
    shared: Sequence[str],
    moments: Sequence[str],
    options: Mapping[str, Any],
) -> Program:
    """The program of a formula of weight, gradient, moments and options that returns the new weight and moments.

    Args:
        names: the options that are float64 scalars, not known when kernels are compiled.
        shared: the moments that are one scalar per tensor.
        options: the other options, constants of the compiled kernel.
    """
    trace = Trace()
    scalars = {name: trace.given("double", True) for name in names}
    kept = {name: trace.given("single", True) for name in shared}
    weight, grad = trace.given("single", False), trace.given("single", False)
    each = {name: trace.given("single", False) for name in moments}
    moved, new = formula(weight, grad, {**kept, **each}, {**options, **scalars})
    if new.keys() != kept.keys() | each.keys():
        raise TypeError(f"a formula gives the moments {sorted(new)}. Expected {sorted(kept.keys() | each.keys())}")
    results = [moved, *(new[name] for name in moments)]
    if any(not isinstance(one, Traced) or one.shared or one.kind != "single" for one in results):
        raise TypeError(
            "a formula returns scalars that all elements share. Expected a weight and moments with a value per element"
        )
    after = [trace.converted(new[name], "single") for name in shared]
    inputs = [one.index for one in (weight, grad, *each.values())]
    indices = [one.index for one in results]
    norms, normed = [one.index for one in trace.norms.values()], list(trace.norms)
    numbers = _scalars_read(trace, [*indices, *normed])
    first = [one.index for one in (*scalars.values(), *kept.values())]
    return Program(
        tuple(names), tuple(shared), tuple(moments),
        trace.part(first, [*numbers, *(one.index for one in after)]),
        trace.part([*numbers, *norms, *inputs], indices), trace.part([*numbers, *inputs], normed),
    )  # fmt: skip


def _scalars_read(trace: Trace, results: Sequence[int]) -> list[int]:
    """The indices of the shared values that per-element operations of `results` read."""
    needed, found = set(results), []
    for index in range(len(trace.values) - 1, -1, -1):
        operation, shared = trace.values[index]
        if index in needed and shared and not isinstance(operation, float):
            found.append(index)
        elif index in needed and isinstance(operation, Operation):
            needed.update(operation.operands)
    return found[::-1]
