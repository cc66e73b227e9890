"""The scales of a matrix's tiles as a GPU's matrix units read them: their order in memory, strides and padding.

Source: the checks of PyTorch's ScaledBlas.cpp; the order of blocks of 128x4 scales is cuBLASLt's for one-dimensional
block scaling ("32_4_4").
"""

from __future__ import annotations

from torch import Tensor

from halfstep.quant.padding import pad


def outer(scales: Tensor) -> Tensor:
    """The scales of tiles of 1x128, (rows, tiles across), with strides (1, rows): itself where it lies so. One tile
    across may have another second stride, which is not supported."""
    return scales.t().contiguous().t()


def padded(scales: Tensor) -> Tensor:
    """The scales of tiles of 128x128, (tiles down, tiles across), transposed and with zeros to a multiple of 4: (across
    in fours, down) with strides (1, across in fours)."""
    return pad(scales, (0, -scales.shape[1] % 4)).contiguous().t()


def swizzled(scales: Tensor) -> Tensor:
    """The scales of short tiles along rows, (rows, tiles across), in one dimension: blocks of 128 rows and 4 tiles,
    filled up with zeros, one after another along the rows; in a block the rows 32 apart side by side.

    Entry (r, c) goes to ((r // 128) * ceil(tiles / 4) + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4.
    """
    rows, across = scales.shape
    whole = pad(scales, (0, -across % 4, 0, -rows % 128))
    blocks = whole.view(whole.shape[0] // 128, 4, 32, whole.shape[1] // 4, 4)
    return blocks.permute(0, 3, 2, 1, 4).reshape(-1)
