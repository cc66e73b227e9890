"""Sums of products of some rows of a weight with some rows of an input, decoded as they are read: one loop in vectors.

The order of a sum is written down here and nowhere else: element k of a row goes to lane k % STEP, in order, and the
lanes are then added in halves. So it hangs on neither the processor, the threads, the number of rows nor how the
weight is stored.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from halfstep.kernels.cpu.element_codes import Decoding, half_of
from halfstep.kernels.cpu.lanes import WIDTHS, Lane, bits_of, vectorise_fully
from halfstep.kernels.cpu.runs import Run, spread


STEP = 32
"""Elements of a row that are read at a time."""
_SCALED = 16
"""Elements that share a scale at least."""


def _dots(
    context: Any, codes: Any, first: Any, stride: Any, meaning: Any, shifts: Any, mask: Any, scales: Any,
    x: Any, columns: Any, js: Any, ms: Any, out: Any,
) -> Any:  # fmt: skip
    """In kernels: out[j * len(ms) + m] = the sum of row j of the weight times row m of x; the largest of the codes,
    each & mask (0 without a mask).

    Args:
        codes: of the weight, flat: bytes with a `meaning`; without one, fp32, bf16 or fp16 values as `lanes.bits_of`
            takes them.
        first, stride: where the first row begins, and how far the rows are apart, in elements.
        meaning: the numbers of a `Decoding`, or the 16 values of a codebook, or None.
        shifts: the places of two codes in a byte (`packing.shifts`), or None for a code a byte.
        mask: the bits of a code without its sign, or None.
        scales: None, or (stored, table, row, across, down, right): what element k of row j is multiplied by stands at
            (row + j >> down) * across + (k >> right), and is looked up in the table where that is not None.
        x: float32, flat: rows of so many `columns`, a multiple of `STEP`.
        js, ms: tuples, as long as there are rows.
    """

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        vectorise_fully(builder.function)
        loop = _Loop(context, builder, signature.args, values)
        return loop.run(len(js), len(ms))

    arguments = (codes, first, stride, meaning, shifts, mask, scales, x, columns, js, ms, out)
    return types.uint8(*arguments), code


dots: Any = intrinsic(_dots)


class _Loop:
    """The code of one call, as it is written."""

    def __init__(self, context: Any, builder: Any, kinds: Any, values: Any) -> None:
        self.context, self.builder = context, builder
        (self.codes, self.first, self.stride, meaning, shifts, mask, scales, self.x, self.columns, _, _, self.out) = (
            zip(kinds, values, strict=True)
        )
        self.meaning = self._spread_all(meaning, STEP)
        self.shifts = self._spread_all(shifts, STEP // 2)
        self.mask = None if isinstance(mask[0], types.NoneType) else Run(builder, spread(builder, mask[1], STEP))
        self.scales = None if isinstance(scales[0], types.NoneType) else self._parts(scales)

    def _parts(self, given: Any) -> list[Any]:
        kinds, value = given
        return [(kind, self.builder.extract_value(value, i)) for i, kind in enumerate(kinds)]

    def _spread_all(self, given: Any, count: int) -> list[Lane] | None:
        if isinstance(given[0], types.NoneType):
            return None
        return [Run(self.builder, spread(self.builder, value, count), kind) for kind, value in self._parts(given)]

    def _number(self, number: int) -> Any:
        return ir.Constant(WIDTHS[64], number)

    def _at(self, array: Any, index: Any, count: int) -> Lane:
        """So many elements of an array from an index on."""
        kind, value = array
        data = self.context.make_array(kind)(self.context, self.builder, value).data
        place = self.builder.gep(data, [index])
        size = data.type.pointee.get_abi_size(self.context.target_data)
        pointer = self.builder.bitcast(place, ir.VectorType(data.type.pointee, count).as_pointer())
        return Run(self.builder, self.builder.load(pointer, align=size), kind.dtype)

    def _entry(self, array: Any, index: Any) -> Any:
        """One element of an array, alone."""
        return self.builder.extract_element(self._at(array, index, 1).value, ir.Constant(WIDTHS[32], 0))

    def run(self, js: int, ms: int) -> Any:
        builder = self.builder
        zeros = ir.Constant(ir.VectorType(ir.FloatType(), STEP), [0.0] * STEP)
        sums = [cgutils.alloca_once_value(builder, zeros) for _ in range(js * ms)]
        none = ir.Constant(ir.VectorType(WIDTHS[8], STEP), [0] * STEP)
        most = None if self.mask is None else cgutils.alloca_once_value(builder, none)
        steps = builder.udiv(self.columns[1], self._number(STEP))
        with cgutils.for_range(builder, steps, intp=WIDTHS[64]) as loop:
            k = builder.mul(loop.index, self._number(STEP))
            inputs = [self._at(self.x, self._row(k, self._number(0), self.columns[1], m), STEP) for m in range(ms)]
            for j in range(js):
                weight = self._weight(j, k, most)
                for m, x in enumerate(inputs):
                    total = sums[j * ms + m]
                    builder.store(weight.times_plus(x, Run(builder, builder.load(total))).value, total)
        out = self.context.make_array(self.out[0])(self.context, builder, self.out[1]).data
        for place, total in enumerate(sums):
            added = self._folded(builder.load(total), lambda one, other: one + other)
            builder.store(added, builder.gep(out, [self._number(place)]))
        if most is None:
            return ir.Constant(WIDTHS[8], 0)
        return self._folded(builder.load(most), lambda one, other: one.max(other))

    def _row(self, k: Any, first: Any, stride: Any, row: int) -> Any:
        """Where element k of a row is."""
        return self.builder.add(self.builder.add(first, self.builder.mul(stride, self._number(row))), k)

    def _weight(self, j: int, k: Any, most: Any) -> Any:
        """A run of row j: float32."""
        builder = self.builder
        codes = self._codes(self._row(k, self.first[1], self.stride[1], j))
        if self.meaning is None:
            return bits_of(codes).float()
        if most is not None:
            assert self.mask is not None
            builder.store(Run(builder, builder.load(most)).max(codes & self.mask).value, most)
        value = _decoded(codes, self.meaning)
        return value if self.scales is None else value * self._scale(j, k)

    def _codes(self, place: Any) -> Lane:
        if self.shifts is None:
            return self._at(self.codes, place, STEP)
        both = self._at(self.codes, self.builder.lshr(place, self._number(1)), STEP // 2)
        one, two = ((both >> shift) & 15 for shift in self.shifts)
        turns = [place for pair in range(STEP // 2) for place in (pair, pair + STEP // 2)]
        return Run(self.builder, self._shuffled(one.value, two.value, turns))

    def _scale(self, j: int, k: Any) -> Lane:
        """What a run of row j is multiplied by."""
        assert self.scales is not None
        builder = self.builder
        stored, table, *places = self.scales
        first, across, down, right = (place[1] for place in places)
        row = builder.mul(builder.lshr(builder.add(first, self._number(j)), down), across)
        found = []
        for ahead in range(0, STEP, _SCALED):
            tile = builder.add(row, builder.lshr(builder.add(k, self._number(ahead)), right))
            number = self._entry(stored, tile)
            if not isinstance(table[0], types.NoneType):
                number = self._entry(table, builder.zext(number, WIDTHS[64]))
            found.append(spread(builder, number, _SCALED))
        return Run(builder, self._shuffled(*found, list(range(STEP))))

    def _shuffled(self, one: Any, two: Any, places: list[int]) -> Any:
        return self.builder.shuffle_vector(one, two, ir.Constant(ir.VectorType(WIDTHS[32], len(places)), places))

    def _folded(self, whole: Any, join: Any) -> Any:
        """One number of all lanes, half after half."""
        while (count := whole.type.count) > 1:
            lower, upper = list(range(count // 2)), list(range(count // 2, count))
            halves = (Run(self.builder, self._shuffled(whole, whole, places)) for places in (lower, upper))
            whole = join(*halves).value
        return self.builder.extract_element(whole, ir.Constant(WIDTHS[32], 0))


def _decoded(codes: Lane, meaning: list[Lane]) -> Lane:
    """The values of codes, exactly, where no code is above `Decoding.half`."""
    if len(meaning) == len(Decoding._fields):
        d = Decoding(*meaning)
        return half_of(codes, d) * (d.offset + (15 << 23)).float()  # 2^(15 - bias)
    return _looked_up(codes, meaning)


_PERMUTED = 8
"""Numbers of a register that AVX2 has a permutation for, and so have all that came after it."""


def _looked_up(codes: Lane, values: list[Lane]) -> Lane:
    """values[code] of every lane, of 16. LLVM knows numbers that are taken from a register one by one for what they are
    together, a permutation, where the processor has an instruction for that."""
    builder = codes.builder
    ones = [builder.extract_element(value.value, ir.Constant(WIDTHS[32], 0)) for value in values]
    index = (codes & (_PERMUTED - 1)).to(32).value
    lower, upper = (_permuted(builder, _vector(builder, part), index) for part in (ones[:_PERMUTED], ones[_PERMUTED:]))
    return (codes < _PERMUTED).pick(Run(builder, lower), Run(builder, upper))


def _vector(builder: Any, numbers: list[Any]) -> Any:
    found = ir.Constant(ir.VectorType(numbers[0].type, len(numbers)), ir.Undefined)
    for place, number in enumerate(numbers):
        found = builder.insert_element(found, number, ir.Constant(WIDTHS[32], place))
    return found


def _permuted(builder: Any, table: Any, index: Any) -> Any:
    parts = []
    for start in range(0, index.type.count, table.type.count):
        places = [builder.extract_element(index, ir.Constant(WIDTHS[32], start + lane)) for lane in range(_PERMUTED)]
        parts.append(_vector(builder, [builder.extract_element(table, place) for place in places]))
    while len(parts) > 1:
        count = 2 * parts[0].type.count
        all_of = ir.Constant(ir.VectorType(WIDTHS[32], count), list(range(count)))
        parts = [builder.shuffle_vector(*pair, all_of) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
