"""What the derivative of rounding is taken for: that of a smooth curve between neighbouring values."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from halfstep.errors import QuantizationError
from halfstep.formats import Format
from halfstep.quant.logarithm import exp2, log2


SMALLEST = 2.0**-60
"""Of |2t/d - 1|, so that log2 has a normal number: there the derivative is 2^48 / 5, or its cap."""
_LARGEST = 2.0**100


@dataclass(frozen=True)
class Estimator:
    """The differentiable gradient estimator: rounding to nearest as a power curve, steep where rounding turns.

    Between neighbouring values v and v + d of a format, with t = x - v and u = 2t/d - 1,

        f(x)  = v + d/2 * (1 + sign(u) |u|^(1/k))
        f'(x) = |u|^(1/k - 1) / k, at most `cap`

    Beyond the largest value f' is that at the largest value, 1/k: nothing is clipped where a scale comes from the
    tensor's amax. Without a cap f' is 1 on average between any two values. A cap of 3 leaves, for k = 3, 5 and 10, a
    mean of 0.778, 0.594 and 0.383: part of what the estimator does is to make the weight's gradient smaller, which Adam
    mostly undoes and SGD does not.

    Source: Wang et al. 2025, arXiv 2501.17116, section 3.1 and appendix C; k = 5 and the cap of 3 are theirs.

    >>> from halfstep import formats
    >>> Estimator().derivative(torch.tensor([0.0, 0.05, 0.25, 5.0]), formats.get("fp4"))
    tensor([0.2000, 0.2391, 3.0000, 3.0000])
    """

    k: float = 5.0
    """1 is straight through; the larger, the nearer f is to rounding."""
    cap: float | None = 3.0
    """The largest derivative; None is none: f' is then at most 2^100, near where rounding turns."""

    def __post_init__(self) -> None:
        if not self.k >= 1 or self.k > 100:
            raise QuantizationError(
                f"an estimator with k = {self.k}; expected a number from 1 (straight through) to 100"
            )
        if self.cap is not None and not 0 < self.cap <= torch.finfo(torch.float32).max:
            raise QuantizationError(f"an estimator with cap = {self.cap}; expected a positive number, or None")
        _ = self.text  # known from here on: a traced graph cannot take a cached property's lock

    @cached_property
    def text(self) -> str:
        """Its fields as text, for operators of a traced graph: of numbers `torch.compile(dynamic=True)` makes
        inputs of the graph."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        return f"estimator k={self.k:g}" + ("" if self.cap is None else f" cap={self.cap:g}")

    @property
    def exponent(self) -> float:
        """1/k - 1."""
        return 1 / self.k - 1

    @property
    def largest(self) -> float:
        """What f' does not exceed."""
        return _LARGEST if self.cap is None else min(self.cap, _LARGEST)

    def derivative(self, scaled: Tensor, format: Format) -> Tensor:
        """f' at each number, in float32: numbers as they are rounded, after their scale.

        NaN gives NaN. Kernels give these bits: log2 and exp2 are `quant.logarithm`'s, within 1e-6 of the curve.
        """
        x = scaled.float()
        low, gap = _neighbours(x, format)
        away = ((x - (low + gap / 2)).abs() * (2 / gap)).clamp(max=1, min=SMALLEST)
        found = exp2(log2(away) * self.exponent) * (1 / self.k)
        return torch.where(x.isnan(), x, found.clamp(max=self.largest))

    def curve(self, scaled: Tensor, format: Format) -> Tensor:
        """f at each number, in float64; beyond the largest value, that value."""
        x = scaled.double()
        low, gap = _neighbours(x, format)
        place = ((x - low) * (2 / gap) - 1).clamp(-1, 1)
        rise = place.sign() * place.abs() ** (1 / self.k)
        inside = x.clamp(format.min, format.max)
        return torch.where(inside == x, low + gap / 2 * (1 + rise), inside)


def _neighbours(x: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """The value below and the gap to the next one; at the ends, those of the last two values."""
    values = _values(format).to(x)
    index = (torch.searchsorted(values, x.contiguous(), right=True) - 1).clamp(0, len(values) - 2)
    return values[index], values[index + 1] - values[index]


@cache
def _values(format: Format) -> Tensor:
    return torch.tensor(format.values(), dtype=torch.float64, device="cpu")
