"""How surprising it is that values fit a narrower format, if their mantissas were random: counted in bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from halfstep.bits.scan import Scan
from halfstep.bits.table import WIDTH, allowed_bits
from halfstep.formats import Float


ENOUGH = 10.0
"""Bits of evidence below which nothing is concluded: a chance of 1 in 1000."""

CERTAIN = 40.0
"""Bits from which on a conclusion counts as certain: a chance of 1 in 10^12."""

CHOSEN = 2
"""Magnitudes whose fit is no evidence: a format and a scale are chosen after the values were seen, so that they fit."""


@dataclass(frozen=True)
class Fit:
    """How many of the values that could tell lie on a narrower format's grid, and the bits of evidence in that.

    Values that could tell are `Table.telling`, of exponents at which the narrower format has fewer bits. Where the
    wider one has a bits and the narrower g, random mantissas fit with a chance of (2^(g-1) - 1) / (2^(a-1) - 1).
    """

    held: int = 0
    beyond: int = 0
    bits: float = 0.0
    """log2 of one over the chance that all of `held` do; equal values count once, those of CHOSEN magnitudes
    not at all."""
    expected: float = 0.0
    """The share that random mantissas would have."""

    @property
    def share(self) -> float:
        """The share of the values that could tell which lie on the grid."""
        return self.held / (self.held + self.beyond) if self.held + self.beyond else 0.0

    @property
    def accepted(self) -> bool:
        """Whether all of them do, and chance does not explain it."""
        return self.beyond == 0 and self.bits >= ENOUGH


def fit(scan: Scan, narrow: Float, wide: Float | None) -> Fit:
    """How the values of a tensor, which `wide` holds (None: 53 bits), fit `narrow`."""
    table = scan.table
    rows = np.arange(len(table.counts))
    most = np.full(rows.size, WIDTH - 1) if wide is None else np.clip(allowed_bits(wide, table.rows), 0, WIDTH - 1)
    few = np.clip(allowed_bits(narrow, table.rows), 0, most)
    fitting = np.cumsum(table.telling, 1)
    able = np.where(few < most, fitting[:, -1], 0)  # values that could fail to fit
    held = np.where(few < most, fitting[rows, few], 0)
    chance = (2.0 ** np.maximum(few - 1, 0) - 1) / (2.0 ** np.maximum(most - 1, 1) - 1)
    bits = float((held * -np.log2(np.where(held > 0, chance, 1.0))).sum())
    count = int(held.sum())
    once = min(1.0, scan.distinct / count) if count else 0.0
    free = max(0.0, 1 - CHOSEN / scan.magnitudes) if scan.magnitudes else 0.0
    expected = float((able * chance).sum() / able.sum()) if able.sum() else 0.0
    return Fit(count, table.nonzero - int(table.sums[rows, few].sum()), bits * once * free, expected)
