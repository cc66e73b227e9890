"""Compares two tensors of equal size: how far one is from the other, and whether their difference has a low rank."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep.bits.scan import decoded
from halfstep.bits.values import FLOAT8, TYPES, Doubles, Values, even


RUN = 1 << 18
"""Values read at a time: in float64, the few arrays made of them fit the caches."""

_NUMBERS = (
    "float64", "float32", "bfloat16", "float16", *FLOAT8,
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
)  # fmt: skip
_CORNER = 384  # rows and columns of the part that is examined first
_LEAST = 16  # rows and columns below which no rank counts as low
_LOW = 3  # a low rank is at most a third of the smaller side
_GAP = 1.5  # the least ratio of the last singular value of a low rank to the next one
_NOISE = 2.0  # times the average energy of rounding errors
_MERGED = 2.0**-7  # the largest relative step of a low-rank product that was computed in bf16 before it was added
_MORE = 8  # random vectors beyond the rank
_VALUES = 1 << 20  # values that are read at a time


def comparable(dtype: str) -> bool:
    """Whether values of this stored type are real numbers, one per element."""
    return dtype in _NUMBERS or dtype not in TYPES


def as_numbers(piece: NDArray[Any], dtype: str) -> Doubles:
    """Stored bits converted to float64 values."""
    if dtype in FLOAT8 or dtype == "float16":
        return decoded(dtype)[piece]
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
    """Two tensors compared element by element, in row-major order."""

    a: Values
    b: Values

    def stored(self, count: int = RUN) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """The bits of both, in runs of `count` values."""
        return zip(even(self.a, count), even(self.b, count), strict=True)

    def runs(self, count: int = RUN) -> Iterator[tuple[Doubles, Doubles]]:
        """The values of both, in runs of `count`."""
        for one, other in self.stored(count):
            yield as_numbers(one, self.a.dtype), as_numbers(other, self.b.dtype)


def same_bytes(pair: Pair) -> bool:
    """Whether both have one type and the same bytes; reads up to the first difference."""
    if pair.a.dtype != pair.b.dtype or pair.a.nbytes != pair.b.nbytes:
        return False
    return all(np.array_equal(_bytes(one), _bytes(other)) for one, other in pair.stored())


def _bytes(piece: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(piece).view(np.uint8)


@dataclass(frozen=True)
class Change:
    """How far B's values are from A's: counts, and sums over the elements where both are finite."""

    values: int = 0
    unchanged: int = 0
    """The number of equal values; NaN in both counts too."""
    broken: int = 0
    """The number of elements where one is finite and the other is not."""
    squares_a: float = 0.0
    squares_b: float = 0.0
    products: float = 0.0
    squares: float = 0.0
    """The sum of squared differences."""
    bits: int = 0
    """The number of leading bits in which two stored values agree, summed: sign, exponent, then mantissa. 0 if types
    differ."""
    of_bits: int = 0
    """The number of bits compared."""

    @property
    def relative(self) -> float:
        """|B - A| / |A|, Euclidean norms; infinite where A is zero and B is not."""
        return math.sqrt(self.squares / self.squares_a) if self.squares_a else math.inf if self.squares else 0.0

    @property
    def cosine(self) -> float:
        """The cosine of the angle between A and B; 0 where either is zero."""
        return self.products / both if (both := math.sqrt(self.squares_a) * math.sqrt(self.squares_b)) else 0.0

    @property
    def kept(self) -> float:
        """The share of equal values."""
        return self.unchanged / self.values if self.values else 1.0

    @property
    def bits_kept(self) -> float | None:
        """The share of leading bits that agree; None where the types differ."""
        return self.bits / self.of_bits if self.of_bits else None

    def __add__(self, other: "Change") -> "Change":
        return Change(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(Change)))


def change(pair: Pair) -> Change:
    """Compute the `Change` from A to B, reading both once."""
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
    """The number of leading bits in which stored values agree, and the number of all their bits."""
    width = 8 * one.itemsize
    a, b = (np.ascontiguousarray(piece).view(f"u{one.itemsize}") for piece in (one, other))
    different = a ^ b
    if width == 64:  # in halves, since float64 cannot hold 64 bits
        high, low = different >> np.uint64(32), different & np.uint64(0xFFFFFFFF)
        lengths = np.where(high > 0, 32 + _length(high), _length(low))
    else:
        lengths = _length(different)
    return int((width - lengths).sum()), width * one.size


def _length(bits: NDArray[Any]) -> NDArray[np.int32]:
    return np.frexp(bits.astype(np.float64))[1]


@dataclass(frozen=True)
class LowRank:
    """B - A is a matrix of this rank, up to rounding errors."""

    rank: int
    share: float
    """The share of the difference's energy (sum of squares) in these singular values."""


