"""How far rounding moves normally distributed numbers, by numerical integration: no random numbers, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from itertools import pairwise
from math import ceil, exp, frexp, pi, sqrt
from statistics import NormalDist

from halfstep.formats import Format, Posit
from halfstep.formats.exact import boundary
from halfstep.formats.line import line


SIGMAS = 4.0
"""What `scaled_error` lays on the format's largest value."""
_TAIL = 9.0  # standard deviations; what lies beyond weighs less than 2^-60
_NEAR_ZERO = 2.0**-18  # values below are left out, except zero: their errors are squared
_NODES = ((-0.8611363115940526, 0.34785484513745385), (-0.33998104358485626, 0.6521451548625461))
"""Of Gauss and Legendre's rule with four points, the left half."""


@cache
def normal_error(format: Format, sigma: float = 1.0) -> float:
    """RMS error of rounding x to nearest over RMS of x, for x normal with that standard deviation.

    >>> from halfstep.formats import get
    >>> f"{normal_error(get('bf16')):.2e}"
    '1.66e-03'
    """
    if format.bits > 16:
        return _fine_error(format, sigma)
    total = sum(_moment(low, high, value, sigma) for low, high, value in _cells(format, sigma))
    return sqrt(total) / sigma


def scaled_error(format: Format) -> float | None:
    """`normal_error` with four standard deviations on the largest value; None for posits, most precise near 1."""
    return None if isinstance(format, Posit) else normal_error(format, format.max / SIGMAS)


def _fine_error(format: Format, sigma: float) -> float:
    """With very many values to a binade, the error is uniform on a gap: gap^2 / 12."""
    total, normal = 0.0, NormalDist(0, sigma)
    top = frexp(_TAIL * sigma)[1]
    for k in range(top - 44, top):
        low = 2.0**k
        near = line(format).at_most(low)
        gap = line(format).value(near + 1) - line(format).value(near) if near < line(format).numbers[-1] else 0.0
        total += 2 * (normal.cdf(2 * low) - normal.cdf(low)) * gap**2 / 12
    return sqrt(total) / sigma


def _cells(format: Format, sigma: float) -> Iterator[tuple[float, float, float]]:
    """For each value, from where to where numbers are rounded to it."""
    values, edge = line(format), _TAIL * sigma
    first, last = values.at_most(-edge), values.at_most(edge) + 1
    numbers = range(max(first, values.numbers.start), min(last, values.numbers[-1]) + 1)
    kept = [v for v in map(values.value, numbers) if v == 0 or abs(v) >= _NEAR_ZERO * sigma]
    turns = [
        float(boundary(Fraction(low), Fraction(high), format)) if isinstance(format, Posit) else (low + high) / 2
        for low, high in pairwise(kept)
    ]
    return zip([-edge, *turns], [*turns, edge], kept, strict=True)


def _moment(low: float, high: float, value: float, sigma: float) -> float:
    """The integral of (value - x)^2 over [low, high] against the normal density."""
    pieces = max(1, ceil((high - low) / (0.5 * sigma)))
    half = (high - low) / pieces / 2
    total = 0.0
    for piece in range(pieces):
        middle = low + (2 * piece + 1) * half
        for node, weight in _NODES:
            for x in (middle + node * half, middle - node * half):
                total += weight * half * (value - x) ** 2 * exp(-0.5 * (x / sigma) ** 2)
    return total / (sigma * sqrt(2 * pi))
