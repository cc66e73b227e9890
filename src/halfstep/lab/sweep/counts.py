"""Shares of runs and the difference of two: Wilson's interval, Fisher's exact test, and its power. No torch."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from math import comb, sqrt
from statistics import NormalDist
from typing import Any

from halfstep.lab.interval import LEVEL, Interval


EFFECT = 0.1
"""The difference of two shares that a comparison is to find: ten points, as 18 of 188 against 0 of 70 (Lee et al.)."""
ENOUGH = 0.8
"""The power below which a comparison that finds nothing says nothing."""
_MOST = 2000  # runs a side that are looked at for a power


def wilson(hits: int, runs: int, level: float = LEVEL) -> Interval:
    """The share of runs that hit, with that confidence: Wilson's score interval, which is sane at 0 and at all.

    Source: Wilson 1927, Probable inference, the law of succession, and statistical inference.

    >>> wilson(18, 188)
    Interval(low=0.0614..., high=0.1462...)
    """
    z = NormalDist().inv_cdf((1 + level) / 2)
    centre, spread = hits + z * z / 2, z * sqrt(hits * (runs - hits) / runs + z * z / 4)
    return Interval(max(0.0, (centre - spread) / (runs + z * z)), min(1.0, (centre + spread) / (runs + z * z)))


@cache
def fisher(a: int, of_a: int, b: int, of_b: int) -> float:
    """The two-sided p of Fisher's exact test of a hits of of_a runs against b of of_b.

    The probability, given the sum of hits, of every split that is at most as probable as the one found.

    >>> round(fisher(18, 188, 0, 70), 4)
    0.0044
    """
    hits, runs = a + b, of_a + of_b
    weights = {k: comb(of_a, k) * comb(of_b, hits - k) for k in range(max(0, hits - of_b), min(of_a, hits) + 1)}
    return sum(w for w in weights.values() if w <= weights[a]) / comb(runs, hits)


def power(share_a: float, of_a: int, share_b: float, of_b: int, level: float = LEVEL) -> float:
    """How often Fisher's test finds a difference where the true shares are these: the sum over all outcomes.

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
    """Runs a side with which two such shares are told apart with that power, nearly; None for more than 2,000.

    By the normal distribution with Yates' correction, which is close to Fisher's test.

    Source: Casagrande, Pike and Smith 1978, An improved approximate formula for calculating sample sizes.
    """
    gap, mean = abs(share_a - share_b), (share_a + share_b) / 2
    if not gap:
        return None
    z, y = NormalDist().inv_cdf((1 + LEVEL) / 2), NormalDist().inv_cdf(wanted)
    spread = share_a * (1 - share_a) + share_b * (1 - share_b)
    plain = (z * sqrt(2 * mean * (1 - mean)) + y * sqrt(spread)) ** 2 / gap**2
    count = plain / 4 * (1 + sqrt(1 + 4 / (plain * gap))) ** 2
    return round(count + 0.5) if count <= _MOST else None


def _outcomes(share: float, runs: int) -> dict[int, float]:
    return {k: comb(runs, k) * share**k * (1 - share) ** (runs - k) for k in range(runs + 1)}


def share(hits: int, runs: int) -> dict[str, Any]:
    """A share with its interval, for JSON."""
    return {"hits": hits, "runs": runs, "interval": asdict(wilson(hits, runs)) if runs else None}


def compared(a: int, of_a: int, b: int, of_b: int) -> dict[str, Any]:
    """Two shares beside each other: Fisher's p, the power to find ten points above b's, and a verdict.

    `more` or `fewer` where p is below 5%; `no difference` where ten points would have been found in 80% of such
    comparisons; else `cannot tell`, with the runs a side that would.
    """
    p, reference = fisher(a, of_a, b, of_b), b / of_b
    raised = min(1.0, reference + EFFECT)
    found = power(raised, of_a, reference, of_b)
    if p < 1 - LEVEL:
        verdict = "more" if a / of_a > reference else "fewer"
    else:
        verdict = "no difference" if found >= ENOUGH else "cannot tell"
    return {"p": p, "power": found, "verdict": verdict, "runs_to_tell": runs_to_tell(raised, reference)}
