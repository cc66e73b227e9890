"""Where a format ends: from which magnitude on values overflow, are subnormal, or vanish."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.errors import FormatError
from halfstep.formats import Float, Format
from halfstep.ops import round_to


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


def limits_of(format: Format, stored: bool) -> Limits:
    """The limits of a format, for tensors stored in it (IEEE overflow) or rounded to it by a quantizer (saturating).

    Raises:
        FormatError: it has no negative values, so that no activation fits it.
    """
    if not format.signed:
        raise FormatError(f"{format.name} has no negative values; probe one that can hold activations, such as e4m3fn")
    overflows = stored and isinstance(format, Float) and format.has_infinity
    beyond, normal = _next(format.max), 0.0
    if isinstance(format, Float):
        half_step = 2.0 ** (format.max_exponent - format.mantissa_bits - 1)
        # The tie beyond the largest value has an odd neighbour below it, and so goes to infinity.
        beyond = format.max + half_step if overflows else beyond
        # The tie below the smallest normal value goes up to it, which is even.
        normal = format.min_normal - format.min_subnormal / 2
    tie = format.smallest / 2
    below = _next(tie, 0.0)
    vanishing = tie if _vanishes(tie, format) else below if _vanishes(below, format) else -1.0
    return Limits(format, overflows, beyond, normal, vanishing)


def _vanishes(value: float, format: Format) -> bool:
    return float(round_to(torch.tensor([value], dtype=torch.float64), format)) == 0.0


def _next(value: float, toward: float = float("inf")) -> float:
    start: Tensor = torch.tensor(value, dtype=torch.float32)
    return float(torch.nextafter(start, torch.tensor(toward, dtype=torch.float32)))
