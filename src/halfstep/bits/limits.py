"""What a format makes of magnitudes, told from where it ends: which overflow, are subnormal, or become zero."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from halfstep.formats import Float, Format
from halfstep.quant import round_to


@dataclass(frozen=True)
class Limits:
    """The magnitudes at which rounding to nearest changes, each a float32, so that comparing with them is exact."""

    format: Format
    overflows: bool
    """Whether what lies beyond becomes infinite; otherwise it saturates at the largest value."""
    beyond: float
    """From here on values lie beyond the format."""
    normal: float
    """Below this they are rounded to subnormals, or vanish."""
    vanishing: float
    """Up to here they become zero; negative where none does."""

    def zeroed(self, magnitudes: Tensor, zeros: int) -> int:
        """How many of the magnitudes become zero, beside those that are zeros already."""
        return int(torch.count_nonzero(magnitudes <= self.vanishing)) - zeros if self.vanishing >= 0 else 0

    def subnormal(self, magnitudes: Tensor, below: int) -> int:
        """How many become subnormal; `below` of them are zeros already, or become zero."""
        return int(torch.count_nonzero(magnitudes < self.normal)) - below if self.normal > 0 else 0

    def over(self, magnitudes: Tensor) -> int:
        """How many lie beyond the format."""
        return int(torch.count_nonzero(magnitudes >= self.beyond))


@cache
def limits_of(format: Format, stored: bool) -> Limits:
    """The limits of a format, for tensors stored in it (IEEE overflow) or rounded to it by a quantizer (saturating).

    They are those of positive values. Negative ones mirror them, but in some codebooks and in formats without a sign.
    """
    overflows = stored and isinstance(format, Float) and format.has_infinity
    beyond, normal = _next(format.max), 0.0
    if isinstance(format, Float):
        # The tie beyond the largest value has an odd neighbour below it, and so goes to infinity.
        beyond = format.max + 2.0 ** (format.max_exponent - format.mantissa_bits - 1) if overflows else beyond
        # The tie below the smallest normal value goes up to it, which is even.
        normal = float(_float32(format.min_normal - format.min_subnormal / 2))
    tie = format.smallest / 2
    below = _next(tie, 0.0)
    vanishing = tie if _vanishes(tie, format) else below if _vanishes(below, format) else -1.0
    return Limits(format, overflows, beyond, normal, vanishing)


def _vanishes(value: float, format: Format) -> bool:
    return float(round_to(torch.tensor([value], dtype=torch.float64, device="cpu"), format)) == 0.0


def _next(value: float, toward: float = float("inf")) -> float:
    return float(torch.nextafter(_float32(value), _float32(toward)))


def _float32(value: float) -> Tensor:
    """Infinite, or zero, where float32 ends."""
    return torch.tensor(value, dtype=torch.float64, device="cpu").float()
