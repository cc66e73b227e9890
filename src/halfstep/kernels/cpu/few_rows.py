"""Matmuls of a few rows with a weight that is read as stored: the case of generating text with a quantized model.

Such a matmul takes as long as reading its weight, so codes are decoded on their way into the sum and never written as
values. The same loop takes values in 32 or 16 bits, in the same order: evaluation under a recipe, whose weights are
rounded values, and inference from codes give the same bits (`ops/few_rows.py`).
"""

from functools import cache
from math import ldexp
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfstep.formats import Float, Format, Integer, ieee754, lookup, ocp
from halfstep.kernels.cpu import element_codes
from halfstep.kernels.cpu.arrays import array, plain
from halfstep.kernels.cpu.compiled import Kernel, inner, none, specialized
from halfstep.kernels.cpu.dots import STEP, dots, in_pairs
from halfstep.kernels.cpu.lanes import lanes, nearest_as
from halfstep.kernels.cpu.runs import reduction
from halfstep.kernels.operator import Operator
from halfstep.quant.quantizer import Quantizer
from halfstep.quant.scaling import Scaling
from halfstep.quant.tile import TENSOR, Tile


ROWS = 8
"""The most rows that count as few: with more it is faster to decode the weight once."""
_FEWEST = 4  # the fewest rows of a weight; evaluation and inference both use it to decide on this order of sums
_GROUP = 64  # rows of a weight that a thread takes at a time
_TOGETHER = {1: 1, 4: 2}  # rows of a weight that are read side by side, by rows of x
_SPEED = 32  # elements of a weight read in the time of rounding one, the unit of `Kernel`'s `size`
_SIDE_BY_SIDE = {ms: ((np.uint32(0),) * js, (np.uint32(0),) * ms) for ms, js in _TOGETHER.items()}
_NO_SCALES = None, None, None, None, np.int64(0), np.int64(0)
_NO_BIAS = np.empty(0, np.float32)
_NOTHING = np.float32(-0.0)  # a bias that changes no bit of a sum
_LARGEST = np.uint32(127 + 100 << 23)  # the largest scale, as bits: times any code it is far from infinity


def supports(quantizer: Quantizer, rows: int, columns: int) -> bool:
    """Whether kernels here read a weight of that shape in the codes of this quantizer, or of one whose stateful scaling
    was replaced by a constant: any format of 4, 8 or 16 bits, with scales of tiles whose sides are powers of two."""
    scales = quantizer.scales
    if rows < _FEWEST or columns % STEP or quantizer.clamp is not None or quantizer.by_rows:
        return False
    if quantizer.format.bits not in (4, 8, 16):
        return False
    if scales is None or quantizer.stateful is not None:
        return scales is None or scales.tile == TENSOR
    if (
        scales.tile == TENSOR
        and scales.rule.factor(torch.ones((), dtype=torch.float32, device="cpu"), quantizer.format) is not None
    ):
        return True
    if quantizer.outliers is not None or quantizer.inner is not None or not _known_rule(scales.rule):
        return False
    return _shift(scales.tile.rows) is not None and (_shift(scales.tile.columns) or 0) >= 4


def _known_rule(rule: Scaling) -> bool:
    return (
        rule.exact or rule.two_level or ((rule.quotient or rule.multiplies) and rule.layout((1, 1)).keys() == {"scale"})
    )


def _shift(side: int) -> int | None:
    """The binary logarithm of a tile's side, 63 for a whole dimension; None where it is no power of two."""
    return 63 if side == 0 else side.bit_length() - 1 if side & (side - 1) == 0 else None


def weight_arguments(codes: Tensor, scale: Tensor | None, quantizer: Quantizer) -> Any:
    """The arguments of `run` for a weight (out, in); None where it is not a plain CPU tensor. They do not keep the
    tensors alive: they are valid while the tensors and their storages are.

    Args:
        codes: (out, packed in), of one or two bytes.
        scale: of tiles, as stored; None where there is none, or one for the whole tensor, which belongs to `times`.
    """
    format, tile = quantizer.format, Tile(0, 0)
    plainly = plain(codes, torch.uint16 if format.bits == 16 else torch.uint8)
    if not plainly or not (scale is None or plain(scale, torch.float32, torch.uint8)):
        return None
    meaning, half = _meaning(format)
    scales: tuple[Any, ...] = (None,) * 4
    if scale is not None:
        assert quantizer.scales is not None
        tile = quantizer.scales.tile
        stored = array(scale, kept=False).view(np.float32 if scale.dtype == torch.float32 else np.uint8)
        scales = stored, *_table(quantizer.scales.rule), np.int64(scale.shape[1])
    rights = (np.int64(_shift(tile.columns) or 0),)
    shifts = np.int64(_shift(tile.rows) or 0), rights if tile.columns % STEP == 0 else rights * 2
    mask = np.uint8(0x7F) if half < 0x7F else None
    second_first = np.int64(format.bits == 4 and format.high_nibble_first)
    numbers = array(codes, torch.int16 if format.key == ieee754.fp16.key else None, kept=False)
    return numbers, meaning, second_first, mask, half, *scales, *shifts


