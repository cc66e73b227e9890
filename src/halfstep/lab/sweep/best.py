"""Each recipe's best learning rate, and how sure that is: paired resamples of the seeds. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep.lab.interval import LEVEL, Interval


RESAMPLES = 2000


@dataclass(frozen=True)
class Best:
    """A recipe's best learning rate, by the mean loss over the seeds."""

    lr: float
    loss: float
    """At it, the mean over the seeds."""
    interval: Interval
    """Of that loss, the rate chosen again in every resample: the chance of choosing counts too."""
    rates: Mapping[float, float]
    """By learning rate, the share of the resamples in which it is the best."""
    gap: float | None = None
    """The loss at its best rate less the baseline's at the baseline's, relative to the latter; positive is worse."""
    gap_interval: Interval | None = None
    other_rate: float | None = None
    """The share of the resamples in which its best rate is not the baseline's."""


def best_rates(
    losses: Mapping[str, Sequence[Sequence[float]]], rates: Sequence[float], baseline: str | None
) -> dict[str, Best]:
    """The best rate of each recipe that has one.

    Args:
        losses: by recipe, the final losses, (rates, seeds), inf for a run without one. Seeds are the same for all
            recipes and rates, and are drawn together.
    """
    drawn = {}
    generator = np.random.default_rng(0)
    seeds = len(next(iter(losses.values()))[0])
    picks = generator.integers(0, seeds, size=(RESAMPLES, seeds))
    for recipe, table in losses.items():
        values = np.asarray(table, dtype=np.float64)
        if np.isfinite(values.mean(1)).any():
            means = values[:, picks].mean(2)  # (rates, resamples)
            drawn[recipe] = int(values.mean(1).argmin()), float(values.mean(1).min()), means.argmin(0), means.min(0)
    found = {}
    for recipe, (place, loss, places, lowest) in drawn.items():
        shares = {rate: float((places == i).mean()) for i, rate in enumerate(rates)}
        best: dict[str, Any] = {"lr": rates[place], "loss": loss, "interval": _interval(lowest), "rates": shares}
        if baseline in drawn and recipe != baseline:
            _, other, their_places, their_lowest = drawn[baseline]
            best["gap"] = loss / other - 1
            best["gap_interval"] = _interval(lowest / their_lowest - 1)
            best["other_rate"] = float((places != their_places).mean())
        found[recipe] = Best(**best)
    return found


def _interval(values: NDArray[np.float64]) -> Interval:
    low, high = np.quantile(values[np.isfinite(values)], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high))
