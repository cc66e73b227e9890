"""What is reported of a tensor's, or a role's, values: figures read off the table of one pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from halfstep import formats
from halfstep.bits.scan import Channels, Scan
from halfstep.bits.table import Counts, Table, held_bits
from halfstep.formats import Float


EXACT = ("bf16", "fp16", "float8_e4m3fn", "float8_e5m2")
"""Formats for which it is counted what they hold exactly."""

_SCALED = EXACT[2:]


@dataclass(frozen=True)
class Statistics:
    """Counts of a tensor's values. Shares are of the finite values that are not zero."""

    values: int
    zeros: int
    infinities: int
    nans: int
    significant_bits: int
    """The fewest significant bits that hold every value."""
    by_bits: tuple[int, ...]
    """Values by the significant bits that they need, from 1 bit on."""
    lowest_exponent: int
    exponents: tuple[int, ...]
    """Values by floor(log2 |x|), from `lowest_exponent` on."""
    amax: float
    smallest: float
    subnormal: int
    """Below the smallest normal value of the stored type."""
    fp16_subnormal: int
    """2^-24 <= |x| < 2^-14."""
    fp16_below: int
    """Below fp16's smallest value, 2^-24."""
    fp16_above: int
    """2^16 and more, where fp16 has only infinity."""
    exact: Mapping[str, float]
    """The share that each format holds exactly."""
    exact_scaled: Mapping[str, tuple[int, float]]
    """For formats of 8 bits: the shift k of the best scale 2^k under which nothing overflows, and the share."""
    channels: Channels | None = None

    @property
    def highest_exponent(self) -> int:
        """The largest exponent in use."""
        return self.lowest_exponent + len(self.exponents) - 1

    @property
    def nonzero(self) -> int:
        """Finite values that are not zero."""
        return sum(self.exponents)

    @property
    def nonfinite(self) -> int:
        """Infinities and NaN."""
        return self.infinities + self.nans

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def statistics(scan: Scan, stored: Float | None) -> Statistics:
    """The figures of one tensor."""
    return of_table(scan.table, stored, scan.amax, scan.smallest, scan.channels)


def of_table(
    table: Table, stored: Float | None, amax: float, smallest: float, channels: Channels | None = None
) -> Statistics:
    """The figures of counted values that are stored as `stored` (None: mixed, or no binary format of ours)."""
    low, high = -(1 << 12), 1 << 12
    total = table.nonzero or 1
    by_bits = table.by_bits[1:]
    shifts = [table.top_shift(_format(name)) for name in _SCALED]
    scaled = tuple((name, shift) for name, shift in zip(_SCALED, shifts, strict=True) if shift is not None)
    held = table.held(_held_bits(scaled, table.lowest, len(table.counts)))
    exact = {k: (count - table.beyond_largest(_format(k))) / total for k, count in zip(EXACT, held, strict=False)}
    return Statistics(
        values=table.size,
        zeros=table.zeros,
        infinities=table.infinities,
        nans=table.nans,
        significant_bits=table.significant_bits,
        by_bits=tuple(by_bits[: table.significant_bits].tolist()),
        lowest_exponent=table.lowest,
        exponents=tuple(table.exponents.tolist()),
        amax=amax,
        smallest=smallest,
        subnormal=table.between(low, stored.min_exponent) if stored else 0,
        fp16_subnormal=table.between(-24, -14),
        fp16_below=table.between(low, -24),
        fp16_above=table.between(16, high),
        exact=exact,
        # Under the shift that leaves none above the largest value.
        exact_scaled={k: (shift, n / total) for (k, shift), n in zip(scaled, held[len(EXACT) :], strict=True)},
        channels=channels,
    )


@lru_cache(1 << 10)
def _held_bits(scaled: tuple[tuple[str, int], ...], lowest: int, count: int) -> Counts:
    """The significant bits of each exponent's values: a row for each format of EXACT, then for the scaled ones."""
    shifts = (*((name, 0) for name in EXACT), *scaled)
    found = np.array([held_bits(_format(name), lowest - shift, count) for name, shift in shifts])
    found.flags.writeable = False
    return found


@cache
def _format(name: str) -> Float:
    return formats.get(name, Float)
