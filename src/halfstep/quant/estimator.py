"""For training in FP4 as in Wang et al. 2025: smooth derivatives of rounding, and clamped outliers."""

import json
from dataclasses import asdict, dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from halfstep.errors import QuantizationError, one_of
from halfstep.formats import Format
from halfstep.quant.logarithm import exp2, log2


SMALLEST = 2.0**-60
"""The smallest |2t/d - 1|, so that log2 gets a normal float: there the derivative is 2^48 / 5, or its cap."""
_LARGEST = 2.0**100


@dataclass(frozen=True)
class Estimator:
    """The differentiable gradient estimator: the derivative of rounding to nearest, taken as that of a power curve.

    Between neighbouring values v and v + d of a format, with t = x - v and u = 2t/d - 1,

        f(x)  = v + d/2 * (1 + sign(u) |u|^(1/k))
        f'(x) = |u|^(1/k - 1) / k, at most `cap`

    Beyond the largest value f' is that at the largest value, 1/k: nothing is clipped where a scale comes from the
    tensor's amax. Without a cap f' is 1 on average between any two values. A cap of 3 leaves, for k = 3, 5 and 10, a
    mean of 0.778, 0.594 and 0.383: part of the estimator's effect is a smaller gradient of the weight, which Adam
    mostly undoes and SGD does not.

    Source: Wang et al. 2025, arXiv 2501.17116, section 3.1 and appendix C; k = 5 and the cap of 3 are theirs.

    >>> from halfstep import formats
    >>> Estimator().derivative(torch.tensor([0.0, 0.05, 0.25, 5.0]), formats.get("fp4"))
    tensor([0.2000, 0.2391, 3.0000, 3.0000])
    """

    k: float = 5.0
    """1 is straight-through; the larger k, the closer f is to rounding."""
    cap: float | None = 3.0
    """The largest derivative; None: no cap, f' is then at most 2^100, near a boundary of rounding."""

    def __post_init__(self) -> None:
        if not self.k >= 1 or self.k > 100:
            raise QuantizationError(
                f"an estimator with k = {self.k}; expected a number from 1 (straight through) to 100"
            )
        if self.cap is not None and not 0 < self.cap <= torch.finfo(torch.float32).max:
            raise QuantizationError(f"an estimator with cap = {self.cap}; expected a positive number, or None")
        _ = self.text  # cached now: a traced graph cannot take a cached property's lock

    @cached_property
    def text(self) -> str:
        """The fields as text, for operators in a traced graph: `torch.compile(dynamic=True)` makes graph inputs of
        floats."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        return f"estimator k={self.k:g}" + ("" if self.cap is None else f" cap={self.cap:g}")

    @property
    def exponent(self) -> float:
        """1/k - 1."""
        return 1 / self.k - 1

    @property
    def largest(self) -> float:
        """The upper bound of f'."""
        return _LARGEST if self.cap is None else min(self.cap, _LARGEST)

    def derivative(self, scaled: Tensor, format: Format) -> Tensor:
        """f' at each element, in float32; elements are given after scaling, as they are rounded.

        NaN gives NaN. Kernels give the same bits: log2 and exp2 are `quant.logarithm`'s, within 1e-6 of the curve.
        """
        x = scaled.float()
        low, gap = _neighbours(x, format)
        away = ((x - (low + gap / 2)).abs() * (2 / gap)).clamp(max=1, min=SMALLEST)
        return torch.where(x.isnan(), x, (exp2(log2(away) * self.exponent) * (1 / self.k)).clamp(max=self.largest))

    def curve(self, scaled: Tensor, format: Format) -> Tensor:
        """f at each element, in float64; beyond the largest value, that value."""
        x = scaled.double()
        low, gap = _neighbours(x, format)
        place = ((x - low) * (2 / gap) - 1).clamp(-1, 1)
        rise = place.sign() * place.abs() ** (1 / self.k)
        inside = x.clamp(format.min, format.max)
        return torch.where(inside == x, low + gap / 2 * (1 + rise), inside)


