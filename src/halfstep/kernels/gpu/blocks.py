"""Tiles that share a scale, on a GPU: `quant.Quantizer` of CUDA tensors to codes and scales, or to values, bit for bit.

One pass: a program reads a block of whole tiles, finds their largest magnitudes, forms the scales, and rounds. The
scale of a tensor, of a row or a column of it, and the tensor's of two levels take a pass before it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.kernels.cpu.arrays import separate
from halfstep.kernels.gpu import amax, quantizers
from halfstep.kernels.gpu.launch import KINDS, bits, functions, halves, launch, lies_plain, plain
from halfstep.quant import Quantizer, Tile
from halfstep.quant.quantizer import matrix_shape
from halfstep.quant.rounding import Seed


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


def takes(x: Tensor, quantizer: Quantizer) -> bool:
    """Whether `run` can quantise a tensor like `x`, wherever it is: dense and contiguous, fp32, bf16 or fp16."""
    told = quantizers.known(quantizer, choice=True) if lies_plain(x) and x.numel() else None
    made = None if told is None else _cut(x, quantizer)
    if told is None or made is None:
        return False
    if told[0].second is not None and made.tile[0] > made.block[0]:
        return False  # of a tile that is read strip by strip, no sum is formed
    return told[0].kind != "two_level" or all(made.tile)


def supports(x: Tensor, tensors: dict[str, Tensor], quantizer: Quantizer) -> bool:
    """Whether `run` can quantise `x` into `tensors`: contiguous CUDA tensors."""
    return plain(x) and takes(x, quantizer) and all(plain(t, t.dtype) for t in tensors.values())


def takes_values(x: Tensor, out: Tensor, quantizer: Quantizer) -> bool:
    """Whether `run_values` can round `x` into `out`, wherever they are: of one shape, and apart in memory."""
    fits = lies_plain(out) and x.shape == out.shape and separate(x, out)
    return fits and x.data_ptr() != out.data_ptr() and takes(x, quantizer)


def supports_values(x: Tensor, out: Tensor, quantizer: Quantizer) -> bool:
    """Whether `run_values` can round `x` into `out`: contiguous CUDA tensors."""
    return plain(x) and plain(out) and takes_values(x, out, quantizer)


def run(x: Tensor, tensors: dict[str, Tensor], quantizer: Quantizer, seed: Seed | None) -> None:
    """Write what `quantizer.quantize(x)` keeps to `tensors` (`codes`, `scale` ...), of its layout."""
    whole = tensors.get("tensor_scale")
    _launch(x, tensors["codes"], tensors["scale"], whole, quantizer, seed)


def run_values(
    x: Tensor, out: Tensor, quantizer: Quantizer, seed: Seed | None, tensor_scale: Tensor | None = None
) -> None:
    """Write what x, rounded in these tiles, stands for to `out`.

    Of two levels of scales, the tensor's goes to `tensor_scale`, where that is given, and is left out of the values.
    """
    _launch(x, out, None, tensor_scale, quantizer, seed)


def largest(x: Tensor, quantizer: Quantizer) -> Tensor | None:
    """The bits of the largest magnitudes that scales need before the pass that rounds: of the whole tensor, of each row
    or each column; of two levels, of the finite tiles. None where none are needed."""
    told, scales = quantizers.known(quantizer, choice=True), quantizer.scales
    assert told is not None
    assert scales is not None
    made = cut(tuple(x.shape), scales.tile, 8)  # no code is packed
    assert made is not None
    two_level = told[0].kind == "two_level"
    if all(made.tile) and not two_level:
        return None
    if not any(made.tile):
        return amax.run(x).view(torch.int32)
    count = 1 if two_level else made.rows if made.tile[0] else made.columns
    found = torch.zeros(count, dtype=torch.int32, device=x.device)
    launch(
        functions("maxima").maxima, made.programs, bits(x), found, made.rows, made.columns // made.unit,
        device=x.device, warps=WARPS, SOURCE=KINDS[x.dtype], FINITE=two_level, H=made.tile[0], W=made.tile[1],
        UNIT=made.unit, ROWS=made.block[0], COLUMNS=made.block[1],
    )  # fmt: skip
    return found


def _cut(x: Tensor, quantizer: Quantizer) -> Cut | None:
    assert quantizer.scales is not None
    return cut(tuple(x.shape), quantizer.scales.tile, quantizer.format.bits)


def _launch(
    x: Tensor, out: Tensor, scale: Tensor | None, whole: Tensor | None, quantizer: Quantizer, seed: Seed | None
) -> None:
    told, made = quantizers.known(quantizer, choice=True), _cut(x, quantizer)
    assert told is not None
    assert made is not None
    rule, element = told
    values: Any = None if scale is not None else out.dtype
    narrow = values is not None and values.itemsize == 2
    launch(
        functions("tiles").quantise, made.programs,
        bits(x), bits(out), None if scale is None else bits(scale), None if whole is None else bits(whole),
        largest(x, quantizer), made.rows, made.columns // made.unit, *halves(seed),
        device=x.device, warps=WARPS, R=rule, Q=element, E=quantizers.e4m3() if rule.kind == "two_level" else None,
        SOURCE=KINDS[x.dtype], TARGET=KINDS.get(values), OUT=quantizers.written(values) if narrow else None,
        APART=scale is None and whole is not None, NOISY=seed is not None, H=made.tile[0], W=made.tile[1],
        UNIT=made.unit, ROWS=made.block[0], COLUMNS=made.block[1],
    )  # fmt: skip
