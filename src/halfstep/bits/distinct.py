"""The distinct magnitudes of a tensor, where they are few."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep.bits.places import as_doubles
from halfstep.bits.table import Table, tells
from halfstep.bits.values import Values


LEVELS = 256
"""Distinct values that a format of 8 bits can have."""

_AGAIN = 1 << 18  # bytes of a piece of a tensor of few levels, which is read again


@dataclass(frozen=True)
class Levels:
    """Few distinct magnitudes, ascending, and how often each was seen."""

    magnitudes: NDArray[np.float64]
    times: NDArray[np.int64]
    low: float = 0.0
    """The smallest value, or zero if all are above it; of a wide type among those that were looked at."""
    high: float = 0.0
    """The largest one, or zero."""


def may_be_few(table: Table, values: NDArray[Any]) -> bool:
    """Whether the values of a table may be of few levels, which some that were seen are."""
    if not table.nonzero > LEVELS or values.size > 2 * LEVELS + 4:  # with signs, zero and what is not finite
        return False
    return np.unique(np.abs(values)).size <= LEVELS and bool(table.telling.any())


def levels_of(tensor: Values, known: NDArray[np.float32]) -> Levels | None:
    """The distinct magnitudes of a float32 tensor and their counts; None where there are more than LEVELS.

    It reads the tensor again: which has few of them among the values that were seen.
    """
    codes = np.unique(np.abs(known)).view(np.uint32)
    times = np.zeros(codes.size, np.int64)
    for piece in tensor.chunks(_AGAIN):
        magnitudes = piece.view(np.uint32) & np.uint32(0x7FFFFFFF)
        place = np.minimum(np.searchsorted(codes, magnitudes), codes.size - 1)
        held = codes[place] == magnitudes
        new, counts = np.unique(magnitudes[~held], return_counts=True)
        if codes.size + new.size > LEVELS + 2:  # zero and infinity
            return None
        times = times + np.bincount(place[held], minlength=codes.size)
        where = np.searchsorted(codes, new)
        codes, times = np.insert(codes, where, new), np.insert(times, where, counts)
    return counted(as_doubles(codes.view(np.float32)), times, as_doubles(known))


def counted(
    values: NDArray[np.float64], times: NDArray[np.int64], known: NDArray[np.float64] | None = None
) -> Levels | None:
    """The levels of values, of which those that are `known` (None: all) have signs."""
    used = np.isfinite(values) & (values != 0)
    magnitudes, which = np.unique(np.abs(values[used]), return_inverse=True)
    if not 0 < magnitudes.size <= LEVELS:
        return None
    times = np.bincount(which, times[used], minlength=magnitudes.size).astype(np.int64)
    known = values if known is None else known
    known = known[np.isfinite(known)]
    return Levels(magnitudes, times, float(known.min(initial=0.0)), float(known.max(initial=0.0)))


def telling(distinct: NDArray[np.float64]) -> tuple[int, int]:
    """Of distinct values those that tell something, and the distinct magnitudes of these."""
    used = distinct[np.isfinite(distinct) & (distinct != 0)]
    found = np.abs(used[tells(used)])
    return found.size, np.unique(found).size