def low_rank(pair: Pair, significant_bits: int) -> LowRank | None:
    """The rank of B - A, if it is low; `significant_bits` is the number that B's values use.

    A corner of both is enough to rule out most tensors, and its singular values suggest a rank; then the whole
    difference is projected on random vectors, a few more than the rank, and on what these span (Halko, Martinsson and
    Tropp 2011, Algorithm 4.4). The remainder must be no larger than the rounding errors of B's values, and of a product
    computed in bf16.
    """
    shape = pair.a.shape
    rows, columns = shape[0] if shape else 0, math.prod(shape[1:])
    if len(shape) < 2 or min(rows, columns) < _LEAST:
        return None
    corner = _corner(pair, rows, columns)
    if corner is None:
        return None
    difference, result = corner
    singular = np.asarray(np.linalg.svd(difference, compute_uv=False), np.float64)
    total = float((singular**2).sum())
    rank = _rank(singular, total, _noise(_squared(result, significant_bits), total), min(difference.shape) // _LOW)
    return _whole(pair, rows, columns, rank, significant_bits) if rank else None


def _rows(pair: Pair, columns: int) -> Iterator[tuple[int, Doubles, Doubles]]:
    first, count = 0, max(_VALUES // columns, 1)
    for a, b in pair.runs(count * columns):
        yield first, a.reshape(-1, columns), b.reshape(-1, columns)
        first += a.size // columns


def _corner(pair: Pair, rows: int, columns: int) -> tuple[Doubles, Doubles] | None:
    """Some rows and columns, spread over the matrix, of the difference and of B; None where a value is not finite."""
    down, across = (np.linspace(0, n - 1, min(n, _CORNER)).astype(np.int64) for n in (rows, columns))
    differences, results = [], []
    for first, a, b in _rows(pair, columns):
        here = down[(down >= first) & (down < first + len(a))] - first
        differences.append((b[here] - a[here])[:, across])
        results.append(b[here][:, across])
    difference = np.concatenate(differences)
    return (difference, np.concatenate(results)) if np.isfinite(difference).all() else None


def _squared(values: Doubles, significant_bits: int) -> float:
    """The average energy of rounding errors at that many bits: a twelfth of the square of each value's step."""
    return float(np.exp2(2 * (np.frexp(values[values != 0])[1].astype(np.float64) - significant_bits)).sum()) / 12


def _rank(singular: Doubles, total: float, noise: float, most: int) -> int:
    """The number of singular values that stand out and hold most of the energy, if the others are noise; else 0.

    The widest gap is after the last of them.
    """
    rank = 1 + int(np.argmax(singular[:most] / np.maximum(singular[1 : most + 1], singular[0] * 1e-12)))
    held = float((singular[:rank] ** 2).sum())
    gap = singular[rank - 1] > _GAP * singular[rank]
    return rank if gap and 2 * held >= total > 0 and total - held <= noise + total * 1e-10 else 0


def _noise(rounding: float, total: float) -> float:
    """The energy allowed for rounding errors of B's values, and of a product in bf16."""
    return _NOISE * (rounding + total * _MERGED**2 / 12)


def _whole(pair: Pair, rows: int, columns: int, rank: int, significant_bits: int) -> LowRank | None:
    """`low_rank` of the whole difference, of which only projections are held in memory."""
    width = min(rank + _MORE, rows, columns)
    basis = np.random.default_rng(0).standard_normal((columns, width))
    images, rounding = np.empty((rows, width)), 0.0
    of_rows, of_columns = np.empty(rows), np.zeros(columns)
    for first, a, b in _rows(pair, columns):
        d = b - a
        if not np.isfinite(d).all():
            return None
        images[first : first + len(d)] = d @ basis
        of_rows[first : first + len(d)] = (d * d).sum(1)
        of_columns += (d * d).sum(0)
        rounding += _squared(b, significant_bits)
    total = float(of_rows.sum())
    span = np.linalg.qr(images)[0]
    projected = np.zeros((width, columns))
    for first, a, b in _rows(pair, columns):
        projected += span[first : first + len(a)].T @ (b - a)
    basis, products = np.linalg.qr(projected.T)[0], np.zeros((width, width))
    for _, a, b in _rows(pair, columns):
        image = (b - a) @ basis
        products += image.T @ image
    singular = np.sqrt(np.maximum(np.linalg.eigvalsh(products)[::-1], 0.0))
    noise = _noise(rounding, total)
    found = _rank(singular, total, noise, width - 1)
    if any(total - float(np.sort(lines)[-found:].sum()) <= noise for lines in (of_rows, of_columns)):
        return None  # only that many rows or columns differ
    return LowRank(found, float((singular[:found] ** 2).sum()) / total) if found else None
