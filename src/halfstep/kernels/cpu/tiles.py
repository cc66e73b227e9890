"""Tiles of any shape: whole passes of torch around the rounding kernel of `cast`, and the decoding one of `codes`.

A row, a square, a short last tile of neither: three more passes over memory than `blocks` makes, and a tenth of the
time of the reference, which works in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.kernels.cpu import cast, codes
from halfstep.kernels.cpu.arrays import plain
from halfstep.quant.quantizer import Quantized, Quantizer, as_rows


def supports(x: Tensor, out: Tensor, quantizer: Quantizer) -> bool:
    """Whether `run` can round `x` into `out`: plain CPU tensors in whole tiles, whose scales are powers of two."""
    tile, scaling = quantizer.tile, quantizer.scaling
    if tile is None or scaling is None or not (scaling.exact and scaling.reads) or quantizer.outliers is not None:
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
    factor = quantizer.scaling.factor(amax, quantizer.format)
    assert factor is not None
    scaled = cut * factor  # in float32, where a power of two moves no bit that rounding will look at
    cast.run(scaled, scaled, quantizer.format, quantizer.rounding, "saturate", seed)
    limit = torch.finfo(out.dtype).max
    out.view(cut.shape).copy_(scaled.mul_(factor.reciprocal()).clamp_(-limit, limit))


def supports_decode(quantized: Quantized, out: Tensor) -> bool:
    """Whether `run_decode` can write the values to `out`: plain CPU tensors, scales beside codes and nothing else.

    Into bf16, where a value times its scale is rounded once, only if both are exact there.
    """
    quantizer = quantized.quantizer
    if quantizer.tile is None or quantizer.scaling is None or quantized.tensors.keys() != {"codes", "scale"}:
        return False
    exact = quantizer.scaling.exact and quantizer.format.significant_bits <= 8
    dtypes = (torch.float32, torch.bfloat16) if exact else (torch.float32,)
    format = quantizer.format
    if not plain(out, *dtypes):
        return False
    return codes.supports_decode(
        quantized.codes, out.view(quantized.matrix_shape), format, packed=format.bits in (4, 6)
    )


def run_decode(quantized: Quantized, out: Tensor) -> None:
    """Write the values of `quantized` to `out`."""
    tile, scaling, (rows, columns) = quantized.quantizer.tile, quantized.quantizer.scaling, quantized.matrix_shape
    assert tile is not None
    assert scaling is not None
    format, matrix = quantized.quantizer.format, out.view(rows, columns)
    codes.run_decode(quantized.codes, matrix, format, packed=format.bits in (4, 6))
    scale = scaling.multiplier(quantized.tensors, format)
    high, wide = tile.rows or max(rows, 1), tile.columns or max(columns, 1)
    if rows % high == 0 and columns % wide == 0:
        matrix, scale = matrix.view(rows // high, high, columns // wide, wide), scale[:, None, :, None]
    else:
        scale = tile.spread(scale, rows, columns)
    limit = torch.finfo(out.dtype).max
    matrix.mul_(scale.to(out.dtype)).clamp_(-limit, limit)
    if bool((scale == 0).any()):  # a tile of zeros, whatever its codes mean
        matrix.masked_fill_(scale == 0, 0.0)
