"""Tiles of any shape with power-of-two or absmax scales: whole passes of torch around the rounding kernel of `cast`.

A row, a square, a short last tile of neither: three more passes over memory than `blocks` makes, and a tenth of the
time of the reference, which works in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.formats import Format
from halfstep.kernels.cpu import cast
from halfstep.kernels.cpu.arrays import plain
from halfstep.quant.quantizer import Quantizer, as_rows
from halfstep.quant.scaling import Scaling
from halfstep.quant.scaling.base import finite


def supports(x: Tensor, out: Tensor, quantizer: Quantizer) -> bool:
    """Whether `run` can round `x` into `out`: plain CPU tensors in whole tiles, of rules it knows."""
    tile, scaling = quantizer.tile, quantizer.scaling
    if tile is None or scaling is None or not scaling.reads or quantizer.outliers is not None:
        return False
    if not scaling.exact and scaling.name != "absmax":
        return False
    if not (plain(x) and plain(out) and x.dim() and x.numel()):
        return False
    matrix = as_rows(x)
    whole = matrix.shape[0] % (tile.rows or 1) == 0 and matrix.shape[1] % (tile.columns or 1) == 0
    narrow = quantizer.format.max < 2.0**100 and quantizer.format.smallest > 2.0**-100  # room for factors in float32
    return whole and narrow and cast.supports_scaled(torch.empty(0), torch.empty(0), quantizer.format)


def run(x: Tensor, out: Tensor, quantizer: Quantizer, seed: int | None) -> None:
    """Write what `quantizer.quantize(x)` stands for to `out`."""
    assert quantizer.tile is not None
    assert quantizer.scaling is not None
    matrix = as_rows(x)
    rows, columns = matrix.shape
    high, wide = quantizer.tile.rows or rows, quantizer.tile.columns or columns
    cut = matrix.view(rows // high, high, columns // wide, wide)
    amax = torch.maximum(cut.amax((1, 3), keepdim=True), -cut.amin((1, 3), keepdim=True)).float()
    scaled, multiplier = _scaled(cut, amax, quantizer.scaling, quantizer.format)
    cast.run(scaled, scaled, quantizer.format, quantizer.rounding, "saturate", seed)
    limit = torch.finfo(out.dtype).max
    out.view(cut.shape).copy_(scaled.mul_(multiplier).clamp_(-limit, limit))


def _scaled(cut: Tensor, amax: Tensor, scaling: Scaling, format: Format) -> tuple[Tensor, Tensor]:
    """Elements in units of their scale, in float32, and the scales."""
    factor = scaling.factor(amax, format)
    if factor is not None:
        return cut * factor, factor.reciprocal()  # a power of two moves no bit that rounding will look at
    multiplier = finite(amax / format.max)
    lost = multiplier.isnan() | (multiplier == 0)
    scaled = cut.float() / torch.where(lost, 1.0, multiplier)
    return (scaled.masked_fill_(lost, 0.0) if bool(lost.any()) else scaled), multiplier
