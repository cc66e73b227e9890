"""Expectations of functions of independent N(0, 1) numbers, integrated on grids: exact to ten digits.

A sum over an even grid is exact, to within rounding, for a smooth function times the density of N(0, 1). A softmax over
s logits m z divides by a random sum S, whose powers an integral brings to the top: 1 / S^k is that of t^(k-1) e^(-t S)
over t from 0 to infinity, by Gamma(k), and the expectation of e^(-t S) is a product of s equal ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray


Array = NDArray[np.float64]
_Z: Array = np.linspace(-14.0, 14.0, 1401)
_WEIGHTS: Array = np.exp(-_Z * _Z / 2) * 0.02 / math.sqrt(2 * math.pi)
_STEP = 0.1  # of log t


def expectation(function: Callable[[Array], Any]) -> float:
    """E[f(z)] of a smooth function of one number.

    >>> round(expectation(lambda z: z**4), 12)
    3.0
    """
    return float(_WEIGHTS @ function(_Z))


class Softmax:
    """Moments of p = softmax(m z) over s independent z, for any s: E[p_1^2], and what its gradient has."""

    def __init__(self, spread: float, longest: int) -> None:
        """Logits of the standard deviation `spread`, over at most `longest` of them."""
        lowest, highest = -math.log(longest) - 9 * spread - 14, 10 * spread + 6
        log_t = np.arange(lowest, highest, _STEP)
        t, exponentials = np.exp(log_t), np.exp(spread * _Z)
        lost = -np.expm1(-t[:, None] * exponentials)
        self.t: Array = t
        self.missing: Array = lost @ _WEIGHTS  # 1 - E[e^(-t e^(m z))]
        self.powers: list[Array] = [(1 - lost) @ (_WEIGHTS * exponentials**k) for k in range(5)]

    def _integral(self, k: int, terms: Array) -> float:
        return float(np.sum(self.t**k * terms)) * _STEP / math.gamma(k)

    def _others(self, count: int) -> Array:
        powers: Array = np.exp(count * np.log1p(-np.minimum(self.missing, 1 - 1e-16)))
        return powers

    def moment(self, k: int, size: int) -> float:
        """E[p_1^k] of a softmax over `size`."""
        return self._integral(k, self.powers[k] * self._others(size - 1))

    def gradient(self, size: int) -> float:
        """E[(p_1 (g_1 - sum_j p_j g_j))^2] for g of N(0, 1): E[p_1^2 (1 - 2 p_1 + sum_j p_j^2)]."""
        both = self._integral(4, self.powers[2] ** 2 * self._others(size - 2))
        return self.moment(2, size) - 2 * self.moment(3, size) + self.moment(4, size) + (size - 1) * both

    def squares(self, size: int) -> float:
        """E[sum_j p_j^2] of a softmax over `size`: the variance of a mix of values of N(0, 1)."""
        return size * self.moment(2, size)

    def squares_up_to(self, size: int) -> float:
        """The sum of `squares` over 1, 2, ..., size: sum_k k r^(k-1) = (1 - r^n (1 + n a)) / a^2 with r = 1 - a."""
        a = self.missing
        small = size * a < 1e-4
        safe = np.where(small, 1.0, a)
        sums = np.where(small, size * (size + 1) / 2, (1 - self._others(size) * (1 + size * a)) / safe**2)
        return self._integral(2, self.powers[2] * sums)
