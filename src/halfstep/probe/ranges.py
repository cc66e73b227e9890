"""The range of one tensor of a model, what a format would make of it, and the loss scales that all gradients allow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.bits.limits import Limits
from halfstep.tracking import ExponentHistogram


MASK = torch.finfo(torch.float32).max  # attention masks add minus this, or minus infinity: no activation


@dataclass(frozen=True)
class Site:
    """A tensor of a model: which module's, and which of its tensors."""

    module: str
    """The module's path; empty for the model itself."""
    kind: str
    """The class of the module."""
    role: str
    """`input`, `output`, `product`, `attention logits`, a parameter's name; `gradient of ...` these."""
    backward: bool = False

    def __str__(self) -> str:
        return f"{self.role} of {self.module or 'the model'} ({self.kind})"


@dataclass(frozen=True)
class Counts:
    """Exact counts over the values of tensors. NaN, and what masks attention, do not count as values."""

    largest: float = 0.0
    """The largest magnitude; infinite or NaN if a value is."""
    values: int = 0
    nonzero: int = 0
    beyond: int = 0
    """Values that overflow, or saturate."""
    subnormal: int = 0
    vanished: int = 0
    """Values other than zero that become zero."""
    magnitude: float = 0.0
    """The sum of all magnitudes."""
    lost: float = 0.0
    """What vanishing and saturating take from it."""

    def __add__(self, other: Counts) -> Counts:
        largest = math.nan if math.nan in (self.largest, other.largest) else max(self.largest, other.largest)
        pairs = ((getattr(self, name), getattr(other, name)) for name in _ADDED)
        return Counts(largest, *(one + two for one, two in pairs))


_ADDED = ("values", "nonzero", "beyond", "subnormal", "vanished", "magnitude", "lost")


def count(x: Tensor, limits: Limits) -> Counts:
    """The counts of one floating tensor, taken in float32."""
    size = x.detach().float().reshape(-1)
    if size.numel() == 0:
        return Counts()
    low, high = map(float, torch.aminmax(size))
    if low <= -MASK:
        size = size[size > -MASK]
        low = float(size.min()) if size.numel() else 0.0
    size = size.abs()
    largest = math.nan if math.isnan(low + high) else max(-low, high) if size.numel() else 0.0
    zeros = size.numel() - int(torch.count_nonzero(size))
    gone = limits.zeroed(size, zeros)
    small = limits.subnormal(size, zeros + gone)
    beyond = limits.over(size) if not largest < limits.beyond else 0
    magnitude = float(size.sum())
    if math.isinf(magnitude):
        magnitude = float(size.sum(dtype=torch.float64))
    lost = float(size[size <= limits.vanishing].sum(dtype=torch.float64)) if gone else 0.0
    if beyond and not limits.overflows:
        lost += float((size[size >= limits.beyond].double() - limits.format.max).sum())
    return Counts(largest, size.numel(), size.numel() - zeros, beyond, small, gone, magnitude, lost)


@dataclass(frozen=True)
class Range:
    """What one tensor of the model held, over all batches, in float32."""

    site: Site
    order: int
    """When it was first seen: the order of execution."""
    counts: Counts
    limits: Limits
    block: bool = False
    """Whether it is the input or output of a repeated block: the residual stream."""

    @property
    def share_beyond(self) -> float:
        """The share of values that overflow or saturate."""
        return self.counts.beyond / self.counts.values if self.counts.values else 0.0

    @property
    def share_subnormal(self) -> float:
        """The share of the non-zero values that become subnormal."""
        return self.counts.subnormal / self.counts.nonzero if self.counts.nonzero else 0.0

    @property
    def share_vanished(self) -> float:
        """The share of the non-zero values that become zero."""
        return self.counts.vanished / self.counts.nonzero if self.counts.nonzero else 0.0

    @property
    def lost(self) -> float:
        """What vanishing and saturating take from the sum of magnitudes, as a share of it."""
        return self.counts.lost / self.counts.magnitude if self.counts.magnitude else 0.0

    @property
    def headroom(self) -> float:
        """Bits between the largest magnitude and the largest value of the format; negative beyond it."""
        return math.log2(self.limits.format.max / self.counts.largest) if self.counts.largest else math.inf

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **asdict(self.site),
            "residual": self.block,
            "largest": self.counts.largest,
            "headroom_bits": number(self.headroom),
            "beyond": self.share_beyond,
            "subnormal": self.share_subnormal,
            "vanished": self.share_vanished,
            "lost": self.lost,
        }


