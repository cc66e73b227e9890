"""Confidence intervals of paired differences and of shares, tests, and numbers of runs that would decide. No torch."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any


LEVEL = 0.95
"""The confidence of every interval: in the long run one in twenty excludes the true difference, half on each side."""
_PAIRS = 1000  # above this no number of pairs is given


@dataclass(frozen=True)
class Interval:
    """An interval that contains the true mean difference with confidence `LEVEL`."""

    low: float
    high: float


def paired(differences: Sequence[float]) -> Interval:
    """mean ± t s / sqrt(n), for n differences with standard deviation s; t has n - 1 degrees of freedom.

    Assumes that the differences are independent and about normally distributed.

    Raises:
        statistics.StatisticsError: fewer than two differences, which have no spread.

    Source: Student 1908, The probable error of a mean.

    >>> paired([1.0, 2.0, 3.0])
    Interval(low=-0.484..., high=4.484...)
    """
    return _interval(statistics.fmean(differences), statistics.stdev(differences), len(differences), len(differences))


def borrowed(differences: Sequence[float], others: Sequence[float]) -> Interval:
    """An interval for differences a - b that have no spread, using the spread of the values b over other seeds.

    var(a - b) = var(a) + var(b) - 2 cov(a, b). If a spreads over seeds like b, and the same seed does not move them in
    opposite directions, this is at most 2 var(b). So the interval is mean ± t sqrt(2) s / sqrt(n), with the standard
    deviation s of b's values and their degrees of freedom. It is an upper bound, usually a wide one.

    Raises:
        statistics.StatisticsError: fewer than two other values.
    """
    return _interval(statistics.fmean(differences), borrowed_spread(others), len(differences), len(others))


def borrowed_spread(others: Sequence[float]) -> float:
    """The standard deviation that `borrowed` uses for the differences."""
    return math.sqrt(2) * statistics.stdev(others)


def _interval(mean: float, spread: float, count: int, measured_on: int) -> Interval:
    half = t_quantile((1 + LEVEL) / 2, measured_on - 1) * spread / math.sqrt(count)
    return Interval(mean - half, mean + half)


def pairs_to_decide(mean: float, spread: float, margin: float) -> int | None:
    """The fewest pairs whose interval would exclude `margin`, if mean and spread stay the same.

    None if that takes more than 1,000: the difference almost equals the margin.
    """

    distance, probability = abs(mean - margin), (1 + LEVEL) / 2
    least = (statistics.NormalDist().inv_cdf(probability) * spread) ** 2  # t lies above the normal distribution's
    if least > distance**2 * _PAIRS or not distance:
        return None
    count = max(2, math.ceil(least / distance**2))
    while t_quantile(probability, count - 1) * spread >= distance * math.sqrt(count):
        count += 1
    return count


def paired_power(spread: float, pairs: int, effect: float) -> float:
    """The probability, approximately, that the interval of `pairs` differences excludes 0, if their true mean is
    `effect`.

    Uses the normal distribution with Student's quantile, which is a few points too high below 10 pairs.

    >>> round(paired_power(1.0, 34, 0.5), 2)  # 0.81 by the noncentral t distribution
    0.81
    """
    distance = effect * math.sqrt(pairs) / spread - t_quantile((1 + LEVEL) / 2, pairs - 1) if spread else math.inf
    return statistics.NormalDist().cdf(distance) if math.isfinite(distance) else 1.0


@cache
def t_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t distribution, for a probability of at least one half and integer degrees of freedom.

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


EFFECT = 0.1
"""The difference of two shares that a comparison should find: ten points, such as 18 of 188 against 0 of 70 (Lee et
al.)."""
ENOUGH = 0.8
"""The power below which finding no difference is no evidence."""
_RUNS = 2000  # the most runs per side that are considered


def wilson(hits: int, runs: int, level: float = LEVEL) -> Interval:
    """The share of runs that hit, with that confidence: Wilson's score interval, which is valid at shares of 0 and 1
    too.

    Source: Wilson 1927, Probable inference, the law of succession, and statistical inference.

    >>> wilson(18, 188)
    Interval(low=0.0614..., high=0.1462...)
    """
    z = statistics.NormalDist().inv_cdf((1 + level) / 2)
    centre, spread = hits + z * z / 2, z * math.sqrt(hits * (runs - hits) / runs + z * z / 4)
    return Interval(max(0.0, (centre - spread) / (runs + z * z)), min(1.0, (centre + spread) / (runs + z * z)))


@cache
def fisher(a: int, of_a: int, b: int, of_b: int) -> float:
    """The two-sided p of Fisher's exact test of a hits of of_a runs against b of of_b.

    The sum of the probabilities, given the total of hits, of every split that is at most as probable as the observed
    one.

    >>> round(fisher(18, 188, 0, 70), 4)
    0.0044
    """
    hits, runs = a + b, of_a + of_b
    weights = {
        k: math.comb(of_a, k) * math.comb(of_b, hits - k) for k in range(max(0, hits - of_b), min(of_a, hits) + 1)
    }
    return sum(w for w in weights.values() if w <= weights[a]) / math.comb(runs, hits)


def power(share_a: float, of_a: int, share_b: float, of_b: int, level: float = LEVEL) -> float:
    """The power of Fisher's test for these true shares: the sum over all outcomes.

    >>> round(power(0.1, 188, 0.0, 70), 2)
    0.98
    """
    first, second = _outcomes(share_a, of_a), _outcomes(share_b, of_b)
    return sum(
        p * q
        for a, p in first.items()
        for b, q in second.items()
        if p * q > 1e-12 and fisher(a, of_a, b, of_b) < 1 - level
    )


def runs_to_tell(share_a: float, share_b: float, wanted: float = 0.8) -> int | None:
    """Approximate runs per side that distinguish two such shares with that power; None for more than 2,000.

    Uses the normal distribution with Yates' correction, which is close to Fisher's test.

    Source: Casagrande, Pike and Smith 1978, An improved approximate formula for calculating sample sizes.
    """
    gap, mean = abs(share_a - share_b), (share_a + share_b) / 2
    if not gap:
        return None
    z, y = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2), statistics.NormalDist().inv_cdf(wanted)
    spread = share_a * (1 - share_a) + share_b * (1 - share_b)
    plain = (z * math.sqrt(2 * mean * (1 - mean)) + y * math.sqrt(spread)) ** 2 / gap**2
    count = plain / 4 * (1 + math.sqrt(1 + 4 / (plain * gap))) ** 2
    return round(count + 0.5) if count <= _RUNS else None


def _outcomes(share: float, runs: int) -> dict[int, float]:
    return {k: math.comb(runs, k) * share**k * (1 - share) ** (runs - k) for k in range(runs + 1)}


def share(hits: int, runs: int) -> dict[str, Any]:
    """A share with its interval, as JSON data."""
    return {"hits": hits, "runs": runs, "interval": asdict(wilson(hits, runs)) if runs else None}


def compared(a: int, of_a: int, b: int, of_b: int) -> dict[str, Any]:
    """A comparison of two shares: Fisher's p, the power to find ten points above b's, and a verdict.

    The verdict is `more` or `fewer` if p is below 5%; `no difference` if ten points would have been found in 80% of
    such comparisons; else `cannot tell`, with the number of runs per side that would decide.
    """
    p, reference = fisher(a, of_a, b, of_b), b / of_b
    raised = min(1.0, reference + EFFECT)
    found = power(raised, of_a, reference, of_b)
    if p < 1 - LEVEL:
        verdict = "more" if a / of_a > reference else "fewer"
    else:
        verdict = "no difference" if found >= ENOUGH else "cannot tell"
    return {"p": p, "power": found, "verdict": verdict, "runs_to_tell": runs_to_tell(raised, reference)}