def run(x: NDArray[np.float32], weight: Any, times: float | None, bias: Tensor | None, out: Tensor) -> bool:
    """Write x (rows, in), flat, @ the transpose of a weight (out, in) as `weight_arguments`, times `times`, plus bias
    (out), float32, to `out` (..., out): each operation is rounded once in float32 and the last to out's dtype.

    Returns:
        False where codes are not finite, or scales so large that a value may be infinite: then `out` holds no valid
            result.
    """
    across = out.shape[-1]
    rows = out.numel() // across
    columns = x.size // rows
    ms = 1 if rows == 1 else 4
    if rows % ms:
        x = np.concatenate([x, np.zeros((ms - rows % ms) * columns, np.float32)])
    strange = np.zeros(-(-across // _GROUP), np.uint8)
    _products(
        columns * across // _SPEED, x, columns, *weight, *_SIDE_BY_SIDE[ms],
        np.float32(1 if times is None else times), _NO_BIAS if bias is None else array(bias, torch.float32),
        array(out).reshape(rows, across), strange,
    )  # fmt: skip
    return not any(strange.tobytes())


def run_values(x: Tensor, weight: Tensor, times: float | None, bias: Tensor | None, out: Tensor) -> None:
    """`run` for x, float32, and a weight (out, in) of values: float32, bfloat16 or float16."""
    values = array(weight), None, np.int64(0), None, np.uint8(255), *_NO_SCALES
    run(array(x, torch.float32), values, times, bias, out)


def factor(scale: Tensor | None, multiplier: float | None) -> float | None:
    """`run`'s argument `times`: a float32 scalar tensor times a float."""
    if scale is None:
        return multiplier
    return float(scale if multiplier is None else scale * multiplier)


@cache
def _meaning(format: Format) -> tuple[Any, np.uint8]:
    """The `meaning` of codes for `dots`, and the largest code for which it holds: arithmetic, where possible; else a
    table of values, in bfloat16 where they fit: those of one byte fit in registers."""
    every = np.uint8(255)
    if format.key in (ieee754.bf16.key, ieee754.fp16.key):
        return None, every
    if isinstance(format, Integer) and format.bits == 8 and format.low < 0 and format.fraction_bits == 0:
        return (), every
    if isinstance(format, Float) and format.bits == 8 and element_codes.are_halves(format) and -12 <= format.bias <= 15:
        unit = np.float32(ldexp(1.0, 15 - format.bias))  # its product with any usual scale is exact
        return (np.uint16(5 - format.exponent_bits), unit), np.uint8(element_codes.decoding_scalars(format)[-1])
    table = element_codes.table(format, torch.float32).numpy()
    words = table.view(np.uint32)
    if format.bits == 8 and not (words & 0xFFFF).any():
        return ((words >> 16).astype(np.uint16),), every
    return table if format.bits == 4 else (table,), every


def _table(rule: Scaling) -> tuple[NDArray[np.float32] | None, Any]:
    """The values of one-byte scales, or None for float32 scales; and the largest stored scale that needs no check."""
    if rule.exact:
        return element_codes.table(lookup.float8_e8m0fnu, torch.float32).numpy(), np.uint8(127 + 100)
    if rule.two_level:
        return element_codes.table(ocp.float8_e4m3fn, torch.float32).numpy(), np.uint8(0x7E)
    return None, _LARGEST


@reduction
def _largest(largest, scale):
    """The largest of one-byte scales, or of the bits of float32 scales: negative ones compare as larger than all
    others."""
    return largest.max(scale.bits() if scale.is_float else scale)


@lanes("like")
def _finished(total, times, bias, like):
    return nearest_as(total * times + bias, like)


@specialized
def _tiles_of(stored, *rest):
    """In kernels: the argument `scales` of `dots`, from a row on."""
    return (lambda stored, *rest: None) if none(stored) else lambda stored, *rest: (stored, *rest)


@inner
def _are_usual(stored, most, across, down, first, last):
    """Whether the scales of some rows are finite, positive and small enough that no value is infinite."""
    if stored is None:
        return True
    return _largest(most, stored[(first >> down) * across : ((last >> down) + 1) * across]) == most


@inner
def _rows(weight, meaning, mask, tiles, x, columns, first, js, ms, times, bias, out, found):
    """Compute some rows of the weight, side by side, with all rows of x; returns the largest of their codes."""
    most = np.uint8(0)
    for m in range(0, out.shape[0], len(ms)):
        rows = x[m * columns :]
        worst = dots(weight, first * columns, columns, meaning, mask, tiles, rows, columns, js, ms, found)
        most = max(most, worst)
        for j in range(len(js)):
            for row in range(m, min(m + len(ms), out.shape[0])):
                total = found[j * len(ms) + row - m]
                added = bias[first + j] if bias.size else _NOTHING
                out[row, first + j] = _finished(total, times, added, out[row, first + j])
    return most


@Kernel
def _products(
    x, columns, weight, meaning, second_first, mask, half, stored, table, usual, across, down, right, js, ms, times,
    bias, out, strange,
):  # fmt: skip
    ordered = in_pairs(x, meaning, second_first)
    for group in numba.prange(strange.size):
        start = group * _GROUP
        stop = min(start + _GROUP, out.shape[1])
        found = np.empty(len(js) * len(ms), np.float32)
        most = np.uint8(0)
        for j in range(start, stop, len(js)):
            first = min(j, out.shape[1] - len(js))  # the last rows may be computed twice, with the same result
            tiles = _tiles_of(stored, table, first, across, down, right)
            worst = _rows(weight, meaning, mask, tiles, ordered, columns, first, js, ms, times, bias, out, found)
            most = max(most, worst)
        if most > half or not _are_usual(stored, usual, across, down, start, stop - 1):
            strange[group] = 1


def _scaled(
    x: Tensor, values: Tensor, scale: Tensor | None, multiplier: float | None, bias: Tensor | None, out: Tensor
) -> None:
    run_values(x, values, factor(scale, multiplier), bias, out)


product = Operator(
    "few_rows(Tensor x, Tensor values, Tensor? scale, float? multiplier, Tensor? bias, Tensor(a!) out) -> ()", _scaled
)
