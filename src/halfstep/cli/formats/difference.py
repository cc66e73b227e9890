"""Compare two formats: values that only one of them has, and the rounding error of normally distributed values."""

from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from itertools import islice, pairwise
from math import ceil, exp, frexp, inf, log2, log10, pi, sqrt
from statistics import NormalDist
from typing import Any

from halfstep.cli.formats.plot import binades, density, per_binade
from halfstep.cli.formats.table import exact_text, kind, labelled, layout, parameters, specials, value_text, width
from halfstep.formats import Float, Format, Posit
from halfstep.formats.exact import Line, boundary, line


EXAMPLES = 4


def as_data(a: Format, b: Format) -> dict[str, Any]:
    """The comparison as JSON."""
    exponents = _common_binades(a, b)
    return {
        "a": parameters(a),
        "b": parameters(b),
        "decades": [decades(a), decades(b)],
        "values": [len(line(a).numbers), len(line(b).numbers)],
        "common": common(a, b),
        "only_in_a": {"count": len(line(a).numbers) - common(a, b), "examples": examples(a, b)},
        "only_in_b": {"count": len(line(b).numbers) - common(a, b), "examples": examples(b, a)},
        "first_binade": exponents.start,
        "per_binade": [per_binade(a, exponents), per_binade(b, exponents)],
        "normal_error": [normal_error(a), normal_error(b)],
        "scaled_normal_error": [scaled_error(a), scaled_error(b)],
    }


def describe(a: Format, b: Format) -> str:
    """The comparison as text."""
    exponents = _common_binades(a, b)
    counts = [per_binade(format, exponents) for format in (a, b)]
    most = max(map(max, counts))
    ends = {exponents[0]: f"2^{exponents[0]}", exponents[-1]: f"2^{exponents[-1] + 1}", 0: "1"}
    sketches = [
        f"{format.name}: positive values per binade\n{density(count, exponents, most, ends)}"
        for format, count in zip((a, b), counts, strict=True)
    ]
    return "\n\n".join([_side_by_side(a, b), *sketches, labelled([_held(a, b), _held(b, a)])])


def decades(format: Format) -> float:
    """log10 of the largest over the smallest positive value."""
    return log10(format.max) - log10(format.smallest)


def common(a: Format, b: Format) -> int:
    """The number of finite values that both formats have."""
    small, large = sorted((a, b), key=lambda format: len(line(format).numbers))
    if small.bits <= 8:
        return sum(_holds(line(large), line(small).value(n)) for n in line(small).numbers)
    zero = _holds(line(a), 0.0) and _holds(line(b), 0.0)
    return zero + sum(_common_in(a, b, k, sign) for k in _common_binades(a, b) for sign in (1, -1))


def _common_in(a: Format, b: Format, k: int, sign: int) -> int:
    """The number of common values with magnitude in [2^k, 2^(k+1)). In wide formats they start at 2^k and are evenly
    spaced."""
    first, steps, last = Fraction(2) ** k, [], []
    for format in (a, b):
        values = line(format)
        if not _holds(values, sign * first):
            return 0
        start, end = values.at_most(sign * first), values.at_most(sign * 2 * first)
        if values.value(end) == sign * 2 * first or sign < 0:
            end -= sign  # the far end belongs to the next binade; on the negative side `at_most` lies beyond it
        start, end = sorted((start, end))
        numbers = range(max(start, values.numbers.start), min(end, values.numbers[-1]) + 1)
        near, far = sorted((abs(Fraction(values.value(numbers[0]))), abs(Fraction(values.value(numbers[-1])))))
        steps.append((far - near) / (len(numbers) - 1) if len(numbers) > 1 else first)
        last.append(far)
    return int((min(last) - first) / max(steps)) + 1


def examples(a: Format, b: Format) -> list[float]:
    """A few values of `a` that `b` lacks: the smallest and the largest, then values from 1 outwards."""
    return list(islice((value for value in dict.fromkeys(_candidates(a)) if not _holds(line(b), value)), EXAMPLES))


