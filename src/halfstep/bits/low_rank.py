"""Whether two matrices differ by one of low rank, as a merged LoRA leaves it, up to what rounding adds to that."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from halfstep.bits.pair import Doubles, Pair


_CORNER = 384  # rows and columns of the part that is looked at first
_LEAST = 16  # a matrix with fewer of either has no rank that could be called low
_LOW = 3  # a low rank is at most a third of the smaller side
_GAP = 1.5  # times the singular value after it: what the last one of a low rank has at least
_NOISE = 2.0  # times the energy that rounding leaves on average
_MERGED = 2.0**-7  # the largest relative step of a product that was formed in bf16 before it was added
_MORE = 8  # vectors beyond the rank in which the difference is looked for
_VALUES = 1 << 20  # read at a time


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
    noise = _noise(_squared(result, significant_bits), total)
    rank = _rank(singular, total, noise, min(difference.shape) // _LOW)
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
    exponents = np.frexp(values[values != 0])[1].astype(np.float64)
    return float(np.exp2(2 * (exponents - significant_bits)).sum()) / 12


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
