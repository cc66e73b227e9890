"""Loss spikes: steps whose loss is far above that of the steps before. No torch."""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


WINDOW, THRESHOLD, LEAST = 50, 6.0, 20
_NORMAL = 1.4826  # the standard deviation of a normal distribution in median absolute deviations


@dataclass(frozen=True)
class Spike:
    """Consecutive steps above the threshold."""

    start: int
    """The index of the first step in the series, from 0."""
    length: int
    height: float
    """The largest distance above the trailing median, in robust standard deviations; infinite for a non-finite loss."""


def spikes(losses: Sequence[float | None], window: int = WINDOW, threshold: float = THRESHOLD) -> list[Spike]:
    """The spikes of a series of training losses, one per step.

    A step is above the threshold if (loss - median) / (1.4826 MAD) > `threshold`, with the median and the median
    absolute deviation of the last `window` steps that were not. So spikes do not raise the threshold for later steps,
    and a loss that stays up is one long spike. The first 20 steps are never above it; after them None and non-finite
    losses always are. A window without spread (constant losses) has the smallest positive float as its spread.

    >>> level = [1.0, 1.01, 0.99] * 20
    >>> spikes([*level, 2.0, 2.1, *level])
    [Spike(start=60, length=2, height=74.19...)]
    """
    trail: list[float] = []  # in the order of the steps
    ranked: list[float] = []
    found: list[Spike] = []
    for place, loss in enumerate(losses):
        value = math.inf if loss is None or math.isnan(loss) else loss
        height = _height(value, ranked) if len(trail) >= min(LEAST, window) else 0.0
        if height > threshold:
            last = found[-1] if found else None
            if last is not None and last.start + last.length == place:
                found[-1] = Spike(last.start, last.length + 1, max(last.height, height))
            else:
                found.append(Spike(place, 1, height))
        elif math.isfinite(value):
            trail.append(value)
            insort(ranked, value)
            if len(trail) > window:
                del ranked[bisect_left(ranked, trail.pop(0))]
    return found


def _height(value: float, ranked: Sequence[float]) -> float:
    """The distance of a value above the median of sorted values, in robust standard deviations."""
    middle = median(ranked)
    spread = _NORMAL * median(abs(other - middle) for other in ranked)
    return (value - middle) / max(spread, math.ulp(0.0)) if value > middle else 0.0