def _neighbours(x: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """The value at or below x and the gap to the next one; beyond the ends, those of the last two values."""
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
    """Clamps values to the quantiles q_(1-a) and q_a, where a is `quantile`.

    The quantile at a is at position a (n - 1) of the n values in order, counted from 0, interpolated linearly, as in
    `torch.quantile`. A tile with an infinity or NaN becomes NaN, so that it is noticed.

    Source: Wang et al. 2025, arXiv 2501.17116, section 3.2: outlier clamping and compensation. The paper does not say
    whether its quantiles are a tensor's; the released code's are a token's, without compensation.
    """

    quantile: float = 0.99
    tile: str = "tensor"
    """The values that share quantiles: `tensor`, or `row` (a token)."""
    estimate: str = "exact"
    """`exact`; or `histogram`: the quantile of the values truncated to 8 significant bits, which needs one pass over
    them and is exact for bfloat16. It is closer to zero than the exact one, by at most 2^-7 of it."""
    compensation: bool = True
    """Whether the part that clamping removes stays in the operand, unrounded and sparse: about 2 (1 - a) of the values.
    A clamp without it loses them; on data with few large values that is worse than no clamp."""

    def __post_init__(self) -> None:
        if not 0.5 < self.quantile < 1:
            raise QuantizationError(f"a clamp at quantile {self.quantile}; expected a number between 0.5 and 1")
        one_of("tile of a clamp", self.tile, TILES, QuantizationError)
        one_of("estimate of a clamp", self.estimate, ESTIMATES, QuantizationError)
        _ = self.text  # cached now: a traced graph cannot take a cached property's lock

    @cached_property
    def text(self) -> str:
        """The fields as text, for operators in a traced graph: `torch.compile(dynamic=True)` makes graph inputs of
        floats."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        how = "" if self.estimate == "exact" else f" by {self.estimate}"
        of = "" if self.tile == "tensor" else f" of a {self.tile}"
        return f"clamp {self.quantile:g}{of}{how}" + (", compensated" if self.compensation else "")

    def bounds(self, x: Tensor) -> Tensor:
        """The two quantiles of a matrix: (2, 1) or (2, rows), in float32 (float64 for float64). NaN where a value is
        not finite; 0 for an empty tile."""
        wide = x if x.dtype == torch.float64 else x.float()
        tiles = wide if self.tile == "row" else wide.reshape(1, -1)
        if not tiles.shape[1]:
            return tiles.new_zeros(2, tiles.shape[0])
        if self.estimate == "histogram":
            tiles = (tiles.float().view(torch.int32) & _CUT).view(torch.float32).to(tiles.dtype)
        found = torch.stack([self._between(*places, tiles) for places in self.places(tiles.shape[1])])
        return torch.where(tiles.isfinite().all(1), found.to(tiles.dtype), torch.nan)

    def places(self, count: int) -> tuple[tuple[int, float], tuple[int, float]]:
        """The positions of the two quantiles among `count` sorted values: the index below, and the fraction of the way
        to the next. The lower one mirrors the upper one."""
        upper = self.quantile * (count - 1)
        lower = count - 1 - upper
        return (int(lower), lower - int(lower)), (int(upper), upper - int(upper))

    def most_beyond(self, rows: int, columns: int) -> int:
        """How many elements of a matrix are outside of its exact quantiles if all are distinct; fewer otherwise."""
        tiles, count = (rows, columns) if self.tile == "row" else (1, rows * columns)
        return 2 * tiles * (count - 1 - self.places(count)[1][0]) if count else 0

    @staticmethod
    def _between(place: int, share: float, tiles: Tensor) -> Tensor:
        count = tiles.shape[1]
        low, high = (tiles.kthvalue(min(p, count - 1) + 1, dim=1).values.double() for p in (place, place + 1))
        return low + (high - low) * share

    def parts(self, x: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
        """A matrix clamped to its bounds, and the part that this removes; both in the bounds' dtype."""
        wide = x.to(bounds.dtype)
        low, high = bounds[0][:, None], bounds[1][:, None]
        clamped = torch.maximum(torch.minimum(wide, high), low)  # NaN where a bound is NaN
        return clamped, wide - clamped
