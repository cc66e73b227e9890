"""What reads a step of a row of a weight into float32 lanes: arithmetic or permutations of registers, or a table."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from halfstep.kernels.cpu.compiled import inner, specialized
from halfstep.kernels.cpu.lanes import MAGNITUDE, UPPER, WIDTHS, Lane, bits_of
from halfstep.kernels.cpu.runs import Run, spread


STEP = 32
"""Elements of a row that are read at a time."""
PAIRS = STEP // 2
"""Of neighbours in a step; and elements that share a scale at least."""
VALUES = 16
"""Of 4 bits."""


def reads_pairs(meaning: Any) -> bool:
    """Whether codes of a meaning, a numba type (`dots`), are read in the order of `in_pairs`."""
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
    """In kernels: x as `dots` takes it: in every step the first of each pair, then the second; or the other way round,
    where `first` is 1, as the first of two codes lies in the upper bits of their byte."""
    if not reads_pairs(meaning):
        return lambda x, meaning, first: x

    def paired(x, meaning, first):
        out = np.empty_like(x)
        _paired(x, first, out)
        return out

    return paired


def shuffled(builder: Any, one: Any, two: Any, places: list[int]) -> Any:
    """Lanes of two vectors."""
    return builder.shuffle_vector(one, two, ir.Constant(ir.VectorType(WIDTHS[32], len(places)), places))


def _spread_scales(builder: Any, scales: list[Any], count: int) -> Run | None:
    """What so many lanes, those of a step or of either half of its pairs, are multiplied by."""
    parts = [spread(builder, scale, count // len(scales)) for scale in scales]
    if len(parts) < 2:
        return Run(builder, parts[0]) if parts else None
    return Run(builder, shuffled(builder, *parts, list(range(count))))


class Numbers:
    """Values in 32 or 16 bits, in order."""

    size = STEP
    """Elements of the array in a step."""

    def values(self, codes: Lane, scales: list[Any]) -> Lane:
        numbers, scale = self.unscaled(codes), _spread_scales(codes.builder, scales, STEP)
        return numbers if scale is None else numbers * scale

    def unscaled(self, codes: Lane) -> Lane:
        return bits_of(codes).float()


class Table(Numbers):
    """Codes of 8 or 16 bits, in order, whose values stand in a table in memory."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def unscaled(self, codes: Lane) -> Lane:
        return _gathered(self.table, codes)


def _gathered(table: Any, codes: Lane) -> Run:
    """Elements of a table in memory."""
    builder, element = codes.builder, table.type.pointee
    first = Run(builder, spread(builder, builder.ptrtoint(table, WIDTHS[64]), STEP))
    size = 4 if element == ir.FloatType() else 2
    places = (first + (codes.to(64) << (size // 2))).value
    pointers, every, elements = (ir.VectorType(kind, STEP) for kind in (table.type, ir.IntType(1), element))
    name = f"llvm.masked.gather.v{STEP}{'f' if size == 4 else 'i'}{8 * size}.v{STEP}p0"
    function = _declared(builder, name, elements, pointers, WIDTHS[32], every, elements)
    rest = ir.Constant(WIDTHS[32], size), ir.Constant(every, [1] * STEP), ir.Constant(elements, ir.Undefined)
    return Run(builder, builder.call(function, [builder.inttoptr(places, pointers), *rest]))


def _declared(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """An intrinsic of LLVM."""
    found = builder.module.globals.get(name)
    return ir.Function(builder.module, ir.FunctionType(result, arguments), name) if found is None else found


class _Pairs:
    """Codes whose pairs are taken apart: the first of each, then the second."""

    size = STEP

    def values(self, codes: Lane, scales: list[Any]) -> Lane:
        one, two = self.halves(codes, scales, _spread_scales(codes.builder, scales, PAIRS))
        return Run(codes.builder, shuffled(codes.builder, one.value, two.value, list(range(STEP))))

    def halves(self, codes: Lane, scales: list[Any], scale: Run | None) -> list[Lane]:
        raise NotImplementedError


class Bytes(_Pairs):
    """Codes of 8 bits that are the upper bits of a float16, but for its larger range of exponents. The second of a pair
    has its place in 16 bits already, and the first is moved there."""

    def __init__(self, fewer: Run, unit: Run) -> None:
        self.fewer, self.unit = fewer, unit
        self.kept = fewer.constant(0x7F00) >> fewer | 0x8000

    def halves(self, codes: Lane, scales: list[Any], scale: Run | None) -> list[Lane]:
        times = self.unit if scale is None else self.unit * scale
        return [(each.shift_signed(self.fewer) & self.kept).half_to_float() * times for each in _at_top(codes)]


class WholeNumbers(_Pairs):
    """Whole numbers of 8 bits in two's complement."""

    def halves(self, codes: Lane, scales: list[Any], scale: Run | None) -> list[Lane]:
        numbers = [each.shift_signed(8).value_as_float() for each in _at_top(codes)]
        return numbers if scale is None else [number * scale for number in numbers]


class Words(_Pairs):
    """Codes of 8 bits whose values fit bfloat16: permutations of registers look them up where the processor `permutes`
    16 bits, from a table in memory elsewhere."""

    def __init__(self, table: Any, permutes: bool) -> None:
        self.table, self.permutes = table, permutes

    def halves(self, codes: Lane, scales: list[Any], scale: Run | None) -> list[Lane]:
        words = self._permuted(codes.to(16)) if self.permutes else _gathered(self.table, codes)
        pairs = Run(codes.builder, codes.builder.bitcast(words.value, ir.VectorType(WIDTHS[32], PAIRS)))
        numbers = [(pairs << 16).float(), (pairs & UPPER).float()]
        return numbers if scale is None else [number * scale for number in numbers]

    def _permuted(self, index: Lane) -> Lane:
        builder, kind = index.builder, index.type
        function = _declared(builder, "llvm.x86.avx512.vpermi2var.hi.512", kind, kind, kind, kind)
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
    """The first and the second byte of each pair, in the upper half of 16 bits; below the second, the first remains."""
    pairs = Run(codes.builder, codes.builder.bitcast(codes.value, ir.VectorType(WIDTHS[16], PAIRS)))
    return pairs << 8, pairs


class Nibbles(_Pairs):
    """Codes of 4 bits, whose values permutations of registers look up in tables of so many `at_once`."""

    size = PAIRS

    def __init__(self, table: Lane, at_once: int) -> None:
        self.builder, self.table, self.at_once = table.builder, table, at_once

    def halves(self, codes: Lane, scales: list[Any], scale: Run | None) -> list[Lane]:
        wide = codes.to(32)
        halves = wide & 15, wide >> 4
        if scale is None:
            return [self._looked_up(self.table, half) for half in halves]
        if len(scales) == 1:  # the same products, but fewer
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
        """LLVM knows numbers that are taken from a register one by one for what they are together, a permutation, where
        the processor has an instruction for that."""
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
