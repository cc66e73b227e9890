"""Confidence intervals of differences between paired runs, and the number of pairs that would decide. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache


LEVEL = 0.95
"""The confidence of every interval: in the long run one in twenty leaves out the true difference, half on each side."""
_MOST = 1000  # pairs; who needs more than that is not told a number


@dataclass(frozen=True)
class Interval:
    """An interval that holds the true mean difference with the confidence `LEVEL`."""

    low: float
    high: float


def paired(differences: Sequence[float]) -> Interval:
    """mean ± t s / sqrt(n), for n differences of standard deviation s; t is of n - 1 degrees of freedom.

    It takes the differences for independent and about normally distributed.

    Raises:
        statistics.StatisticsError: fewer than two differences, which have no spread.

    Source: Student 1908, The probable error of a mean.

    >>> paired([1.0, 2.0, 3.0])
    Interval(low=-0.484..., high=4.484...)
    """
    return _interval(statistics.fmean(differences), statistics.stdev(differences), len(differences), len(differences))


def borrowed(differences: Sequence[float], others: Sequence[float]) -> Interval:
    """For differences a - b without a spread of their own: that of the values b over other seeds stands in for it.

    var(a - b) = var(a) + var(b) - 2 cov(a, b). Where a spreads over seeds as b does, and the same seed does not drive
    them apart, this is at most 2 var(b). So the interval is mean ± t sqrt(2) s / sqrt(n), with the standard deviation s
    of b's values and as many degrees of freedom as those have. It is an upper bound, most often a wide one.

    Raises:
        statistics.StatisticsError: fewer than two other values.
    """
    return _interval(statistics.fmean(differences), borrowed_spread(others), len(differences), len(others))


def borrowed_spread(others: Sequence[float]) -> float:
    """The standard deviation that `borrowed` takes for that of the differences."""
    return math.sqrt(2) * statistics.stdev(others)


def _interval(mean: float, spread: float, count: int, measured_on: int) -> Interval:
    half = t_quantile((1 + LEVEL) / 2, measured_on - 1) * spread / math.sqrt(count)
    return Interval(mean - half, mean + half)


def pairs_to_decide(mean: float, spread: float, margin: float) -> int | None:
    """The fewest pairs whose interval would leave `margin` out, were mean and spread what they are now.

    None where that takes more than 1,000: the difference is all but the margin itself.
    """

    distance, probability = abs(mean - margin), (1 + LEVEL) / 2
    least = (statistics.NormalDist().inv_cdf(probability) * spread) ** 2  # t lies above the normal distribution's
    if least > distance**2 * _MOST or not distance:
        return None
    count = max(2, math.ceil(least / distance**2))
    while t_quantile(probability, count - 1) * spread >= distance * math.sqrt(count):
        count += 1
    return count


def paired_power(spread: float, pairs: int, effect: float) -> float:
    """How often the interval of so many differences leaves out 0, their true mean being `effect`; nearly.

    By the normal distribution with Student's quantile, which is a few points too high below 10 pairs.

    >>> round(paired_power(1.0, 34, 0.5), 2)  # 0.81 by the noncentral t distribution
    0.81
    """
    distance = effect * math.sqrt(pairs) / spread - t_quantile((1 + LEVEL) / 2, pairs - 1) if spread else math.inf
    return statistics.NormalDist().cdf(distance) if math.isfinite(distance) else 1.0


@cache
def t_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t distribution, for a probability of at least one half and whole degrees of freedom.

    Source: Abramowitz and Stegun 1964, 26.7.3 and 26.7.4: the distribution as a finite sum, here solved by bisection.

    >>> round(t_quantile(0.975, 2), 4)
    4.3027
    """
    low, high = 0.0, 1.0
    while _within(high, degrees) < 2 * probability - 1:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if _within(middle, degrees) < 2 * probability - 1 else (low, middle)
    return high


def _within(t: float, degrees: int) -> float:
    """The probability that a value lies between -t and t."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = degrees % 2
    term = total = (math.cos(angle) if odd else 1.0) * (degrees > 1)
    for k in range(2 + odd, degrees - 1, 2):
        term *= square * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
