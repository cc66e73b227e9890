"""How surprising it is that values fit a narrower format, if their mantissas were random: counted in bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from halfstep.bits.scan import Scan
from halfstep.bits.table import WIDTH, Table, first_look, held_bits, scaled
from halfstep.formats import Float
from halfstep.kernels.cpu import tables as kernel
from halfstep.kernels.cpu.tables import First


ENOUGH = 10.0
"""Bits of evidence below which nothing is concluded: a chance of 1 in 1000."""

CERTAIN = 40.0
"""Bits from which on a conclusion counts as certain: a chance of 1 in 10^12."""

MIXED = 0.01
"""The least share of values which is that of a mixture."""

SHORT = 4
"""Of random mantissas one in 2^SHORT leaves so many of the last bits unused."""

CHOSEN = 2
"""Magnitudes whose fit is no evidence: a format and a scale are chosen after the values were seen, so that they fit."""


_ANY = (1 << 20, -(1 << 20), WIDTH - 1, False)  # as a format: 53 bits, without ends


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
    short: int = 0
    """Values beyond that leave SHORT or more of the last bits unused: of random mantissas one in 2^SHORT does."""
    filled: int = 0
    """Those of `held` that use the narrower format's last bit: of random mantissas a half."""

    @property
    def share(self) -> float:
        """The share of the values that could tell which lie on the grid."""
        return self.held / (self.held + self.beyond) if self.held + self.beyond else 0.0

    @property
    def mixed(self) -> bool:
        """Whether clearly more values fit than by chance, and the others have random mantissas: values of the narrower
        type, of which some were written since. Averages and sums of such values have short mantissas of any length.
        """
        written = self.beyond / 2**SHORT
        random = self.short <= 2 * written + 3 * np.sqrt(written) + 1
        evident = self.bits >= CERTAIN and self.share >= max(MIXED, 3 * self.expected)
        return evident and bool(random) and 4 * self.filled >= self.held

    @property
    def accepted(self) -> bool:
        """Whether all of them do, and chance does not explain it."""
        return self.beyond == 0 and self.bits >= ENOUGH


def fit(scan: Scan, narrow: Float, wide: Float | None, used: int = WIDTH) -> Fit:
    """How the values of a tensor, which `wide` holds (None: 53 bits), fit `narrow`.

    Random mantissas are those of `wide`, or of as many bits as are `used`.
    """
    few, most = _ends(narrow, wide, scan.table.lowest, len(scan.table.counts), used)
    # Where the narrower one has no fewer bits for any of the exponents, no value could tell.
    return Fit() if few is most else _fit(scan, few, most)


def first_looks(tables: Sequence[Table], wide: Float | None, formats: Sequence[Float]) -> list[First]:
    """What a first look at tables of values that `wide` holds (None: 53 bits) says of these formats: in one call."""
    few = max((one.significant_bits for one in formats), default=0)
    return first_look(tables, [scaled(wide) if wide else _ANY, *map(scaled, formats)], (few, SHORT, MIXED, CERTAIN))


def fit_bits(scan: Scan, wide: Sequence[Float | None], step: int | None = None) -> float:
    """The evidence that values of random mantissas, which all of `wide` hold, would use more significant bits than
    these do, or not all be multiples of 2^step; the number of bits, or the step, was chosen to fit.
    """
    table, most = (
        scan.table,
        np.min([_ends(None, one, scan.table.lowest, len(scan.table.counts), WIDTH)[1] for one in wide], axis=0),
    )
    few = np.full(most.size, table.significant_bits) if step is None else np.maximum(table.rows - step + 1, 0)
    found = _fit(scan, np.minimum(few, most), most).bits - np.log2(WIDTH if step is None else table.rows.size)
    return max(0.0, float(found))


def halved(scan: Scan, look: First) -> tuple[int, float]:
    """The bits that half of the values fit, the others not, and the evidence that random mantissas of as many bits as
    are in use would not.
    """
    count, left = scan.table.told, look.left
    # At most (4p)^(n/2): the chance that half of n values do what each does with a chance of p = 2^-left.
    evidence = count / 2 * (left - 2) * _weight(scan, count) if left >= SHORT else 0.0
    return look.most - left, evidence


@lru_cache(1 << 10)
def _ends(
    narrow: Float | None, wide: Float | None, lowest: int, count: int, used: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The significant bits of each exponent's values in a format and in a wider one (None: 53), of which so many are
    used; read-only, for they are kept.
    """
    most, few = (np.full(count, WIDTH - 1) if one is None else held_bits(one, lowest, count) for one in (wide, narrow))
    most = np.minimum(most, used)
    few = most if (few >= most).all() else np.minimum(few, most)
    few.flags.writeable = most.flags.writeable = False
    return few, most


def _weight(scan: Scan, count: int) -> float:
    """The share of `count` values that is evidence: equal ones count once, those of CHOSEN magnitudes not at all."""
    once = min(1.0, scan.distinct / count) if count else 0.0
    return once * max(0.0, 1 - CHOSEN / scan.magnitudes) if scan.magnitudes else 0.0


def _fit(scan: Scan, few: NDArray[np.int64], most: NDArray[np.int64]) -> Fit:
    held, able, seen = kernel.fitting(scan.table.counts, scan.table.telling, few, most, SHORT)
    count, (inside, short, filled) = int(held.sum()), seen.tolist()
    beyond = scan.table.nonzero - inside
    if not count:
        return Fit(0, beyond, short=short, filled=filled)
    chance = (2.0 ** np.maximum(few - 1, 0) - 1) / (2.0 ** np.maximum(most - 1, 1) - 1)
    bits = float((held * -np.log2(np.where(held > 0, chance, 1.0))).sum())
    expected = float((able * chance).sum() / able.sum())
    return Fit(count, beyond, bits * _weight(scan, count), expected, short, filled)
