"""The operands of a convolution as matrices, whose tiles decide which channels and positions share a scale."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.kernels.cpu.clamp_operators import estimate
from halfstep.ops.operand import Operand, factor_in_use, operand
from halfstep.ops.plain import matrix
from halfstep.quant import TENSOR, Quantizer, Tile
from halfstep.quant.rounding import Seed
from halfstep.quant.tracing import has_memory


@dataclass(frozen=True)
class Layout:
    """How a convolution's tensor is rearranged to (groups, rows, segments, channels), rows of a shared dimension.

    A row is the channels of all segments. Segments are the positions of a filter's window; inputs and outputs have one.
    """

    groups: int
    filters: bool = False
    transposed: bool = False
    """Whether the filters are of a transposed convolution."""
    down: bool = False
    """Whether rows and channels are swapped, since the matmul sums over the rows."""

    @property
    def turned(self) -> "Layout":
        """The layout for the other matmul of the tensor, which sums over this one's rows."""
        return replace(self, down=not self.down)

    def rows(self, x: Tensor) -> Tensor:
        """x as (groups, rows, segments, channels)."""
        groups, first = self.groups, x.shape[0]
        if self.filters:
            parts = x.reshape(groups, first // groups, x.shape[1], x[0, 0].numel())
            parts = parts.permute(0, 2, 3, 1) if self.transposed else parts.permute(0, 1, 3, 2)
        else:
            last = x.movedim(1, -1)
            parts = last.reshape(last[..., 0].numel(), groups, 1, x.shape[1] // groups).transpose(0, 1)
        return parts.transpose(1, 3) if self.down else parts

    def back(self, parts: Tensor, shape: torch.Size) -> Tensor:
        """The inverse of `rows`: a tensor of the given shape."""
        parts = parts.transpose(1, 3) if self.down else parts
        if self.filters:
            return (parts.permute(0, 3, 1, 2) if self.transposed else parts.permute(0, 1, 3, 2)).reshape(shape)
        return parts.transpose(0, 1).reshape(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def places(groups: int) -> Layout:
    """The layout of an input or output (batch, channels, *spatial): a row is a group's channels at one position."""
    return Layout(groups)


def filters(groups: int, transposed: bool) -> Layout:
    """The layout of a weight: a row is one output channel's filter, position by position of the window."""
    return Layout(groups, True, transposed)


def rounded(
    x: Tensor,
    layout: Layout,
    quantizer: Quantizer | None,
    dtype: torch.dtype,
    state: Tensor | None = None,
    record: bool = False,
    seed: Seed | None = None,
) -> Operand:
    """`ops.operand` of a tensor whose rows `layout` gives, in x's shape: its scale is a scalar or None.

    Tiles of several channels start again in each segment, tiles of several rows in each group.
    """
    if quantizer is None:
        return Operand(x.to(dtype))
    tile = quantizer.scales.tile if quantizer.scales is not None else TENSOR
    if (
        tile == TENSOR and quantizer.outliers is None and quantizer.clamp is None
    ):  # elements are rounded one by one, in any order
        last = has_memory(x, or_fake=True) and not x.is_contiguous()  # a traced graph cannot ask for it
        dense = x.movedim(1, -1) if last else x
        made = operand(matrix(dense), quantizer, dtype, state, record, seed=seed)
        values = made.values.view(dense.shape)
        return Operand(values.movedim(-1, 1) if last else values, made.scale)
    parts = layout.rows(x)
    made = operand(_tiled(parts, tile), quantizer, dtype, state, record, seed=seed)
    if made.remainder is not None or (made.scale is not None and made.scale.dim()):
        made = made.widened(dtype)
    return Operand(layout.back(_untiled(made.values, parts.shape, tile), x.shape), made.scale)


def derivative(x: Tensor, layout: Layout, quantizer: Quantizer, state: Tensor | None) -> Tensor:
    """The quantizer's estimate of the derivative of rounding x, whose rows `layout` gives: x's shape, float32."""
    tile = quantizer.scales.tile if quantizer.scales is not None else TENSOR
    parts = layout.rows(x)
    matrix = _tiled(parts, tile)
    ones = torch.ones(matrix.shape, device=x.device, dtype=torch.float32)
    found = estimate(ones, matrix.contiguous(), quantizer, factor_in_use(x, quantizer, state))
    return layout.back(_untiled(found, parts.shape, tile), x.shape)


def _tiled(parts: Tensor, tile: Tile) -> Tensor:
    """(groups, rows, segments, channels) as a matrix, zero-padded so that no tile spans two groups or segments."""
    groups, rows, segments, channels = parts.shape
    if _across(tile):
        width = _filled(channels, tile.columns) if groups * segments > 1 else channels
        return F.pad(parts, (0, width - channels)).transpose(0, 1).reshape(rows, groups * segments * width)
    height = _filled(rows, tile.rows) if groups > 1 else rows
    return F.pad(parts, (0, 0, 0, 0, 0, height - rows)).reshape(groups * height, segments * channels)


def _untiled(matrix: Tensor, shape: torch.Size, tile: Tile) -> Tensor:
    groups, rows, segments, channels = shape
    if _across(tile):
        width = _filled(channels, tile.columns) if groups * segments > 1 else channels
        return matrix.reshape(rows, groups, segments, width)[..., :channels].transpose(0, 1)
    height = _filled(rows, tile.rows) if groups > 1 else rows
    return matrix.reshape(groups, height, segments, channels)[:, :rows]


def _across(tile: Tile) -> bool:
    """Whether `_tiled` puts groups side by side: unless a tile is a whole row."""
    return tile.columns > 0 or tile.rows == 0


def _filled(length: int, tile: int) -> int:
    """`length` rounded up to a multiple of `tile`; 0 is a tile of any length."""
    return length if tile == 0 else -(-length // tile) * tile
