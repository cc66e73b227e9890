"""Rotation and quantization to values in one pass: `rotated`, then `blocks` or `panels`, bit for bit.

A piece is rotated in the cache and its tiles are rounded from there: no float32 result is written. With two levels of
scales the transform is computed twice, since the amax of the whole result is needed first.
"""

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from halfstep.kernels.cpu import blocks, panels, rotated, rules
from halfstep.kernels.cpu.arrays import array, plain
from halfstep.kernels.cpu.compiled import Kernel, whole_lines
from halfstep.kernels.cpu.lanes import as_bits
from halfstep.kernels.cpu.noise import column_keys, seed_keys
from halfstep.kernels.cpu.runs import multiply, transpose
from halfstep.kernels.cpu.scales import larger_of
from halfstep.quant.quantizer import Quantizer
from halfstep.quant.scaling.two_level import TwoLevel


def constants(x: Tensor, signs: Tensor, dim: int, quantizer: Quantizer, dtype: torch.dtype) -> Any:
    """The constants with which elements are rounded. None where the functions here do not rotate the matrix x along
    `dim` and round it to values of that dtype: tiles must be of one row, or one column, along the rotation, and no
    longer than its blocks."""
    if quantizer.scales is None or quantizer.outliers is not None or dtype not in (torch.float32, torch.bfloat16):
        return None
    tile, rule, size = quantizer.scales.tile, quantizer.scales.rule, len(signs)
    along, across = (tile.columns, tile.rows) if dim == 1 else (tile.rows, tile.columns)
    lies = across == 1 and along in blocks.LEVELS and size in rotated.LEVELS and along <= size
    known = lies and (rule.exact or (rule.two_level and dim == 0))
    dense = plain(signs, torch.float32) and x.dim() == 2 and x.numel() > 0 and plain(x)
    found = blocks.element_numbers(quantizer.format, quantizer.rounding, rule) if known and dense else None
    return None if found is None else found[0]


def run_powers(
    x: Tensor, signs: Tensor, dim: int, quantizer: Quantizer, numbers: Any, seed: int | None, part: float,
    dtype: torch.dtype,
) -> tuple[Tensor, bool]:  # fmt: skip
    """x times `part`, rotated, then quantized with power-of-two scales and dequantized; for dim 0, the transposed view
    of a contiguous matrix. And whether nonzero values below 2^-126 may occur."""
    size, scales = len(signs), quantizer.scales
    assert scales is not None
    ruled, turned = blocks.rule_arguments(quantizer.format, scales.rule, values=True), rotated.rotation(signs, part)
    if dim == 1:
        x = rotated.in_blocks(x, size)
        out = torch.empty(x.shape, dtype=dtype, device="cpu")
        sides = blocks.sides_of(scales.tile, x.shape[1])
        return out, blocks.round_values(
            array(x), array(out), sides, ruled, None, None, numbers, None, seed_keys(seed), turned
        )
    (rows, columns), high = x.shape, scales.tile.rows
    out = torch.empty(columns, -(-rows // size) * size, dtype=dtype, device="cpu")
    found = np.zeros(-(-rows // size) * -(-columns // rotated.WIDTH), np.uint32)
    tile = high, (np.uint32(0),) * blocks.LEVELS[high]
    how = *tile, ruled[0], ruled[3], found, array(out), out.shape[1], numbers, seed_keys(seed)
    _down(x.numel(), array(x), rows, columns, *turned, *how)
    return out.t(), bool((found & rules.TINY).any())


def tensor_scale(x: Tensor, signs: Tensor, quantizer: Quantizer) -> Tensor | None:
    """The tensor's scale, of two levels, for the matrix rotated along dim 0. None where a value is not finite: then it
    depends on the finite tiles alone."""
    scales: Any = quantizer.scales
    pieces = -(-x.shape[0] // len(signs)) * -(-x.shape[1] // rotated.WIDTH)
    found = torch.empty(pieces, dtype=torch.float32, device="cpu")
    _largest(x.numel(), array(x), *x.shape, *rotated.rotation(signs)[:3], array(found))
    largest = found.max()
    return scales.rule.tensor_scale(largest, quantizer.format) if bool(largest.isfinite()) else None


def run_two_levels(
    x: Tensor, signs: Tensor, quantizer: Quantizer, numbers: Any, seed: int | None, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """The matrix rotated along dim 0, quantized, dequantized and divided by the tensor's scale, a float32 scalar."""
    (rows, columns), scales, size = x.shape, quantizer.scales, len(signs)
    assert scales is not None
    assert isinstance(scales.rule, TwoLevel)
    out = torch.empty(-(-rows // size) * size, columns, dtype=dtype, device="cpu")
    ruled = rules.given(quantizer.format, scales.rule, scale)
    apart = rules.apart(quantizer.format, seed, dtype, True)
    sides = (size, rotated.WIDTH), (scales.tile.rows, 1)
    panels.round_tiles(x, columns, sides, None, ruled, apart, out, None, numbers, seed, rotated.rotation(signs))
    return out


# Columns are transposed before they are rounded: with lanes across tiles (`panels`), the constants of a tile are
# computed for each element, which takes 1.13 times as long, and 1.24 times with noise.


@Kernel
def _down(x, rows, columns, signs, norm, levels, part, run, tile, rule, steps, found, out, tall, numbers, seed):
    size, across = 1 << len(levels), (columns + rotated.WIDTH - 1) // rotated.WIDTH
    for piece in numba.prange(found.size):
        row, a = piece // across * size, piece % across * rotated.WIDTH
        width, to = min(rotated.WIDTH, columns - a), a * tall + row
        held = rotated.rotated_panel(x, rows, columns, row, a, width, signs, norm, levels)
        multiply(held, part)
        turned = whole_lines(held.size)
        transpose(held, levels, turned, 0, size)
        bits, keys = as_bits(turned[: width * size]), column_keys(seed, to, tall, width)
        found[piece] = blocks.round_piece(
            bits, run, tile, rule, None, None, steps, None, None, None, out, numbers, None, None, keys, (to, tall, size)
        )


@Kernel
def _largest(x, rows, columns, signs, scale, levels, found):
    across = (columns + rotated.WIDTH - 1) // rotated.WIDTH
    for piece in numba.prange(found.size):
        row, a = piece // across << len(levels), piece % across * rotated.WIDTH
        held = rotated.rotated_panel(x, rows, columns, row, a, min(rotated.WIDTH, columns - a), signs, scale, levels)
        found[piece] = larger_of(np.uint32(0), held)
