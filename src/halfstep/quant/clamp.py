"""Outliers clamped before rounding: at signed quantiles of the tensor, or of each of its rows."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property

import torch
from torch import Tensor

from halfstep.errors import QuantizationError, unknown


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
        if self.tile not in TILES:
            raise QuantizationError(unknown("tile of a clamp", self.tile, TILES))
        if self.estimate not in ESTIMATES:
            raise QuantizationError(unknown("estimate of a clamp", self.estimate, ESTIMATES))
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
