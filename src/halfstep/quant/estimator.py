"""Training in FP4 after Wang et al. 2025: smooth derivatives of rounding, and outliers clamped before it."""

import json
from dataclasses import asdict, dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from halfstep.errors import QuantizationError, one_of
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
        return torch.where(x.isnan(), x, (exp2(log2(away) * self.exponent) * (1 / self.k)).clamp(max=self.largest))

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


TILES = ("tensor", "row")
ESTIMATES = ("exact", "histogram")
_CUT = ~0xFFFF  # of float32's bits: sign, exponent and the upper seven of the mantissa


@dataclass(frozen=True)
class Clamp:
    """Values beyond the quantiles q_(1-a) and q_a are clamped to them, a being `quantile`.

    The quantile at a stands at place a (n - 1) of the n values in order, from 0, between two of them in proportion, as
    `torch.quantile` has it. A tile with an infinity or NaN becomes NaN, so that it is seen.

    Source: Wang et al. 2025, arXiv 2501.17116, section 3.2: outlier clamping and compensation. Whether the paper's
    quantiles are a tensor's is not said there; the released code's are a token's, without compensation.
    """

    quantile: float = 0.99
    tile: str = "tensor"
    """Of what: `tensor`, or `row` (a token)."""
    estimate: str = "exact"
    """`exact`; or `histogram`: of the values cut to 8 significant bits, which is one pass over them, and exact for
    bfloat16. It is nearer to zero than the exact one, by at most 2^-7 of it."""
    compensation: bool = True
    """Whether what clamping takes away stays part of the operand, unrounded and sparse: about 2 (1 - a) of the values.
    A clamp without it loses them; on data with few large values that is worse than no clamp."""

    def __post_init__(self) -> None:
        if not 0.5 < self.quantile < 1:
            raise QuantizationError(f"a clamp at quantile {self.quantile}; expected a number between 0.5 and 1")
        one_of("tile of a clamp", self.tile, TILES, QuantizationError)
        one_of("estimate of a clamp", self.estimate, ESTIMATES, QuantizationError)
        _ = self.text  # known from here on: a traced graph cannot take a cached property's lock

    @cached_property
    def text(self) -> str:
        """Its fields as text, for operators of a traced graph: of numbers `torch.compile(dynamic=True)` makes
        inputs of the graph."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        how = "" if self.estimate == "exact" else f" by {self.estimate}"
        of = "" if self.tile == "tensor" else f" of a {self.tile}"
        return f"clamp {self.quantile:g}{of}{how}" + (", compensated" if self.compensation else "")

    def bounds(self, x: Tensor) -> Tensor:
        """The two quantiles of a matrix: (2, 1) or (2, rows), in float32 (float64 for float64). NaN where a value is
        not finite; 0 where there is none."""
        wide = x if x.dtype == torch.float64 else x.float()
        tiles = wide if self.tile == "row" else wide.reshape(1, -1)
        if not tiles.shape[1]:
            return tiles.new_zeros(2, tiles.shape[0])
        if self.estimate == "histogram":
            tiles = (tiles.float().view(torch.int32) & _CUT).view(torch.float32).to(tiles.dtype)
        found = torch.stack([self._between(*places, tiles) for places in self.places(tiles.shape[1])])
        return torch.where(tiles.isfinite().all(1), found.to(tiles.dtype), torch.nan)

    def places(self, count: int) -> tuple[tuple[int, float], tuple[int, float]]:
        """Where the quantiles stand among so many values in order: the place below, and the share of the way to the
        next. The lower one mirrors the upper one."""
        upper = self.quantile * (count - 1)
        lower = count - 1 - upper
        return (int(lower), lower - int(lower)), (int(upper), upper - int(upper))

    def most_beyond(self, rows: int, columns: int) -> int:
        """How many numbers of a matrix are beyond its exact quantiles where no two are equal: else fewer."""
        tiles, count = (rows, columns) if self.tile == "row" else (1, rows * columns)
        return 2 * tiles * (count - 1 - self.places(count)[1][0]) if count else 0

    @staticmethod
    def _between(place: int, share: float, tiles: Tensor) -> Tensor:
        count = tiles.shape[1]
        low, high = (tiles.kthvalue(min(p, count - 1) + 1, dim=1).values.double() for p in (place, place + 1))
        return low + (high - low) * share

    def parts(self, x: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
        """A matrix clamped at its bounds, and what that takes away; both in the bounds' dtype."""
        wide = x.to(bounds.dtype)
        low, high = bounds[0][:, None], bounds[1][:, None]
        clamped = torch.maximum(torch.minimum(wide, high), low)  # NaN where a bound is
        return clamped, wide - clamped
