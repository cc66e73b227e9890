"""The stored weight takes the update itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep import quant
from halfstep.ops import round_to
from halfstep.optim.masters.base import Kept, Master


@dataclass(frozen=True)
class Own(Master):
    """Nothing is kept: the updated weight is rounded to its stored format, and what does not fit is lost."""

    rounding: str = "nearest_even"
    seed: int | None = None
    """Keys the noise of stochastic rounding."""
    positions: Tensor | None = None
    """Where, in the whole tensor laid out flat, each element of this rank's part of it lies."""

    def start(self, weight: Tensor, full: Tensor) -> Kept:
        weight.copy_(full)
        return {}

    def read(self, weight: Tensor, kept: Kept) -> Tensor:
        return weight.to(torch.float32, copy=True)

    def write(self, weight: Tensor, kept: Kept, updated: Tensor) -> None:
        if self.positions is not None and self.seed is not None:
            updated = quant.round_at(updated, weight.dtype, self.seed, self.positions)
        elif self.rounding != "nearest_even":
            updated = round_to(updated, weight.dtype, self.rounding, overflow="ieee", generator=self.seed)
        weight.copy_(updated)

    def _follow(self, weight: Tensor, kept: Kept) -> None:
        """Nothing is kept beside the weight."""


own = Own("none")
