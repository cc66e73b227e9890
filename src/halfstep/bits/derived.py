"""Whether two tensors are one times a factor, roundings of the same values, or the average of one and of a third."""

from __future__ import annotations

import math

import numpy as np

from halfstep.bits.evidence import CERTAIN
from halfstep.bits.pair import Doubles
from halfstep.bits.rounded import nearest, steps
from halfstep.formats import Float


class Multiple:
    """The guess that B is A times one factor, rounded to `stored` (None: float64); a value of either may refute it.

    The factor is that of the least squares of the first values, and a product may be off by half a step and by what the
    factor is. A factor so close to 1 that an ordinary update would look the same is refuted.
    """

    def __init__(self, stored: Float | None) -> None:
        self._bits = stored.significant_bits if stored is not None else 53
        self._least = stored.min_subnormal if stored is not None else 0.0
        self.factor = 0.0
        self.telling = 0
        """Values of B beyond the first that are not zero."""

    def add(self, a: Doubles, b: Doubles) -> bool:
        """Take in the next values; False if one refutes the guess."""
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            return False
        tolerance = 1.1 * 2.0 ** -min(self._bits, 50)
        if not self.factor:
            squares = float(np.dot(a, a))
            self.factor = float(np.dot(a, b)) / squares if squares and math.isfinite(squares) else math.nan
            power = 2.0 ** round(math.log2(abs(self.factor))) if self.factor and math.isfinite(self.factor) else 0.0
            if abs(abs(self.factor) - power) <= tolerance * power:
                self.factor = math.copysign(power, self.factor)
        if not self.factor or not math.isfinite(self.factor) or abs(self.factor - 1) <= 8 * tolerance:
            return False
        product = self.factor * a
        self.telling += int(np.count_nonzero(b))
        return bool((np.abs(b - product) <= tolerance * np.abs(product) + self._least).all())


class Alike:
    """The guess that A and B are roundings of the same values to two formats: half a step of each apart, or less."""

    def __init__(self, one: Float, other: Float) -> None:
        self._one, self._other = one, other

    def add(self, a: Doubles, b: Doubles) -> bool:
        """Take in the next values; False if one refutes the guess."""
        if not np.array_equal(np.isfinite(a), np.isfinite(b)):
            return False
        finite = np.isfinite(a)
        a, b = a[finite], b[finite]
        room = steps(np.abs(a), self._one) + steps(np.abs(b), self._other)
        return bool((2 * np.abs(b - a) <= room).all())


class Average:
    """The guess that B, stored as `stored`, is the average of A and of a third tensor, both in the format `narrow`.

    Then 2B - A is that third one. It lies on the narrow format's grid, within twice what B's own rounding moved it, for
    all values: random ones would by the chance that this width has between two values of the grid.
    """

    def __init__(self, narrow: Float, stored: Float) -> None:
        self._narrow, self._bits = narrow, stored.significant_bits
        self.format = narrow.name
        self.evidence = 0.0

    @property
    def evident(self) -> bool:
        """Whether chance does not explain what was taken in."""
        return self.evidence >= CERTAIN

    def add(self, a: Doubles, b: Doubles) -> bool:
        """Take in the next values; False if one refutes the guess."""
        if not (np.isfinite(a).all() and np.isfinite(b).all() and np.array_equal(nearest(a, self._narrow), a)):
            return False
        third = 2 * b - a
        room = 2.0 ** (1 - self._bits) * np.abs(b)
        if not (np.abs(nearest(third, self._narrow) - third) <= room).all():
            return False
        # What the narrow format holds itself tells nothing: of two neighbours, 2B - A is the next one.
        able = (nearest(b, self._narrow) != b) & (room > 0)
        chance = np.minimum(2 * room[able] / steps(np.abs(third[able]), self._narrow), 1.0)
        self.evidence += float(-np.log2(chance).sum())
        return True
