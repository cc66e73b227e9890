"""Quantization to values in tiles of any shape: torch operators around the kernels of `cast` and `codes`.

For rows, squares, and other whole tiles: up to three more passes over memory than `blocks` needs, and a tenth of the
time of the reference, which works in float64.
"""

from typing import Any

import torch
from numba import prange, types
from torch import Tensor

from halfstep.formats import Format
from halfstep.kernels.cpu import cast, codes, elements
from halfstep.kernels.cpu.arrays import array, plain
from halfstep.kernels.cpu.compiled import Kernel, inner
from halfstep.kernels.cpu.lanes import INFINITY, MAGNITUDE, SIGN, Lane, lanes
from halfstep.quant import Scales
from halfstep.quant.quantizer import Quantized, Quantizer, as_rows
from halfstep.quant.rounding import Seed
from halfstep.quant.scaling import Scaling
from halfstep.quant.scaling.base import finite


def constants(quantizer: Quantizer) -> Any:
    """The constants with which `run` rounds elements; None where it does not support these tiles."""
    scales, format = quantizer.scales, quantizer.format
    if scales is None or quantizer.outliers is not None or not scales.rule.reads:
        return None
    narrow = format.max < 2.0**100 and format.smallest > 2.0**-100  # so that factors do not leave float32's range
    known = narrow and (scales.rule.exact or scales.rule.quotient)
    return elements.scalars(format, quantizer.rounding, "saturate") if known else None


def run(x: Tensor, out: Tensor, quantizer: Quantizer, seed: Seed | None) -> bool | None:
    """Write x, quantized and dequantized, to `out`, as `blocks.run_values`. None where this does not support it: both
    must be plain CPU tensors of whole tiles, and not empty."""
    numbers, scales = constants(quantizer), quantizer.scales
    if numbers is None or scales is None or not (plain(x) and plain(out) and x.dim() and x.numel()):
        return None
    matrix, format, rounding = as_rows(x), quantizer.format, quantizer.rounding
    rows, columns = matrix.shape
    high, wide = scales.tile.rows or rows, scales.tile.columns or columns
    if rows % high or columns % wide:
        return None
    cut = matrix.view(rows // high, high, columns // wide, wide)
    amax = torch.maximum(cut.amax((1, 3), keepdim=True), -cut.amin((1, 3), keepdim=True)).float().abs()  # -0 becomes 0
    if scales.rule.factor(amax, format) is None and _fused(x, out, rounding):
        multiplier = finite(amax / format.max).view(rows // high, columns // wide)
        arrays = [array(t, torch.float32).reshape(t.shape) for t in (matrix, out.view(matrix.shape), multiplier)]
        _divided(x.numel(), *arrays, numbers, high, wide)
        return True  # small values were not checked for
    scaled, multiplier = _scaled(cut, amax, scales.rule, format)
    cast.run(scaled, scaled, format, rounding, "saturate", seed)
    limit = torch.finfo(out.dtype).max
    out.view(cut.shape).copy_(scaled.mul_(multiplier).clamp_(-limit, limit))
    return bool(((multiplier * format.smallest < 2.0**-126) & (amax > 0)).any())


def run_decode(quantized: Quantized, out: Tensor, scales: Scales) -> bool:
    """Write the values of `quantized`, which has these scales, to `out`. False where this does not support it: plain
    CPU tensors, with codes and scales alone.

    Into bf16, where a value times its scale is rounded once, only if both are exact there.
    """
    tile, (rows, columns), format = scales.tile, quantized.matrix_shape, quantized.quantizer.format
    exact = scales.rule.exact and format.significant_bits <= 8
    dtypes = (torch.float32, torch.bfloat16) if exact else (torch.float32,)
    if quantized.tensors.keys() != {"codes", "scale"} or not plain(out, *dtypes):
        return False
    matrix, packed = out.view(rows, columns), format.bits in (4, 6)
    if codes.run_decode(quantized.codes, matrix, format, packed) is None:
        return False
    scale = scales.rule.multiplier(quantized.tensors, format)
    high, wide = tile.rows or max(rows, 1), tile.columns or max(columns, 1)
    if rows % high == 0 and columns % wide == 0:
        matrix, scale = matrix.view(rows // high, high, columns // wide, wide), scale[:, None, :, None]
    else:
        scale = tile.spread(scale, rows, columns)
    limit = torch.finfo(out.dtype).max
    matrix.mul_(scale.to(out.dtype)).clamp_(-limit, limit)
    if bool((scale == 0).any()):  # whatever the codes of a tile with scale 0 are
        matrix.masked_fill_(scale == 0, 0.0)
    return True


def _scaled(cut: Tensor, amax: Tensor, rule: Scaling, format: Format) -> tuple[Tensor, Tensor]:
    """Elements divided by their scale, in float32, and the scales."""
    factor = rule.factor(amax, format)
    if factor is not None:
        return cut * factor, factor.reciprocal()  # a power of two changes no bit that rounding depends on
    multiplier = finite(amax / format.max)
    lost = multiplier.isnan() | (multiplier == 0)
    scaled = cut.float() / torch.where(lost, 1.0, multiplier)
    return (scaled.masked_fill_(lost, 0.0) if bool(lost.any()) else scaled), multiplier


def _fused(x: Tensor, out: Tensor, rounding: str) -> bool:
    """Whether one kernel pass can do all after the amaxes: float32, rounded to nearest."""
    return x.dtype == out.dtype == torch.float32 and rounding == "nearest_even" and not x.requires_grad


@lanes(types.float32)
def _times(value: Lane, scale: Lane, numbers: list[Lane]) -> Lane:
    """value / scale, rounded, times scale; clamped to float32's finite range."""
    product = elements.rounded((value / scale).bits(), elements.Rounding(*numbers)).float() * scale
    bits = product.bits()
    largest = bits.constant(INFINITY - 1)
    return ((bits & MAGNITUDE).equals(INFINITY)).pick(largest | (bits & SIGN), bits).float()


@inner
def _tile_row(x, out, scale, numbers):
    if scale > 0:
        for i in range(x.size):
            out[i] = _times(x[i], scale, numbers)
    else:  # zeros for a tile of zeros, NaN for a tile whose scale is NaN
        out[:] = scale


@Kernel
def _divided(x, out, scales, numbers, high, wide):
    for row in prange(x.shape[0]):
        for tile in range(scales.shape[1]):
            a = tile * wide
            _tile_row(x[row, a : a + wide], out[row, a : a + wide], scales[row // high, tile], numbers)
