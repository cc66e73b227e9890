"""Random Hadamard transforms on a GPU (`quant.rotate`), and quantization in tiles in the same pass, bit for bit.

A matrix is rotated along its rows or its columns, and its tiles run in the same direction. With two levels of scales
the transform is computed twice, since the amax of the whole result is needed first.
"""

import math
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.cpu.elements import float_bits
from halfstep.kernels.cpu.rotated import LEVELS
from halfstep.kernels.gpu import KINDS, UNIT, bits, functions, halves, is_dense, launch, quantizers
from halfstep.kernels.gpu.blocks import WARPS
from halfstep.quant import Quantizer
from halfstep.quant.quantizer import layout, matrix_shape
from halfstep.quant.rounding import Seed


_SIZES = (8, 16, 32, 64)
_BLOCK = 1 << 12  # elements of a program along rows
_STRIP, _WIDE = 1 << 12, 64  # most bytes and columns of a program along columns: one warp, so it never synchronizes
_CHOICE = 32  # most columns where each tile has a choice of two scales: with more, registers would spill


Constants = tuple[quantizers.Rule | None, quantizers.Element | None]


def constants(
    x: Tensor, signs: Tensor, dim: int, quantizer: Quantizer | None = None, turned: bool = False
) -> Constants | None:
    """The constants with which kernels rotate x and quantize the result, if there is a quantizer; None where they do
    not support it.

    They take dense contiguous tensors (fp32, bf16, fp16), rotated along the last dimension or a matrix's first; and
    tiles of one row that run along the rotation and are no longer than its blocks. For dimension 0 tiles are of one
    column, or, where the result is `turned` (transposed), of one row of the transpose.
    """
    size, dim = len(signs), dim % x.dim() if x.dim() else -1
    known = dim == x.dim() - 1 or (dim == 0 and x.dim() == 2)
    if not (known and is_dense(x) and x.numel() and is_dense(signs, torch.float32) and size in _SIZES):
        return None
    if quantizer is None:
        return None, None
    found, scales = quantizers.constants(quantizer), quantizer.scales
    if found is None or scales is None or x.dim() != 2 or found[1].bins is not None:
        return None
    tile = scales.tile
    across, along = (tile.rows, tile.columns) if dim or turned else (tile.columns, tile.rows)
    return found if across == 1 and along in LEVELS and along <= size else None


def whole_shape(x: Tensor, size: int, dim: int) -> tuple[int, ...]:
    """The shape of x padded to whole blocks of a rotation of that size along `dim`."""
    shape = list(x.shape)
    shape[dim] += -shape[dim] % size
    return tuple(shape)


def run(x: Tensor, signs: Tensor, dim: int) -> Tensor | None:
    """`quant.rotate(x, signs, dim)`: float32, padded to whole blocks. None where no kernel supports it."""
    if (given := constants(x, signs, dim)) is None:
        return None
    out = torch.empty(whole_shape(x, len(signs), dim), dtype=torch.float32, device=x.device)
    _launch(x, signs, dim % x.dim() != x.dim() - 1, None, given, None, None, None, out=out)
    return out


def run_values(
    x: Tensor,
    signs: Tensor,
    dim: int,
    quantizer: Quantizer,
    constants: Constants,
    seed: Seed | None,
    dtype: torch.dtype,
    part: float = 1.0,
    tensor_scale: Tensor | None = None,
) -> Tensor:
    """x times `part`, rotated, then quantized (with the kernels' `constants`) and dequantized. Noise is indexed by
    position in the matrix; with one level of scales and dimension 0, in its transpose.

    With two levels of scales, if `tensor_scale` is given the tensor's scale is written to it and not applied to the
    values.
    """
    out = torch.empty(whole_shape(x, len(signs), dim), dtype=dtype, device=x.device)
    noise = None if seed is None else "rows" if dim or quantizer.tiling.rule.two_level else "turned"
    _launch(x, signs, dim == 0, quantizer, constants, seed, noise, part, out=out, whole=tensor_scale)
    return out


def run_codes(
    x: Tensor, signs: Tensor, dim: int, quantizer: Quantizer, constants: Constants, seed: Seed | None
) -> tuple[tuple[int, ...], dict[str, Tensor]]:
    """The shape of the rotated matrix (for dimension 0, of its transpose) and the tensors of its quantization: `codes`,
    `scale` ..."""
    shape = whole_shape(x, len(signs), dim)[:: 1 if dim else -1]
    sizes: Any = layout(quantizer, shape, torch.float32)
    made = {name: torch.empty(size, dtype=dtype, device=x.device) for name, (dtype, size) in sizes.items()}
    noise = None if seed is None else "rows" if dim else "turned"
    out, scale, whole = made["codes"], made["scale"], made.get("tensor_scale")
    _launch(x, signs, dim == 0, quantizer, constants, seed, noise, None, out, scale, whole)
    return shape, made


def _launch(
    x: Tensor,
    signs: Tensor,
    down: bool,
    quantizer: Quantizer | None,
    constants: Constants,
    seed: Seed | None,
    noise: str | None,
    part: float | None,
    out: Tensor,
    scale: Tensor | None = None,
    whole: Tensor | None = None,
) -> None:
    """Launch the kernel; twice with two levels of scales."""
    (rows, columns), size = matrix_shape(tuple(x.shape)), len(signs)
    rule, element = constants
    tile = 0 if quantizer is None or quantizer.scales is None else max(astuple(quantizer.scales.tile))
    unit = UNIT if columns % UNIT == 0 else 1
    two_level = rule is not None and rule.kind == "two_level"
    values: Any = out.dtype if rule is not None and scale is None else None
    options: dict[str, Any] = {
        "device": x.device, "R": rule, "Q": element, "E": quantizers.e4m3() if two_level else None,
        "SOURCE": KINDS[x.dtype], "TARGET": KINDS.get(values),
        "OUT": quantizers.written(values) if values is not None and values.itemsize == 2 else None,
        "APART": scale is None and whole is not None, "FACTOR": float_bits(math.sqrt(1 / size)),
        "PART": None if part in (None, 1.0) else float_bits(part), "LEVELS": LEVELS[size], "NOISE": noise,
        "W": tile, "UNIT": unit,
    }  # fmt: skip
    wide = _WIDE if rule is None or rule.second is None else _CHOICE
    warps, high = (1, min(wide, _STRIP // (size * x.itemsize))) if down else (WARPS, _BLOCK // size)
    grid = -(-rows // size) * -(-columns // high) if down else -(-rows * -(-columns // size) // high)
    options |= {"warps": warps, "DOWN": down, "ROWS": high, "COLUMNS": size}
    kernel, found = functions("rotated").rotate, None
    given = signs, rows, columns // unit
    if two_level:
        found = torch.zeros(1, dtype=torch.int32, device=x.device)
        nothing = {"Q": None, "E": None, "TARGET": None, "OUT": None, "APART": False, "NOISE": None}
        launch(kernel, grid, bits(x), None, None, None, None, found, *given, *halves(None), **(options | nothing))
    cells = [None if t is None else bits(t) for t in (out, scale, whole)]
    launch(kernel, grid, bits(x), *cells, found, None, *given, *halves(seed), **options)
