"""Dot products of rows of a weight with rows of an input, decoding the weight's codes on the fly, in one vector loop.

The order of summation is defined here and nowhere else: element k of a row is added to lane k % STEP, in order, and the
lanes are then added in halves. So it does not depend on the processor, the threads, the number of rows or how the
weight is stored.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from halfstep.kernels.cpu.compiled import inner, specialized
from halfstep.kernels.cpu.lanes import MAGNITUDE, UPPER, WIDTHS, Given, Lane, bits_of, data_of, emitted, parts_of
from halfstep.kernels.cpu.runs import Run, declared, place_of, spread


# ---- decoders of one step of a row -----------------------------------------------------------------------------------


STEP = 32
"""The number of elements of a row that are read at a time."""
PAIRS = STEP // 2
"""The number of neighbouring pairs in a step; also the smallest number of elements that share a scale."""
VALUES = 16
"""The number of values of a 4-bit format."""


def reads_pairs(meaning: Any) -> bool:
    """Whether codes with this `meaning`, a numba type (see `dots`), are decoded in the order of `in_pairs`."""
    if isinstance(meaning, types.BaseTuple) and len(meaning) == 1:
        table: Any = meaning
        return bool(table[0].dtype == types.uint16)
    return not isinstance(meaning, types.NoneType)


@inner
def _paired(x, first, out):
    for start in range(0, x.size, STEP):
        for i in range(PAIRS):
            out[start + i + first * PAIRS] = x[start + 2 * i]
            out[start + i + PAIRS - first * PAIRS] = x[start + 2 * i + 1]


@specialized
def in_pairs(x, meaning, first):
    """In kernels: x in the order in which `dots` decodes: in every step the first elements of all pairs, then the
    second ones; or the second ones first if `first` is 1, for codes whose first of two is in the upper bits of their
    byte."""
    if not reads_pairs(meaning):
        return lambda x, meaning, first: x

    def paired(x, meaning, first):
        out = np.empty_like(x)
        _paired(x, first, out)
        return out

    return paired


def shuffled(builder: Any, one: Any, two: Any, places: list[int]) -> Any:
    """The vector of these lanes of two vectors."""
    return builder.shuffle_vector(one, two, ir.Constant(ir.VectorType(WIDTHS[32], len(places)), places))


def _spread_scales(builder: Any, scales: list[Any], count: int) -> Run | None:
    """The scales as a vector of `count` lanes: those of a step, or of one half of its pairs."""
    parts = [spread(builder, scale, count // len(scales)) for scale in scales]
    if len(parts) < 2:
        return Run(builder, parts[0]) if parts else None
    return Run(builder, shuffled(builder, *parts, list(range(count))))


class Numbers:
    """Reads 32- or 16-bit floats, in order."""

    size = STEP
    """Array elements per step."""

    def values(self, codes: Lane, scales: list[Any]) -> Lane:
        numbers, scale = self.unscaled(codes), _spread_scales(codes.builder, scales, STEP)
        return numbers if scale is None else numbers * scale

    def unscaled(self, codes: Lane) -> Lane:
        return bits_of(codes).float()


class Table(Numbers):
    """Reads 8- or 16-bit codes, in order, whose values are in a table in memory."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def unscaled(self, codes: Lane) -> Lane:
        return _gathered(self.table, codes)


