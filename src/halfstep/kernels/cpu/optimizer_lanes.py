"""An optimizer step of one element, in lanes: read, updated by the rule's formula, rounded and written.

A tensor is an array or a raw pointer, which needs no reference counts. A moment is a tuple of one of three forms: of
floats, as kernels take it, with the array first and its residual or None last; of codes decoded by the chunk, only the
chunk's values; of codes decoded by the tile, (codes, their factor, how they are decoded, where the tile's values
begin).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llvmlite import ir
from numba import types

from halfstep.kernels.arithmetic import SQUARES, Part
from halfstep.kernels.cpu import element_codes
from halfstep.kernels.cpu.lanes import (
    INFINITY,
    MAGNITUDE,
    NAN,
    UPPER,
    Given,
    Lane,
    bits_of,
    data_of,
    emitted,
    parts_of,
    rounded_up_half,
    stored_as,
    trace,
)
from halfstep.kernels.cpu.masters import followed_master, followed_rest, joined
from halfstep.kernels.cpu.noise import noise


_OPERATIONS: Mapping[str, Callable[..., Lane]] = {
    "add": Lane.__add__, "sub": Lane.__sub__, "mul": Lane.__mul__, "div": Lane.__truediv__, "lt": Lane.__lt__,
    "le": Lane.__le__, "gt": Lane.__gt__, "ge": Lane.__ge__, "sqrt": Lane.sqrt, "is_nan": Lane.is_nan,
    "where": Lane.pick, "abs": lambda x: (x.bits() & MAGNITUDE).float(),
}  # fmt: skip


def moved(element: Part, given: Sequence[Lane]) -> list[Lane]:
    """The new weight and moments, from the step's scalars, weight, gradient and moments."""
    values = [*given, *map(given[-1].constant, element.constants)]
    for name, _, operands in element.operations:
        values.append(_OPERATIONS[name](*[values[place] for place in operands]))
    return [values[place] for place in element.results]


# ---- memory ----------------------------------------------------------------------------------------------------------


class Spot:
    """One element of an array, or at an offset from a raw pointer."""

    def __init__(self, context: Any, builder: Any, array: Given, index: Any) -> None:
        pointer = data_of(context, builder, array) if isinstance(array.type, types.Array) else array.value
        self.builder, self.stored, self.pointer = builder, array.type.dtype, builder.gep(pointer, [index])

    def read(self) -> Lane:
        """The element as stored."""
        return Lane(self.builder, self.builder.load(self.pointer), self.stored)

    def number(self) -> Lane:
        """The element's float32 value."""
        return bits_of(self.read()).float()

    def write(self, value: Lane) -> None:
        """Write a lane of the stored type."""
        self.builder.store(value.value, self.pointer)

    def keep(self, value: Lane) -> Lane:
        """Write a float32, rounded to nearest even; returns the value that was stored."""
        half = self.stored == types.uint16
        new = (rounded(value) >> 16).to(16) if half else stored_as(value.bits(), self.stored)
        self.write(new)
        return bits_of(Lane(self.builder, new.value, self.stored)).float()


class Moment:
    """A moment of one element: element k of its chunk or tile, i of the tensor."""

    def __init__(self, context: Any, builder: Any, moment: Given, tiles: Given, i: Any, k: Any) -> None:
        parts, self.rest, self.values = parts_of(builder, moment), None, None
        if len(parts) != 4:
            self.coded = len(parts) == 1
            self.place = Spot(context, builder, parts[0], k if self.coded else i)
            if not self.coded and not isinstance(parts[-1].type, types.NoneType):
                self.rest = Spot(context, builder, parts[-1], i)
            return
        self.coded, self.place = True, Spot(context, builder, parts[0], i)
        self.values = Spot(context, builder, tiles, builder.add(parts[3].value, k))
        self._looked_up = not isinstance(parts[2].type, types.BaseTuple)
        if not self._looked_up:
            self._times, self._decoding = (trace(builder, part) for part in parts[1:3])

    def read(self) -> Lane:
        """The value in float32."""
        if self.values is not None:
            if self._looked_up:
                return self.values.number()
            return element_codes.half_of(self.place.read(), element_codes.Decoding(*self._decoding)) * self._times
        number = self.place.number()
        return number if self.rest is None else number + self.rest.number()

    def keep(self, new: Lane) -> None:
        """Write the value, rounded; for codes, to the buffer of the tile's values."""
        if self.values is not None:
            self.values.write(new)
            return
        kept = self.place.keep(new)
        if self.rest is not None:
            self.rest.keep(new - kept)


