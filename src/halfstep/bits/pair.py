"""Two tensors of as many values, read side by side, and how much one of them differs from the other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep.bits.dtypes import FLOAT8, TYPES
from halfstep.bits.pieces import even
from halfstep.bits.scan import decoded
from halfstep.bits.values import Values


Doubles = NDArray[np.float64]

RUN = 1 << 18
"""Values read at a time: in float64, the few arrays that are made of them stay in the caches."""

_NUMBERS = (
    "float64", "float32", "bfloat16", "float16", *FLOAT8,
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
)  # fmt: skip


def comparable(dtype: str) -> bool:
    """Whether values of this stored type are real numbers, one to an element."""
    return dtype in _NUMBERS or dtype not in TYPES


def as_numbers(piece: NDArray[Any], dtype: str) -> Doubles:
    """Stored bits as the float64 numbers that they stand for."""
    if dtype in FLOAT8 or dtype == "float16":
        values: Doubles = decoded(dtype)[piece]
        return values
    with np.errstate(invalid="ignore"):  # a signalling NaN
        if dtype == "bfloat16":
            return (piece.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        if dtype == "float64":
            return piece.view(np.float64)
        if dtype == "float32" or dtype not in TYPES:
            return piece.view(np.float32).astype(np.float64)
    return piece.astype(np.float64)


@dataclass(frozen=True)
class Pair:
    """Two tensors whose values belong together one by one, in row-major order."""

    a: Values
    b: Values

    def stored(self, count: int = RUN) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """The bits of both, in runs of `count` values each."""
        return zip(even(self.a, count), even(self.b, count), strict=True)

    def runs(self, count: int = RUN) -> Iterator[tuple[Doubles, Doubles]]:
        """The values of both, in runs of `count` each."""
        for one, other in self.stored(count):
            yield as_numbers(one, self.a.dtype), as_numbers(other, self.b.dtype)

    @property
    def swapped(self) -> Pair:
        """The second one first."""
        return Pair(self.b, self.a)


def same_bytes(pair: Pair) -> bool:
    """Whether both are of one type and hold the same bytes; reads up to the first difference."""
    if pair.a.dtype != pair.b.dtype or pair.a.nbytes != pair.b.nbytes:
        return False
    return all(np.array_equal(_bytes(one), _bytes(other)) for one, other in pair.stored())


def _bytes(piece: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(piece).view(np.uint8)


@dataclass(frozen=True)
class Change:
    """How far B's values are from A's: counts, and sums over the places where both are finite."""

    values: int = 0
    unchanged: int = 0
    """Equal values; NaN in both counts, too."""
    broken: int = 0
    """Places where one is finite and the other is not."""
    squares_a: float = 0.0
    squares_b: float = 0.0
    products: float = 0.0
    squares: float = 0.0
    """Of the differences."""
    bits: int = 0
    """Leading bits in which two stored values agree, summed: sign, exponent, then mantissa. 0 of two types."""
    of_bits: int = 0
    """The bits that were compared."""

    @property
    def relative(self) -> float:
        """|B - A| / |A|, Euclidean norms; infinite where A is zero and B is not."""
        return math.sqrt(self.squares / self.squares_a) if self.squares_a else math.inf if self.squares else 0.0

    @property
    def cosine(self) -> float:
        """Of the angle between A and B; 0 where either is zero."""
        return self.products / both if (both := math.sqrt(self.squares_a) * math.sqrt(self.squares_b)) else 0.0

    @property
    def kept(self) -> float:
        """The share of equal values."""
        return self.unchanged / self.values if self.values else 1.0

    @property
    def bits_kept(self) -> float | None:
        """The share of leading bits that agree; None where the types differ."""
        return self.bits / self.of_bits if self.of_bits else None

    def __add__(self, other: Change) -> Change:
        return Change(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(Change)))


def change(pair: Pair) -> Change:
    """Read both once, and count."""
    found, same = Change(), pair.a.dtype == pair.b.dtype
    for one, other in pair.stored():
        a, b = as_numbers(one, pair.a.dtype), as_numbers(other, pair.b.dtype)
        equal = a == b
        finite = np.isfinite(a) & np.isfinite(b)
        broken = 0
        if not finite.all():
            equal |= np.isnan(a) & np.isnan(b)
            broken = int((np.isfinite(a) != np.isfinite(b)).sum())
            a, b = np.where(finite, a, 0), np.where(finite, b, 0)
        d = b - a
        bits, of_bits = _agreeing(one, other) if same else (0, 0)
        found += Change(
            equal.size, int(equal.sum()), broken, _dot(a, a), _dot(b, b), _dot(a, b), _dot(d, d), bits, of_bits
        )
    return found


def _dot(a: Doubles, b: Doubles) -> float:
    with np.errstate(over="ignore"):  # squares beyond float64's range are infinite
        return float(np.dot(a, b))


def _agreeing(one: NDArray[Any], other: NDArray[Any]) -> tuple[int, int]:
    """The leading bits in which stored values agree, and all of their bits."""
    width = 8 * one.itemsize
    a, b = (np.ascontiguousarray(piece).view(f"u{one.itemsize}") for piece in (one, other))
    different = a ^ b
    if width == 64:  # float64 has no room for all of their bits
        high, low = different >> np.uint64(32), different & np.uint64(0xFFFFFFFF)
        lengths = np.where(high > 0, 32 + _length(high), _length(low))
    else:
        lengths = _length(different)
    return int((width - lengths).sum()), width * one.size


def _length(bits: NDArray[Any]) -> NDArray[np.int32]:
    found: NDArray[np.int32] = np.frexp(bits.astype(np.float64))[1]
    return found
