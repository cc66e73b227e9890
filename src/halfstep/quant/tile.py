"""Tiles: which elements of a tensor share a scale."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from halfstep.errors import QuantizationError


@dataclass(frozen=True)
class Tile:
    """The shape of a tile, whose elements share a scale: `rows` x `columns`, where 0 stands for the whole dimension.

    A tensor is treated as a matrix: its last dimension, and all others flattened to rows. The last tile of a row or
    column may be short.
    """

    rows: int
    columns: int

    def __post_init__(self) -> None:
        if not all(type(size) is int and size >= 0 for size in (self.rows, self.columns)):
            raise QuantizationError(
                f"tile {self.rows}x{self.columns}: expected integers >= 0, 0 for the whole dimension"
            )

    def __str__(self) -> str:
        if not self.rows and not self.columns:
            return "whole tensor"
        return f"{self.rows or 'all'}x{self.columns or 'all'}"

    @property
    def transposed(self) -> "Tile":
        """The tile of the transposed matrix."""
        return Tile(self.columns, self.rows)

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """The number of tiles of a matrix, down and across."""
        return -(-rows // (self.rows or max(rows, 1))), -(-columns // (self.columns or max(columns, 1)))

    def reduce(self, x: Tensor, how: str, fill: float = 0.0) -> Tensor:
        """The `amax`, `amin` or `sum` of each tile: (tile rows, tile columns). Short tiles are padded with `fill`."""
        down, across = self.grid(*x.shape)
        high, wide = self.rows or max(x.shape[0], 1), self.columns or max(x.shape[1], 1)
        padded = F.pad(x, (0, across * wide - x.shape[1], 0, down * high - x.shape[0]), value=fill)
        return getattr(padded.view(down, high, across, wide), how)(dim=(1, 3))

    def spread(self, scales: Tensor, rows: int, columns: int) -> Tensor:
        """Each tile's value repeated for its elements: (tile rows, tile columns) to (rows, columns)."""
        high, wide = self.rows or rows, self.columns or columns
        tall = scales.repeat_interleave(high, 0)[:rows] if scales.shape[0] != 1 else scales.expand(rows, -1)
        return tall.repeat_interleave(wide, 1)[:, :columns] if scales.shape[1] != 1 else tall.expand(-1, columns)


TENSOR = Tile(0, 0)
"""The tile that is the whole tensor."""
ROW = Tile(1, 0)
"""The tile that is a whole row."""


def block(columns: int) -> Tile:
    """The tile of `columns` elements of a row."""
    return Tile(1, columns)


def square(size: int) -> Tile:
    """The tile of `size` x `size` elements."""
    return Tile(size, size)
