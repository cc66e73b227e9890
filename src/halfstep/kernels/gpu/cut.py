"""How a matrix is cut into the blocks of a kernel's programs: of whole tiles."""

from __future__ import annotations

from typing import NamedTuple

from halfstep.quant import Tile
from halfstep.quant.quantizer import matrix_shape


_LARGEST = 1 << 14  # elements of a tile
_BLOCK = 1 << 12  # elements of a block
WARPS = 8  # of a block of 4096 elements: 16 a thread
_UNIT = 16  # rows of so many elements start where 16 bytes do


class Cut(NamedTuple):
    """How a matrix is cut into blocks."""

    rows: int
    columns: int
    tile: tuple[int, int]
    """Rows and columns of a tile; 0 for a whole dimension."""
    block: tuple[int, int]
    unit: int
    """What the number of columns is known to be a multiple of; the block's columns where it is those."""

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return -(-self.rows // self.block[0]) * -(-self.columns // self.block[1])

    @property
    def programs(self) -> int:
        """A program for each block, or for those that tall tiles lie in."""
        return -(-self.rows // max(self.block[0], self.tile[0])) * -(-self.columns // self.block[1])


def cut(shape: tuple[int, ...], tile: Tile, bits: int) -> Cut | None:
    """The blocks of a tensor of that shape in such tiles, of elements of so many bits; None where no kernel does it:
    tiles of another size than a power of two, or more than a block, and rows whose codes leave bits of a byte over."""
    rows, columns = matrix_shape(shape)
    high, wide = tile.rows, tile.columns
    if 0 in (high, wide) and high + wide > 1:
        return None  # of a whole dimension, only single rows or columns
    if not shape or any(size & (size - 1) for size in (high, wide)) or high * wide > _LARGEST or max(high, wide) > 1024:
        return None
    if (bits == 4 and columns % 2) or (bits == 6 and columns % 4) or (bits in (4, 6) and wide == 1):
        return None
    if high == 1 and wide >= _UNIT and columns % wide == 0:
        return Cut(rows * columns // wide, wide, (1, wide), (_BLOCK // wide, wide), wide)
    across = max(wide, 128)
    return Cut(rows, columns, (high, wide), (_BLOCK // across, across), _UNIT if columns % _UNIT == 0 else 1)