def _candidates(format: Format) -> Iterator[float]:
    """Every value of a narrow format; for a wide one the second and the last value of each binade, where grids
    differ."""
    values = line(format)
    yield format.max
    yield format.smallest
    if format.bits <= 8:
        yield from sorted(map(values.value, values.numbers), key=lambda v: (abs(log2(abs(v))) if v else inf, -v))
        return
    for k in sorted(binades(format), key=abs):
        start = values.at_most(Fraction(2) ** k)
        yield from (
            values.value(n) for n in (start + 1, values.at_most(Fraction(2) ** (k + 1)) - 1) if n in values.numbers
        )
    yield format.min


def _holds(values: Line, x: Fraction | float) -> bool:
    number = values.at_most(x)
    return number in values.numbers and values.value(number) == x


def _common_binades(a: Format, b: Format) -> range:
    one, other = binades(a), binades(b)
    return range(min(one.start, other.start), max(one.stop, other.stop))


def _side_by_side(a: Format, b: Format) -> str:
    def column(format: Format) -> list[str]:

        fitted = scaled_error(format)
        return [
            format.name,
            kind(format),
            layout(format),
            str(format.bits),
            value_text(format.max),
            value_text(format.min_normal) if isinstance(format, Float) else "-",
            value_text(format.smallest),
            f"{decades(format):.1f}",
            value_text(format.eps),
            specials(format),
            str(len(line(format).numbers)),
            f"{normal_error(format):.4g}",
            "-" if fitted is None else f"{fitted:.4g}",
        ]

    labels = ["", "kind", "fields", "bits", "largest", "least normal", "least positive", "decades", "eps", "beyond"]
    labels += ["finite values", "error on N(0,1)", f"  max at {SIGMAS:g} sigma"]
    left, right = column(a), column(b)
    wide = max(map(len, left)) + 2
    return "\n".join(
        f"{label:<17}{one:<{wide}}{other}".rstrip()[: width()]
        for label, one, other in zip(labels, left, right, strict=True)
    )


def _held(a: Format, b: Format) -> tuple[str, str]:
    missing = len(line(a).numbers) - common(a, b)
    if not missing:
        return f"{a.name} in {b.name}", "every value is exact"
    some = ", ".join(exact_text(value) for value in examples(a, b))
    return f"{a.name} in {b.name}", f"{missing} of {len(line(a).numbers)} values are not" + (
        f": {some}" if some else ""
    )


SIGMAS = 4.0
"""The number of standard deviations that `scaled_error` scales to the format's largest value."""
_TAIL = 9.0  # standard deviations; the weight beyond is below 2^-60
_NEAR_ZERO = 2.0**-18  # smaller values except zero are left out: their squared errors are negligible
_NODES = ((-0.8611363115940526, 0.34785484513745385), (-0.33998104358485626, 0.6521451548625461))
"""Nodes and weights of the left half of the four-point Gauss-Legendre rule."""


@cache
def normal_error(format: Format, sigma: float = 1.0) -> float:
    """RMS error of rounding x to nearest, relative to the RMS of x, for normally distributed x with standard deviation
    sigma.

    >>> from halfstep.formats import get
    >>> f"{normal_error(get('bf16')):.2e}"
    '1.66e-03'
    """
    if format.bits > 16:
        return _fine_error(format, sigma)
    return sqrt(sum(_moment(low, high, value, sigma) for low, high, value in _cells(format, sigma))) / sigma


def scaled_error(format: Format) -> float | None:
    """`normal_error` with four standard deviations scaled to the largest value; None for posits, most precise near
    1."""
    return None if isinstance(format, Posit) else normal_error(format, format.max / SIGMAS)


def _fine_error(format: Format, sigma: float) -> float:
    """The RMS error when a binade has very many values: the error is uniform within a gap, so its variance is gap^2 /
    12."""
    total, normal = 0.0, NormalDist(0, sigma)
    top = frexp(_TAIL * sigma)[1]
    for k in range(top - 44, top):
        low = 2.0**k
        near = line(format).at_most(low)
        gap = line(format).value(near + 1) - line(format).value(near) if near < line(format).numbers[-1] else 0.0
        total += 2 * (normal.cdf(2 * low) - normal.cdf(low)) * gap**2 / 12
    return sqrt(total) / sigma


def _cells(format: Format, sigma: float) -> Iterator[tuple[float, float, float]]:
    """For each value: the lower and the upper end of the interval that rounds to it, and the value."""
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