def number(value: float) -> float | None:
    """The number; None if it is infinite or NaN, which JSON has no word for."""
    return value if math.isfinite(value) else None


FLOOR = 2.0**-40
"""Tensors of gradients that are all smaller are left out when it comes to vanishing: Adam, whose epsilon is 1e-8, moves
no weight by them."""


@dataclass(frozen=True)
class Window:
    """Powers of two, from `smallest` to `largest`; empty where smallest > largest."""

    smallest: float
    """The smallest loss scale at which what vanishes is little of each gradient; 0 where nothing ever does."""
    largest: float
    """The largest one at which no gradient overflows; infinite where all gradients are zero."""
    first_to_vanish: Site | None = None
    """Whose gradient asks for `smallest`."""
    first_to_overflow: Site | None = None
    """Whose gradient overflows beyond `largest`."""

    @property
    def empty(self) -> bool:
        """Whether no loss scale does."""
        return self.smallest > self.largest

    def holds(self, scale: float) -> bool:
        """Whether that loss scale lies in it."""
        return self.smallest <= scale <= self.largest


def window(
    gradients: Iterable[Range], histograms: Mapping[Site, ExponentHistogram], limits: Limits, tolerance: float
) -> Window:
    """The window over all gradients, unscaled ones.

    The largest scale is exact, from the largest magnitudes. The smallest is read off histograms of exponents, a bin
    counting as 1.5 * 2^e: at it, what vanishes is at most `tolerance` of each gradient's sum of magnitudes. Gradients
    below `FLOOR` do not count there.
    """
    largest, over = math.inf, None
    for found in gradients:
        if found.counts.largest:
            scale = _largest(found.counts.largest, limits.beyond)
            largest, over = min((largest, over), (scale, found.site), key=lambda pair: pair[0])
    smallest, under = 0.0, None
    for site, histogram in histograms.items():
        scale = _smallest(histogram, limits, tolerance)
        smallest, under = max((smallest, under), (scale, site), key=lambda pair: pair[0])
    return Window(smallest, largest, under, over)


def _largest(magnitude: float, beyond: float) -> float:
    """The largest power of two that times the magnitude stays below `beyond`."""
    mantissa, exponent = math.frexp(magnitude)
    end, top = math.frexp(beyond)  # m 2^e 2^k < b 2^t: k = t - e if m < b, else one less
    return 2.0 ** (top - exponent - (mantissa >= end))


def _smallest(histogram: ExponentHistogram, limits: Limits, tolerance: float) -> float:
    """The smallest power of two at which bins that vanish hold at most that share of the sum of magnitudes."""
    if limits.vanishing < 0 or max(histogram.counts, default=-math.inf) < math.log2(FLOOR):
        return 0.0
    lowest = min(histogram.counts)
    masses = {exponent: n * 2.0 ** (exponent - lowest) for exponent, n in sorted(histogram.counts.items())}
    allowed, below = tolerance * sum(masses.values()), 0.0
    tie = math.frexp(limits.format.smallest / 2)[1] - 1
    for exponent, mass in masses.items():
        below += mass
        if below > allowed:  # this bin must stay: bin e vanishes at scale 2^k if 2^(e + k) < smallest / 2
            return 2.0 ** (tie - exponent)
    return 0.0