# ---- rounding --------------------------------------------------------------------------------------------------------
# A NaN that arithmetic returns is quiet: its upper half alone is NaN too, so it is enough not to round it.


def rounded(value: Lane) -> Lane:
    """Bits whose upper half is the bfloat16 nearest to a float32."""
    bits = value.bits()
    return value.is_nan().pick(bits, rounded_up_half(bits))


def _nearest_bf16(value: Lane) -> Lane:
    return (rounded(value) & UPPER).float()


def _bf16(value: Lane) -> Lane:
    """The nearest bfloat16 to a sum or difference of two bfloat16. NaN needs no special case: it is one of theirs or
    the processor's own, whose lower half is zero, so rounding does not carry."""
    return (rounded_up_half(value.bits()) & UPPER).float()


def _stochastic(value: Lane, drawn: Lane) -> Lane:
    """A float32 rounded stochastically to bfloat16: 16 noise bits are added, then it is truncated. An infinity's lower
    bits are 0, so noise does not carry."""
    bits = value.bits()
    return (value.is_nan().pick(bits, bits + (drawn >> 16)) >> 16).to(16)


# ---- masters ---------------------------------------------------------------------------------------------------------


class Weight:
    """The weight of one element and what its master keeps, by `masters.KEPT`; None for tensors that it does not
    have."""

    def __init__(self, context: Any, builder: Any, weight: Given, kept: Given, i: Any) -> None:
        self._weight, spots = Spot(context, builder, weight, i), list[Any]()
        for part in parts_of(builder, kept):
            spots.append(None if isinstance(part.type, types.NoneType) else Spot(context, builder, part, i))
        self._master, low, self._compensation, self._residual, residue = spots
        self._low = low or residue

    def read(self) -> Lane:
        """The float32 weight that the rule updates."""
        weight = self._weight.read()
        self._high = bits_of(weight).float()
        full = self._high
        if self._master is not None:
            full = followed_master(weight, self._master.read())
        elif self._low is not None:
            both = joined(weight, self._low.read())
            full = both.is_nan().pick(full, both)
        elif self._residual is not None or self._compensation is not None:
            beside = self._residual or self._compensation
            assert beside is not None
            rest = Lane(weight.builder, followed_rest(weight, beside.read()).value, types.uint16)
            self._rest = bits_of(rest).float()
            full = full + self._rest if self._residual is not None else full
        self._full = full
        return full

    def keep(self, new: Lane, drawn: Lane | None) -> None:
        """Write the weight and what the master keeps, after the rule computed `new`."""
        if self._low is not None:  # the upper half is rounded with ties away; a NaN's payload must not carry
            bits = new.bits()
            if self._low.stored == types.uint8:  # 24 bits are kept, rounded to nearest even
                bits = bits + ((bits >> 8) & 1) + 0x7F
                self._low.write((bits >> 8).to(8))
            else:
                self._low.write(bits.to(16))
            self._weight.write((new.is_nan().pick(bits.constant(NAN), bits + 0x8000) >> 16).to(16))
        elif self._compensation is not None:
            rest = _bf16(self._rest + _nearest_bf16(new - self._full))
            grown = _bf16(self._full + rest)
            self._compensation.write(_half(_bf16(rest + _bf16(self._full - grown))))
            self._weight.write(_half(grown))
        elif self._residual is not None:
            wanted = _nearest_bf16(new - self._full)
            total = _bf16(self._high + wanted)
            rest = _bf16(self._rest + _bf16(wanted - _bf16(total - self._high)))
            grown = _bf16(total + rest)
            self._residual.write(_half(_bf16(rest - _bf16(grown - total))))
            self._weight.write(_half(grown))
        else:
            if self._master is not None:
                self._master.write(new)
            if drawn is None:
                self._weight.keep(new)
            else:
                self._weight.write(_stochastic(new, drawn))


