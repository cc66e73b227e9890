"""Sums of products of some rows of a weight with some rows of an input, decoded as they are read: one loop in vectors.

The order of a sum is written down here and nowhere else: element k of a row goes to lane k % STEP, in order, and the
lanes are then added in halves. So it depends on neither the processor, the threads, the number of rows nor how the
weight is stored.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from halfstep.kernels.cpu.lanes import WIDTHS, Lane, vectorise_fully
from halfstep.kernels.cpu.readers import (
    PAIRS,
    STEP,
    VALUES,
    Bytes,
    Nibbles,
    Numbers,
    Table,
    WholeNumbers,
    Words,
    reads_pairs,
    shuffled,
)
from halfstep.kernels.cpu.runs import Run, spread


def _dots(
    context: Any, codes: Any, first: Any, stride: Any, meaning: Any, mask: Any, scales: Any,
    x: Any, columns: Any, js: Any, ms: Any, out: Any,
) -> Any:  # fmt: skip
    """In kernels: out[j * len(ms) + m] = the sum of row j of the weight times row m of x; the largest of the codes,
    each & mask (0 without a mask).

    Args:
        codes: of the weight, flat: bytes with a `meaning`; without one, fp32, bf16 or fp16 values as `lanes.bits_of`
            takes them.
        first, stride: where the first row begins, and how far the rows are apart, in elements.
        meaning: of codes of 4 bits, two a byte, an array of their 16 values. Of others a tuple: an array of their 256
            or 65,536 float32 values, or of 256 bfloat16 ones; or, of a byte each, how many bits of exponent it has less
            than a float16, and 2^(15 - bias), what its value is over a float16's; or, of whole numbers in two's
            complement, a byte each, nothing. Or None.
        mask: the bits of a code without its sign, or None.
        scales: None, or (stored, table, row, across, down, rights): what element k of row j is multiplied by stands at
            (row + j >> down) * across + (k >> right), and is looked up in the table where that is not None. There are
            as many `rights` as scales in a step, 1 or 2, and all are the same.
        x: float32, flat: rows of so many `columns`, a multiple of `STEP`, as `in_pairs` leaves them.
        js, ms: tuples, as long as there are rows.
    """

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        vectorise_fully(builder.function)
        loop = _Loop(context, builder, signature.args, values)
        return loop.run(len(js), len(ms))

    arguments = (codes, first, stride, meaning, mask, scales, x, columns, js, ms, out)
    return types.uint8(*arguments), code


dots: Any = intrinsic(_dots)


class _Loop:
    """The code of one call, as it is written."""

    def __init__(self, context: Any, builder: Any, kinds: Any, values: Any) -> None:
        self.context, self.builder = context, builder
        self.codes, self.first, self.stride, meaning, mask, scales, self.x, self.columns, _, _, self.out = zip(
            kinds, values, strict=True
        )
        self.mask = None if isinstance(mask[0], types.NoneType) else Run(builder, spread(builder, mask[1], STEP))
        self.scales = None if isinstance(scales[0], types.NoneType) else self._parts(scales)
        self.meaning, self.read = meaning[0], self._reader(meaning)

    def _reader(self, meaning: Any) -> Any:
        """What decodes codes."""
        kind = meaning[0]
        if isinstance(kind, types.NoneType):
            return Numbers()
        if isinstance(kind, types.Array):
            return Nibbles(self._at(meaning, self._number(0), VALUES), 16 if _has(self.context, "avx512f") else 8)
        parts = self._parts(meaning)
        if len(parts) == 1:
            table = self._data(parts[0])
            return Words(table, _has(self.context, "avx512bw")) if reads_pairs(kind) else Table(table)
        numbers = [Run(self.builder, spread(self.builder, value, PAIRS)) for _, value in parts]
        return Bytes(*numbers) if numbers else WholeNumbers()

    def _parts(self, given: Any) -> list[Any]:
        kinds, value = given
        return [(kind, self.builder.extract_value(value, i)) for i, kind in enumerate(kinds)]

    def _number(self, number: int) -> Any:
        return ir.Constant(WIDTHS[64], number)

    def _at(self, array: Any, index: Any, count: int) -> Lane:
        """So many elements of an array from an index on."""
        data = self._data(array)
        place = self.builder.gep(data, [index])
        size = data.type.pointee.get_abi_size(self.context.target_data)
        pointer = self.builder.bitcast(place, ir.VectorType(data.type.pointee, count).as_pointer())
        return Run(self.builder, self.builder.load(pointer, align=size), array[0].dtype)

    def _data(self, array: Any) -> Any:
        """The address of an array's first element."""
        return self.context.make_array(array[0])(self.context, self.builder, array[1]).data

    def _entry(self, array: Any, index: Any) -> Any:
        """One element of an array, alone."""
        return self.builder.extract_element(self._at(array, index, 1).value, ir.Constant(WIDTHS[32], 0))

    def run(self, js: int, ms: int) -> Any:
        builder = self.builder
        none = ir.Constant(ir.VectorType(WIDTHS[8], STEP), [0] * STEP)
        most = None if self.mask is None else cgutils.alloca_once_value(builder, none)
        together = (
            js if _has(self.context, "avx512f") else 1
        )  # what more would be added to finds no room in 16 registers
        for j in range(0, js, together):
            self._sum(range(j, min(j + together, js)), ms, most)
        if most is None:
            return ir.Constant(WIDTHS[8], 0)
        return self._folded(builder.load(most), lambda one, other: one.max(other))

    def _sum(self, js: range, ms: int, most: Any) -> None:
        """The sums of some rows of the weight, side by side."""
        builder = self.builder
        zeros = ir.Constant(ir.VectorType(ir.FloatType(), STEP), [0.0] * STEP)
        sums = {(j, m): cgutils.alloca_once_value(builder, zeros) for j in js for m in range(ms)}
        steps = builder.udiv(self.columns[1], self._number(STEP))
        with cgutils.for_range(builder, steps, intp=WIDTHS[64]) as loop:
            tiles = self._tiles(loop.index)
            starts = [builder.mul(self.columns[1], self._number(m)) for m in range(ms)]
            inputs = [self._step(self.x, start, loop.index, STEP) for start in starts]
            for j in js:
                weight = self._weight(j, loop.index, tiles, most)
                for m, x in enumerate(inputs):
                    total = sums[j, m]
                    builder.store(weight.times_plus(x, Run(builder, builder.load(total))).value, total)
        out = self.context.make_array(self.out[0])(self.context, builder, self.out[1]).data
        for (j, m), total in sums.items():
            builder.store(self._total(builder.load(total)), builder.gep(out, [self._number(j * ms + m)]))

    def _step(self, array: Any, start: Any, step: Any, size: int) -> Lane:
        """A step of a row that starts there, of so many elements an array's."""
        return self._at(array, self.builder.add(start, self.builder.mul(step, self._number(size))), size)

    def _weight(self, j: int, step: Any, tiles: list[Any], most: Any) -> Any:
        """A step of row j: float32, in the order of `in_pairs`."""
        builder = self.builder
        start = builder.add(self.first[1], builder.mul(self.stride[1], self._number(j)))
        size = self.read.size
        codes = self._step(self.codes, builder.udiv(start, self._number(STEP // size)), step, size)
        if most is not None:
            assert self.mask is not None
            builder.store(Run(builder, builder.load(most)).max(codes & self.mask).value, most)
        return self.read.values(codes, [self._scale(j, tile) for tile in tiles])

    def _tiles(self, step: Any) -> list[Any]:
        """Which tiles of their rows a step is in."""
        if self.scales is None:
            return []
        builder = self.builder
        rights = [value for _, value in self._parts(self.scales[-1])]
        first = builder.mul(step, self._number(STEP))
        return [builder.lshr(builder.add(first, self._number(i * PAIRS)), right) for i, right in enumerate(rights)]

    def _scale(self, j: int, tile: Any) -> Any:
        """What elements of row j in a tile are multiplied by."""
        assert self.scales is not None
        builder = self.builder
        stored, table, *places, _ = self.scales
        first, across, down = (value for _, value in places)
        row = builder.mul(builder.lshr(builder.add(first, self._number(j)), down), across)
        number = self._entry(stored, builder.add(row, tile))
        return number if isinstance(table[0], types.NoneType) else self._entry(table, builder.zext(number, WIDTHS[64]))

    def _total(self, lanes: Any) -> Any:
        """The sum of all lanes, which are in the order of `in_pairs`."""
        if reads_pairs(self.meaning):
            lanes = shuffled(self.builder, lanes, lanes, [lane // 2 + lane % 2 * PAIRS for lane in range(STEP)])
        return self._folded(lanes, lambda one, other: one + other)

    def _folded(self, whole: Any, join: Any) -> Any:
        """One number of all lanes, half after half."""
        while (count := whole.type.count) > 1:
            lower, upper = list(range(count // 2)), list(range(count // 2, count))
            halves = (Run(self.builder, shuffled(self.builder, whole, whole, places)) for places in (lower, upper))
            whole = join(*halves).value
        return self.builder.extract_element(whole, ir.Constant(WIDTHS[32], 0))


def _has(context: Any, feature: str) -> bool:
    """Whether the processor has it: avx512f are 32 registers of 16 numbers, and a permutation of as many (of AVX2's, 16
    of 8); avx512bw are permutations of 16 bits."""
    return f"+{feature}" in context.codegen().magic_tuple()[2].split(",")
