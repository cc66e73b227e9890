"""The stored weight takes the update itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from halfstep.quant.cast import round_at, round_to
from halfstep.quant.masters.base import Kept, Master


@dataclass(frozen=True)
class Own(Master):
    """Nothing is kept: the updated weight is rounded to its stored format, and what does not fit is lost."""

    rounding: str = "nearest_even"  # type: ignore[misc]
    seed: int | None = None  # type: ignore[misc]
    positions: Tensor | None = None  # type: ignore[misc]
    round_to: Callable[..., Tensor] = round_to
    """`quant.round_to`, or what is faster and equal to it."""

    weights: ClassVar = ("fp32", "bf16", "fp16")

    def start(self, weight: Tensor, full: Tensor) -> Kept:
        weight.copy_(full)
        return {}

    def read(self, weight: Tensor, kept: Kept) -> Tensor:
        return weight.to(torch.float32, copy=True)

    def write(self, weight: Tensor, kept: Kept, updated: Tensor) -> None:
        if self.positions is not None and self.seed is not None:
            updated = round_at(updated, weight.dtype, self.seed, self.positions)
        elif self.rounding != "nearest_even":
            updated = self.round_to(updated, weight.dtype, self.rounding, overflow="ieee", generator=self.seed)
        weight.copy_(updated)

    def follow(self, weight: Tensor, kept: Kept) -> None:
        """Nothing is kept beside the weight."""


own = Own("none")
