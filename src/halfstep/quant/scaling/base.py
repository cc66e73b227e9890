"""What a scale rule does: from the numbers of a tile to the scale that is stored, and from that to a multiplier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from halfstep.formats import Format
from halfstep.quant.tile import Tile


Stored = dict[str, Tensor]
"""The tensors a rule keeps beside the codes; `scale` is always one of them, with an entry a tile."""


@dataclass(frozen=True)
class Scaling(ABC):
    """A rule for the scales of tiles.

    A tile with an infinity or NaN gets a scale that is NaN, and with it every element of that tile; a multiplier of 0
    stands for a tile of zeros.
    """

    name: str

    exact: ClassVar[bool] = False
    """Whether multipliers are powers of two: then an element is rounded from the exact quotient x / multiplier, and
    otherwise from the quotient in float32 (in float64 for float64 input)."""

    @abstractmethod
    def scale(self, x: Tensor, tile: Tile, element: Format) -> tuple[Stored, Tensor]:
        """What is stored for a (rows, columns) matrix, and what the elements of each tile are divided by."""

    @abstractmethod
    def multiplier(self, stored: Stored, element: Format) -> Tensor:
        """What the elements of each tile are multiplied by: (tile rows, tile columns), float32."""

    def layout(self, grid: tuple[int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Name, dtype and shape of every tensor stored for that grid of tiles."""
        return {"scale": (torch.float32, grid)}


def finite(amax: Tensor) -> Tensor:
    """`amax` with NaN for every tile whose maximum is not finite."""
    return torch.where(amax.isfinite(), amax, torch.nan)
