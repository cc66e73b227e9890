"""Tiles of several rows, squares and pieces of columns, rounded to values where they lie or in a transposed matrix.

A panel is the rows of a tile; lanes run along them (`strips`). What a product needs of an operand whose shared
dimension is its first are tiles of the transposed view: the matrix is read as it lies, and its columns are written as
rows, without a transposed copy of the input, which takes as long as the rounding. The last tiles may be short. Noise is
that of what is written, row by row. Where there are signs a piece is rotated first: its rows are those of a block.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from torch import Tensor

from halfstep.kernels.cpu import blocks, rows, two_level
from halfstep.kernels.cpu.arrays import array
from halfstep.kernels.cpu.blocks import UPRIGHT, ruled_by, takes_values
from halfstep.kernels.cpu.compiled import Kernel, piece
from halfstep.kernels.cpu.noise import seed_keys
from halfstep.kernels.cpu.powers import TINY
from halfstep.kernels.cpu.rotated import WIDTH, opened
from halfstep.kernels.cpu.strips import tiles
from halfstep.quant.quantizer import Quantizer, matrix_shape
from halfstep.quant.rounding import Seed
from halfstep.quant.tile import ROW


_WIDTH = 512  # columns of a panel that a thread takes at a time: 16 rows of them lie in the nearest cache
_DEEP = 64  # rows of those, of tiles that are not higher
_TALL = 512  # rows of those that it writes as columns: the results go to few rows, and fill whole lines of the cache
_WIDE = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_TALLEST = 256
_ROW = 32  # elements of a whole row, of the transposed view, that are rounded at a time


def numbers_of(quantizer: Quantizer) -> Any:
    """What `run_values` rounds elements by; None where it does not form the values of these tiles."""
    scales = quantizer.scales
    if scales is None or quantizer.outliers is not None or not (scales.rule.exact or scales.rule.two_level):
        return None
    high, wide = scales.tile.rows, scales.tile.columns
    cut = 1 <= high <= _TALLEST and wide in _WIDE and high * wide > 1
    found = blocks.element_numbers(quantizer.format, quantizer.rounding, scales.rule) if cut else None
    return None if found is None else found[0]


def run_values(
    x: Tensor, out: Tensor, quantizer: Quantizer, seed: Seed | None, tensor_scale: Tensor | None = None
) -> bool | None:
    """Write what x, rounded in these tiles, stands for to `out`: as `blocks.run_values`. None where it is not done
    here: it takes contiguous CPU tensors of one shape, apart in memory, that are not empty."""
    numbers, scales, format = numbers_of(quantizer), quantizer.scales, quantizer.format
    dense = x.dim() and x.numel() and x.shape == out.shape and takes_values(x, out)
    if numbers is None or scales is None or not dense:
        return None
    (_, columns), tile, rule, apart = matrix_shape(tuple(x.shape)), scales.tile, scales.rule, None
    if rule.two_level:
        whole = two_level.rule_of(x, format, scales, tensor_scale)
        apart = two_level.apart(format, seed, out.dtype, tensor_scale is not None)
        ruled = whole[1], whole[0], whole[2], None
    else:
        ruled = ruled_by(format, rule, values=True)
    sides = (max(_DEEP // tile.rows, 1) * tile.rows, _WIDTH), (tile.rows, tile.columns)
    small = round_tiles(x, columns, sides, None, ruled, apart, out, None, numbers, seed)
    return small or rule.two_level


def run_view(x: Tensor, out: Tensor, quantizer: Quantizer) -> bool | None:
    """Write what x, a matrix's transposed view, rounded in blocks of its rows or rows of 32s, stands for to `out`.

    Returns whether some may be below 2^-126, but not 0. None where it is not done here: it takes scales that are powers
    of two, to nearest.
    """
    format, scales = quantizer.format, quantizer.scales
    if scales is None or quantizer.rounding != "nearest_even" or not scales.rule.exact:
        return None
    if x.dim() != 2 or not x.numel() or x.shape != out.shape or x.shape[1] % (scales.tile.columns or _ROW):
        return None
    values = blocks.values_of(quantizer, x.shape[1])
    if values is None or not takes_values(x.t(), out):
        return None
    known = None
    if scales.tile == ROW:
        found = rows.run_amax(x.t(), None, 0)
        assert found is not None
        known = array(found)
    high, ruled = scales.tile.columns or _ROW, ruled_by(format, scales.rule, values=True)
    sides = (_TALL, WIDTH), (high, 1)
    turn = (np.uint32(0),) * (high.bit_length() - 1)
    return round_tiles(x.t(), x.shape[0], sides, known, ruled, None, out, turn, values[0], None)


def round_tiles(
    x: Tensor, columns: int, sides: Any, known: Any, ruled: Any, apart: Any, out: Tensor, turn: Any, numbers: Any,
    seed: Seed | None, rotation: Any = UPRIGHT,
) -> bool:  # fmt: skip
    """The same by what the functions here, and `strips.tiles`, take of tiles, a rule and a format.

    Args:
        x: in rows of so many columns.
        sides: the rows and columns that a thread takes at a time; those of a tile.
        rotation: `rotated.rotation`, down the columns; its blocks are as high as what a thread takes.
    """
    (tall, width), tile = sides
    high, step = x.numel() // columns, out.shape[-1]
    found = np.zeros(-(-high // tall) * -(-columns // width), np.uint32)
    how = known, *ruled, apart, array(out), step, turn, numbers, seed_keys(seed)
    _panels(x.numel(), array(x), columns, tall, width, *rotation, tile, found, *how)
    return bool((found & TINY).any())


@Kernel
def _panels(
    x, columns, tall, width, signs, norm, levels, part, tile, found, known, rule, whole, up, steps, apart, out, step,
    turn, numbers, seed,
):  # fmt: skip
    rows, across = x.size // columns, (columns + width - 1) // width
    for i in numba.prange(found.size):
        row, a = i // across * tall, i % across * width
        if turn is not None and known is None:  # the next rows go on with the same lines
            row, a = i % (found.size // across) * tall, i // (found.size // across) * width
        size = min(width, columns - a)
        to = row * step + a if turn is None else a * step + row
        own = piece(known, a, a + size)
        source, start, stride, deep = opened(x, rows, columns, row, a, tall, size, signs, norm, levels, part)
        found[i] = tiles(
            source, start, stride, deep, size, tile, own, rule, whole, up, steps, apart, out, to, step, turn, numbers,
            seed,
        )  # fmt: skip
