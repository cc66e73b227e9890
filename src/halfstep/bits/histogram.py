"""Values counted by binary exponent, and what a format does to each binade [2^e, 2^(e+1)). Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halfstep.formats import Float


@dataclass(frozen=True)
class Binades:
    """The exponents at which rounding to nearest in a format changes."""

    zeroed: int
    """Binades below become zero. (A value becomes zero at half the smallest subnormal and below, so only the value on
    that tie is counted wrong.)"""
    normal: int
    """Binades below become subnormal, or zero."""
    beyond: int
    """Binades from here on are beyond the largest value."""


def binades(format: Float) -> Binades:
    """The `Binades` of a format.

    >>> from halfstep import formats
    >>> binades(formats.get("fp16", Float))
    Binades(zeroed=-25, normal=-14, beyond=16)
    """
    return Binades(format.min_exponent - format.mantissa_bits - 1, format.min_exponent, format.max_exponent + 1)


@dataclass(frozen=True)
class ExponentHistogram:
    """How many values have each exponent floor(log2 |x|), and how many are zero or not finite."""

    counts: Mapping[int, int]
    zeros: int = 0
    nonfinite: int = 0

    @property
    def size(self) -> int:
        """The number of values, zeros and infinities included."""
        return sum(self.counts.values()) + self.zeros + self.nonfinite

    def share_zeroed(self, format: Float, scale: float = 1.0) -> float:
        """The share of the nonzero values that become zero in a cast to `format` after multiplying by `scale`, a power
        of two."""
        return self._share(-math.inf, binades(format).zeroed, scale)

    def share_subnormal(self, format: Float, scale: float = 1.0) -> float:
        """The share of the nonzero values that become subnormal in `format`, after multiplying by `scale`."""
        ends = binades(format)
        return self._share(ends.zeroed, ends.normal, scale)

    def share_beyond(self, format: Float, scale: float = 1.0) -> float:
        """The share of the nonzero values that are beyond `format`, after multiplying by `scale`.

        Values between its largest one and the next power of two are not counted.
        """
        return self._share(binades(format).beyond, math.inf, scale)

    def _share(self, low: float, high: float, scale: float) -> float:
        """The share of the nonzero values in the binades low <= e < high, after multiplying by `scale`."""
        total, shift = sum(self.counts.values()), _log2(scale)
        return sum(n for e, n in self.counts.items() if low <= e + shift < high) / total if total else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Data for JSON, with exponents as keys, ascending."""
        return {
            "counts": {str(e): n for e, n in sorted(self.counts.items())},
            "zeros": self.zeros,
            "nonfinite": self.nonfinite,
        }


def _log2(scale: float) -> int:
    mantissa, exponent = math.frexp(scale)
    if mantissa != 0.5:
        raise ValueError(f"scale {scale} given; expected a power of two")
    return exponent - 1
