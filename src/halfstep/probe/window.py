"""The loss scales at which no gradient overflows and little of any gradient vanishes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from halfstep.bits.limits import Limits
from halfstep.probe.ranges import Range, Site
from halfstep.tracking import ExponentHistogram


FLOOR = 2.0**-40
"""Tensors of gradients that are all smaller are left out when it comes to vanishing: Adam, whose epsilon is 1e-8, moves
no weight by them."""


@dataclass(frozen=True)
class Window:
    """Powers of two, from `smallest` to `largest`; empty where smallest > largest."""

    smallest: float
    """The smallest loss scale at which what vanishes is little of each gradient; 0 where nothing ever does."""
    largest: float
    """The largest one at which no gradient overflows; infinite where all gradients are zero."""
    first_to_vanish: Site | None = None
    """Whose gradient asks for `smallest`."""
    first_to_overflow: Site | None = None
    """Whose gradient overflows beyond `largest`."""

    @property
    def empty(self) -> bool:
        """Whether no loss scale does."""
        return self.smallest > self.largest

    def holds(self, scale: float) -> bool:
        """Whether that loss scale lies in it."""
        return self.smallest <= scale <= self.largest


def window(
    gradients: Iterable[Range], histograms: Mapping[Site, ExponentHistogram], limits: Limits, tolerance: float
) -> Window:
    """The window over all gradients, unscaled ones.

    The largest scale is exact, from the largest magnitudes. The smallest is read off histograms of exponents, a bin
    counting as 1.5 * 2^e: at it, what vanishes is at most `tolerance` of each gradient's sum of magnitudes. Gradients
    below `FLOOR` do not count there.
    """
    largest, over = math.inf, None
    for found in gradients:
        if found.counts.largest:
            scale = _largest(found.counts.largest, limits.beyond)
            largest, over = min((largest, over), (scale, found.site), key=lambda pair: pair[0])
    smallest, under = 0.0, None
    for site, histogram in histograms.items():
        scale = _smallest(histogram, limits, tolerance)
        smallest, under = max((smallest, under), (scale, site), key=lambda pair: pair[0])
    return Window(smallest, largest, under, over)


def _largest(magnitude: float, beyond: float) -> float:
    """The largest power of two that times the magnitude stays below `beyond`."""
    mantissa, exponent = math.frexp(magnitude)
    end, top = math.frexp(beyond)  # m 2^e 2^k < b 2^t: k = t - e if m < b, else one less
    return 2.0 ** (top - exponent - (mantissa >= end))


def _smallest(histogram: ExponentHistogram, limits: Limits, tolerance: float) -> float:
    """The smallest power of two at which bins that vanish hold at most that share of the sum of magnitudes."""
    if limits.vanishing < 0 or max(histogram.counts, default=-math.inf) < math.log2(FLOOR):
        return 0.0
    lowest = min(histogram.counts)
    masses = {exponent: n * 2.0 ** (exponent - lowest) for exponent, n in sorted(histogram.counts.items())}
    allowed, below = tolerance * sum(masses.values()), 0.0
    tie = math.frexp(limits.format.smallest / 2)[1] - 1
    for exponent, mass in masses.items():
        below += mass
        if below > allowed:  # this bin must stay: bin e vanishes at scale 2^k if 2^(e + k) < smallest / 2
            return 2.0 ** (tie - exponent)
    return 0.0
