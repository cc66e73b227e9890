"""Two tensors of as many values, read side by side: how much one differs from the other, and whether by a low rank."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep.bits.scan import decoded
from halfstep.bits.values import FLOAT8, TYPES, Doubles, Values, even


RUN = 1 << 18
"""Values read at a time: in float64, the few arrays that are made of them stay in the caches."""

_NUMBERS = (
    "float64", "float32", "bfloat16", "float16", *FLOAT8,
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
)  # fmt: skip
_CORNER = 384  # rows and columns of the part that is looked at first
_LEAST = 16  # a matrix with fewer of either has no rank that could be called low
_LOW = 3  # a low rank is at most a third of the smaller side
_GAP = 1.5  # times the singular value after it: what the last one of a low rank has at least
_NOISE = 2.0  # times the energy that rounding leaves on average
_MERGED = 2.0**-7  # the largest relative step of a product that was formed in bf16 before it was added
_MORE = 8  # vectors beyond the rank in which the difference is looked for
_VALUES = 1 << 20  # read at a time


def comparable(dtype: str) -> bool:
    """Whether values of this stored type are real numbers, one to an element."""
    return dtype in _NUMBERS or dtype not in TYPES


def as_numbers(piece: NDArray[Any], dtype: str) -> Doubles:
    """Stored bits as the float64 numbers that they stand for."""
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

    def __add__(self, other: "Change") -> "Change":
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
    return np.frexp(bits.astype(np.float64))[1]


@dataclass(frozen=True)
class LowRank:
    """B - A is a matrix of this rank, and what is left is no more than rounding leaves."""

    rank: int
    share: float
    """Of the difference's energy, the sum of squares, that is in these singular values."""


def low_rank(pair: Pair, significant_bits: int) -> LowRank | None:
    """The rank of B - A, if it is low; `significant_bits` are those that B's values use.

    A corner of both is enough to say no, and its singular values suggest a rank; then all of the difference is
    projected on as many random vectors and a few more, and on what these span (Halko, Martinsson and Tropp 2011,
    Algorithm 4.4). What that leaves must be no more than the rounding of B's values, and of a product formed in bf16,
    would.
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
    """Some rows and columns, spread over all, of the difference and of B; None where a value is not finite."""
    down, across = (np.linspace(0, n - 1, min(n, _CORNER)).astype(np.int64) for n in (rows, columns))
    differences, results = [], []
    for first, a, b in _rows(pair, columns):
        here = down[(down >= first) & (down < first + len(a))] - first
        differences.append((b[here] - a[here])[:, across])
        results.append(b[here][:, across])
    difference = np.concatenate(differences)
    return (difference, np.concatenate(results)) if np.isfinite(difference).all() else None


def _squared(values: Doubles, significant_bits: int) -> float:
    """The energy that rounding to so many bits leaves on average: a twelfth of the square of each value's step."""
    return float(np.exp2(2 * (np.frexp(values[values != 0])[1].astype(np.float64) - significant_bits)).sum()) / 12


def _rank(singular: Doubles, total: float, noise: float, most: int) -> int:
    """How many singular values stand out and hold most of the energy, if the others are noise; else 0.

    After the last of them comes the widest gap.
    """
    rank = 1 + int(np.argmax(singular[:most] / np.maximum(singular[1 : most + 1], singular[0] * 1e-12)))
    held = float((singular[:rank] ** 2).sum())
    gap = singular[rank - 1] > _GAP * singular[rank]
    return rank if gap and 2 * held >= total > 0 and total - held <= noise + total * 1e-10 else 0


def _noise(rounding: float, total: float) -> float:
    """The energy that is left to the rounding of B's values, and of a product in bf16."""
    return _NOISE * (rounding + total * _MERGED**2 / 12)


def _whole(pair: Pair, rows: int, columns: int, rank: int, significant_bits: int) -> LowRank | None:
    """The same of the whole difference, of which only its projections are held."""
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
        return None  # so many rows or columns were written to, perhaps in one place each
    return LowRank(found, float((singular[:found] ** 2).sum()) / total) if found else None