def _gathered(table: Any, codes: Lane) -> Run:
    """The elements of a table in memory at these indices."""
    builder, element = codes.builder, table.type.pointee
    first = Run(builder, spread(builder, builder.ptrtoint(table, WIDTHS[64]), STEP))
    size = 4 if element == ir.FloatType() else 2
    places = (first + (codes.to(64) << (size // 2))).value
    pointers, every, elements = (ir.VectorType(kind, STEP) for kind in (table.type, ir.IntType(1), element))
    name = f"llvm.masked.gather.v{STEP}{'f' if size == 4 else 'i'}{8 * size}.v{STEP}p0"
    function = declared(builder, name, elements, pointers, WIDTHS[32], every, elements)
    rest = ir.Constant(WIDTHS[32], size), ir.Constant(every, [1] * STEP), ir.Constant(elements, ir.Undefined)
    return Run(builder, builder.call(function, [builder.inttoptr(places, pointers), *rest]))


class _Pairs:
    """Reads codes whose pairs are split: the first elements, then the second ones."""

    size = STEP

    def values(self, codes: Lane, scales: list[Any]) -> Lane:
        one, two = self.halves(codes, scales, _spread_scales(codes.builder, scales, PAIRS))
        return Run(codes.builder, shuffled(codes.builder, one.value, two.value, list(range(STEP))))

    def halves(self, codes: Lane, scales: list[Any], scale: Run | None) -> list[Lane]:
        raise NotImplementedError


class Bytes(_Pairs):
    """Reads 8-bit codes that, shifted, are the upper bits of a float16, apart from its larger exponent range. The
    second of a pair is in place in 16 bits already; the first is shifted there."""

    def __init__(self, fewer: Run, unit: Run) -> None:
        self.fewer, self.unit = fewer, unit
        self.kept = fewer.constant(0x7F00) >> fewer | 0x8000

    def halves(self, codes: Lane, scales: list[Any], scale: Run | None) -> list[Lane]:
        times = self.unit if scale is None else self.unit * scale
        return [(each.shift_signed(self.fewer) & self.kept).half_to_float() * times for each in _at_top(codes)]


class WholeNumbers(_Pairs):
    """Reads 8-bit integers in two's complement."""

    def halves(self, codes: Lane, scales: list[Any], scale: Run | None) -> list[Lane]:
        numbers = [each.shift_signed(8).value_as_float() for each in _at_top(codes)]
        return numbers if scale is None else [number * scale for number in numbers]


class Words(_Pairs):
    """Reads 8-bit codes whose values fit bfloat16: looked up by register permutations if the processor `permutes`
    16-bit lanes, else from a table in memory."""

    def __init__(self, table: Any, permutes: bool) -> None:
        self.table, self.permutes = table, permutes

    def halves(self, codes: Lane, scales: list[Any], scale: Run | None) -> list[Lane]:
        words = self._permuted(codes.to(16)) if self.permutes else _gathered(self.table, codes)
        pairs = Run(codes.builder, codes.builder.bitcast(words.value, ir.VectorType(WIDTHS[32], PAIRS)))
        numbers = [(pairs << 16).float(), (pairs & UPPER).float()]
        return numbers if scale is None else [number * scale for number in numbers]

    def _permuted(self, index: Lane) -> Lane:
        builder, kind = index.builder, index.type
        function = declared(builder, "llvm.x86.avx512.vpermi2var.hi.512", kind, kind, kind, kind)
        found: list[Lane] = []
        for start in range(0, 256, 2 * STEP):
            places = (builder.gep(self.table, [ir.Constant(WIDTHS[64], at)]) for at in (start, start + STEP))
            one, two = (builder.load(builder.bitcast(place, kind.as_pointer()), align=2) for place in places)
            found.append(Run(builder, builder.call(function, [one, index.value, two])))
        for bit in (64, 128):
            below = (index & bit).equals(0)
            found = [below.pick(*pair) for pair in zip(found[::2], found[1::2], strict=True)]
        return found[0]


def _at_top(codes: Lane) -> tuple[Lane, Lane]:
    """The first and the second byte of each pair, in the upper half of 16 bits; the second keeps the first below it."""
    pairs = Run(codes.builder, codes.builder.bitcast(codes.value, ir.VectorType(WIDTHS[16], PAIRS)))
    return pairs << 8, pairs


class Nibbles(_Pairs):
    """Reads 4-bit codes, whose values are looked up by register permutations in tables of `at_once` values."""

    size = PAIRS

    def __init__(self, table: Lane, at_once: int) -> None:
        self.builder, self.table, self.at_once = table.builder, table, at_once

    def halves(self, codes: Lane, scales: list[Any], scale: Run | None) -> list[Lane]:
        wide = codes.to(32)
        halves = wide & 15, wide >> 4
        if scale is None:
            return [self._looked_up(self.table, half) for half in halves]
        if len(scales) == 1:  # the same values with fewer multiplications
            return [self._looked_up(self.table * scale, half) for half in halves]
        return [self._looked_up(self.table, half) * scale for half in halves]

    def _looked_up(self, table: Lane, codes: Lane) -> Lane:
        count = self.at_once
        parts = [
            shuffled(self.builder, table.value, table.value, list(range(start, start + count)))
            for start in range(0, VALUES, count)
        ]
        found = [Run(self.builder, self._permuted(part, (codes & (count - 1)).value)) for part in parts]
        return found[0] if len(found) == 1 else (codes << 28 > MAGNITUDE).pick(*found[::-1])

    def _permuted(self, table: Any, index: Any) -> Any:
        """table[index]: lanes extracted one by one, which LLVM turns into one permutation where the processor has
        it."""
        builder, count = self.builder, table.type.count
        parts = []
        for start in range(0, PAIRS, count):
            part = ir.Constant(table.type, ir.Undefined)
            for lane in range(count):
                place = builder.extract_element(index, ir.Constant(WIDTHS[32], start + lane))
                number = builder.extract_element(table, place)
                part = builder.insert_element(part, number, ir.Constant(WIDTHS[32], lane))
            parts.append(part)
        return parts[0] if len(parts) == 1 else shuffled(builder, *parts, list(range(PAIRS)))


@emitted(lambda *kinds: types.uint8, wide=True)
def dots(
    context: Any, builder: Any, codes: Given, first: Given, stride: Given, meaning: Given, mask: Given, scales: Given,
    x: Given, columns: Given, js: Given, ms: Given, out: Given,
) -> Any:  # fmt: skip
    """In kernels: out[j * len(ms) + m] = dot product of row j of the weight and row m of x. Returns the largest code &
    mask (0 without a mask).

    Args:
        codes: of the weight, flat: bytes with a `meaning`; without one, fp32, bf16 or fp16 values as `lanes.bits_of`
            takes them.
        first, stride: where the first row begins, and the distance between rows, in elements.
        meaning: for 4-bit codes, two per byte, an array of their 16 values. Else a tuple: an array of the 256 or 65,536
            float32 values, or of 256 bfloat16 values; or, for one-byte floats, how many exponent bits fewer than
            float16 they have, and 2^(15 - bias), the factor on float16's value; or, for int8, nothing. None: no codes.
        mask: the bits of a code without its sign, or None.
        scales: None, or (stored, table, row, across, down, rights): the scale of element k of row j is stored at (row +
            j >> down) * across + (k >> right), and is looked up in the table if that is not None. `rights` has one
            entry per scale in a step, 1 or 2, all equal.
        x: float32, flat: rows of `columns` elements, a multiple of `STEP`, in the order of `in_pairs`.
        js, ms: tuples whose lengths are the numbers of rows.
    """
    loop = _Loop(context, builder, codes, first, stride, meaning, mask, scales, x, columns, out)
    return loop.run(len(js.type), len(ms.type))


class _Loop:
    """Generates the code of one call of `dots`."""

    def __init__(
        self, context: Any, builder: Any, codes: Given, first: Given, stride: Given, meaning: Given, mask: Given,
        scales: Given, x: Given, columns: Given, out: Given,
    ) -> None:  # fmt: skip
        self.context, self.builder = context, builder
        self.codes, self.first, self.stride, self.x, self.columns, self.out = codes, first, stride, x, columns, out
        self.mask = None if isinstance(mask[0], types.NoneType) else Run(builder, spread(builder, mask[1], STEP))
        self.scales = None if isinstance(scales[0], types.NoneType) else parts_of(builder, scales)
        self.meaning, self.read = meaning[0], self._reader(meaning)

    def _reader(self, meaning: Any) -> Any:
        """The decoder for codes with this meaning."""
        kind = meaning[0]
        if isinstance(kind, types.NoneType):
            return Numbers()
        if isinstance(kind, types.Array):
            return Nibbles(self._at(meaning, self._number(0), VALUES), 16 if _has(self.context, "avx512f") else 8)
        parts = parts_of(self.builder, meaning)
        if len(parts) == 1:
            table = data_of(self.context, self.builder, parts[0])
            return Words(table, _has(self.context, "avx512bw")) if reads_pairs(kind) else Table(table)
        numbers = [Run(self.builder, spread(self.builder, value, PAIRS)) for _, value in parts]
        return Bytes(*numbers) if numbers else WholeNumbers()

    def _number(self, number: int) -> Any:
        return ir.Constant(WIDTHS[64], number)

    def _at(self, array: Any, index: Any, count: int) -> Lane:
        """`count` elements of an array from an index on."""
        pointer, align = place_of(self.context, self.builder, array, index, count)
        return Run(self.builder, self.builder.load(pointer, align=align), array[0].dtype)

    def _entry(self, array: Any, index: Any) -> Any:
        """One element of an array, as a scalar."""
        return self.builder.extract_element(self._at(array, index, 1).value, ir.Constant(WIDTHS[32], 0))

    def run(self, js: int, ms: int) -> Any:
        builder = self.builder
        none = ir.Constant(ir.VectorType(WIDTHS[8], STEP), [0] * STEP)
        most = None if self.mask is None else cgutils.alloca_once_value(builder, none)
        together = (
            js if _has(self.context, "avx512f") else 1
        )  # without AVX-512 more accumulators do not fit in the 16 registers
        for j in range(0, js, together):
            self._sum(range(j, min(j + together, js)), ms, most)
        if most is None:
            return ir.Constant(WIDTHS[8], 0)
        return self._folded(builder.load(most), lambda one, other: one.max(other))

    def _sum(self, js: range, ms: int, most: Any) -> None:
        """Compute the dot products of some rows of the weight side by side."""
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
        out = data_of(self.context, builder, self.out)
        for (j, m), total in sums.items():
            builder.store(self._total(builder.load(total)), builder.gep(out, [self._number(j * ms + m)]))

    def _step(self, array: Any, start: Any, step: Any, size: int) -> Lane:
        """Step number `step` of a row that begins at `start`: `size` array elements."""
        return self._at(array, self.builder.add(start, self.builder.mul(step, self._number(size))), size)

    def _weight(self, j: int, step: Any, tiles: list[Any], most: Any) -> Any:
        """A step of row j, decoded: float32, in the order of `in_pairs`."""
        builder = self.builder
        start = builder.add(self.first[1], builder.mul(self.stride[1], self._number(j)))
        size = self.read.size
        codes = self._step(self.codes, builder.udiv(start, self._number(STEP // size)), step, size)
        if most is not None:
            assert self.mask is not None
            builder.store(Run(builder, builder.load(most)).max(codes & self.mask).value, most)
        return self.read.values(codes, [self._scale(j, tile) for tile in tiles])

    def _tiles(self, step: Any) -> list[Any]:
        """The tile indices of a step within its row."""
        if self.scales is None:
            return []
        builder = self.builder
        rights = [value for _, value in parts_of(builder, self.scales[-1])]
        first = builder.mul(step, self._number(STEP))
        return [builder.lshr(builder.add(first, self._number(i * PAIRS)), right) for i, right in enumerate(rights)]

    def _scale(self, j: int, tile: Any) -> Any:
        """The scale of row j's elements in a tile."""
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
        """All lanes joined into one scalar, half with half."""
        while (count := whole.type.count) > 1:
            lower, upper = list(range(count // 2)), list(range(count // 2, count))
            halves = (Run(self.builder, shuffled(self.builder, whole, whole, places)) for places in (lower, upper))
            whole = join(*halves).value
        return self.builder.extract_element(whole, ir.Constant(WIDTHS[32], 0))


def _has(context: Any, feature: str) -> bool:
    """Whether the processor has a feature: avx512f has 32 registers of 16 floats, and permutes 16 (AVX2: 16 registers
    of 8); avx512bw permutes 16-bit lanes."""
    return f"+{feature}" in context.codegen().magic_tuple()[2].split(",")