def _half(value: Lane) -> Lane:
    return (value.bits() >> 16).to(16)


# ---- one element -----------------------------------------------------------------------------------------------------


class _Element:
    """One element of a step: its old and new moments, and their magnitudes; or the values whose norms are taken."""

    def __init__(
        self, context: Any, builder: Any, rule: Given, weight: Given, kept: Given, grad: Given, moments: Given,
        values: Given, numbers: Given, at: Given, k: Given,
    ) -> None:  # fmt: skip
        index = builder.add(at.value, k.value)
        self.moments = [Moment(context, builder, one, values, index, k.value) for one in parts_of(builder, moments)]
        self.weight = Weight(context, builder, weight, kept, index)
        scale, *taken = trace(builder, numbers)
        full, self._old = self.weight.read(), [moment.read() for moment in self.moments]
        times = Spot(context, builder, grad, index).number() * scale
        self.results, self._builder = moved(rule.type.element, [*taken, full, times, *self._old]), builder

    def then(self) -> list[Lane]:
        """The new moments. Where one that is stored as codes would be infinite or NaN, all keep their old values."""
        new = self.results[1:]
        most = self.results[0].bits().constant(0)
        for moment, value in zip(self.moments, new, strict=True):
            most = most.max(value.bits() & MAGNITUDE) if moment.coded else most
        if any(moment.coded for moment in self.moments):  # an infinity would spoil the scale of its block
            new = [most.below(INFINITY).pick(one, other) for one, other in zip(new, self._old, strict=True)]
        return new

    def most(self, then: Sequence[Lane], before: Given) -> list[Any]:
        """`before`, raised to the bits of the new moments' magnitudes."""
        parts = zip(then, parts_of(self._builder, before), strict=False)
        return [Lane(self._builder, part.value).max(new.bits() & MAGNITUDE).value for new, part in parts]


@emitted(lambda *kinds: kinds[-1], wide=True)
def advance(
    context: Any, builder: Any, rule: Given, weight: Given, kept: Given, grad: Given, moments: Given, values: Given,
    numbers: Given, keys: Given, begin: Given, at: Given, k: Given, most: Given,
) -> Any:  # fmt: skip
    """In kernels: step element at + k. `values` is the buffer of tiles; `begin` is where the chunk of `keys` begins.
    Returns `most`, raised to the bits of the new moments' magnitudes; () stays ()."""
    element = _Element(context, builder, rule, weight, kept, grad, moments, values, numbers, at, k)
    drawn = trace(builder, keys)
    if drawn is not None:  # in 32 bits, since LLVM computes 64-bit indices lane by lane
        passed = builder.sub(at.value, begin.value)
        drawn = noise(drawn, Lane(builder, k.value).to(32) + Lane(builder, passed).to(32))
    then = element.then()
    found = element.most(then, most)
    for moment, new in zip(element.moments, then, strict=True):
        moment.keep(new)
    element.weight.keep(element.results[0], drawn)
    return context.make_tuple(builder, most.type, found)


@emitted(lambda *kinds: kinds[-1], wide=True)
def foresee(
    context: Any, builder: Any, rule: Given, weight: Given, kept: Given, grad: Given, moments: Given, values: Given,
    numbers: Given, at: Given, k: Given, most: Given,
) -> Any:  # fmt: skip
    """In kernels: `advance` without writing anything."""
    element = _Element(context, builder, rule, weight, kept, grad, moments, values, numbers, at, k)
    return context.make_tuple(builder, most.type, element.most(element.then(), most))


@emitted(wide=True)
def note_results(
    context: Any, builder: Any, rule: Given, weight: Given, kept: Given, grad: Given, moments: Given, values: Given,
    numbers: Given, at: Given, k: Given, results: Given, place: Given,
) -> None:  # fmt: skip
    """In kernels: write the formula's results for element at + k to `results`, in rows of SQUARES, at index `place`."""
    element = _Element(context, builder, rule, weight, kept, grad, moments, values, numbers, at, k)
    for n, number in enumerate(element.results):
        index = builder.add(place.value, ir.Constant(place.value.type, n * SQUARES))
        Spot(context, builder, results, index).write(number)
