"""Tiles that share a scale, on a GPU: `quant.Quantizer` of CUDA tensors, and `Quantized.dequantize`, bit for bit.

One pass: a program reads a block of whole tiles, finds their largest magnitudes, forms the scales, and rounds. The
scale of a tensor, of a row or a column of it, and the tensor's of two levels take a pass before it.
"""

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.formats import Format, ocp
from halfstep.kernels.cpu.arrays import separate
from halfstep.kernels.gpu import KINDS, UNIT, amax, bits, functions, halves, launch, lies_plain, prepared, quantizers
from halfstep.quant import Quantizer, Tile
from halfstep.quant.cast import encode
from halfstep.quant.quantizer import layout, matrix_shape
from halfstep.quant.rounding import Seed
from halfstep.quant.scaling import absmax
from halfstep.quant.scaling.absmax import MAP, DoubleAbsmax
from halfstep.quant.tile import ROW


_LARGEST = 1 << 14  # elements of a tile
_BLOCK = 1 << 12  # elements of a block
WARPS = 8  # of a block of 4096 elements: 16 a thread


_STORED = {"codes", "scale", "tensor_scale", "scale_scale", "scale_offset"}


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
    if (
        (0 in (high, wide) and high + wide > 1)  # of a whole dimension, only single rows or columns
        or not shape
        or any(size & (size - 1) for size in (high, wide))
        or high * wide > _LARGEST
        or max(high, wide) > 1024
    ):
        return None
    if (bits == 4 and columns % 2) or (bits == 6 and columns % 4) or (bits in (4, 6) and wide == 1):
        return None
    if high == 1 and wide >= UNIT and columns % wide == 0:
        return Cut(rows * columns // wide, wide, (1, wide), (_BLOCK // wide, wide), wide)
    across = max(wide, 128)
    return Cut(rows, columns, (high, wide), (_BLOCK // across, across), UNIT if columns % UNIT == 0 else 1)


def cut_of(x: Tensor, quantizer: Quantizer) -> Cut | None:
    """How kernels cut `x`, wherever it is, to quantise it; None where they do not: it is dense and contiguous, fp32,
    bf16 or fp16."""
    if not lies_plain(x) or not x.numel() or quantizer.scales is None:
        return None
    single = _single(quantizer)
    if single is not None and quantizer.format.bits not in (4, 8):
        return None
    told, made = (
        quantizers.known(single or quantizer),
        cut(tuple(x.shape), quantizer.scales.tile, quantizer.format.bits),
    )
    if told is None or made is None:
        return None
    if told[0].second is not None and made.tile[0] > made.block[0]:
        return None  # of a tile that is read strip by strip, no sum is formed
    return made if told[0].kind != "two_level" or all(made.tile) else None


def run(x: Tensor, tensors: dict[str, Tensor], quantizer: Quantizer, seed: Seed | None) -> bool:
    """Write what `quantizer.quantize(x)` keeps to `tensors` (`codes`, `scale` ...), of its layout. False where that is
    not done here."""
    made = cut_of(x, quantizer) if all(tensor.is_contiguous() for tensor in tensors.values()) else None
    if made is None:
        return False
    single = _single(quantizer)
    if single is not None:
        _run_twice(x, tensors, quantizer, single, seed, made)
    else:
        _launch(x, tensors["codes"], tensors["scale"], tensors.get("tensor_scale"), quantizer, seed, made)
    return True


def run_values(
    x: Tensor, out: Tensor, quantizer: Quantizer, seed: Seed | None, tensor_scale: Tensor | None = None
) -> bool:
    """Write what x, rounded in these tiles, stands for to `out`. False where that is not done here: it takes tensors of
    one shape, apart in memory.

    Of two levels of scales, the tensor's goes to `tensor_scale`, where that is given, and is left out of the values.
    """
    if not lies_plain(out) or x.shape != out.shape or x.data_ptr() == out.data_ptr() or not separate(x, out):
        return False
    if (cutting := cut_of(x, quantizer)) is None:
        return False
    if _single(quantizer) is None:
        _launch(x, out, None, tensor_scale, quantizer, seed, cutting)
        return True
    sizes: Any = layout(quantizer, tuple(x.shape), x.dtype)
    made = {name: torch.empty(size, dtype=dtype, device=x.device) for name, (dtype, size) in sizes.items()}
    return run(x, made, quantizer, seed) and run_dequantize(made, out, quantizer)


class Largest:
    """The launch that finds, in tensors of one shape and dtype, the bits of the largest magnitudes that scales need
    before the pass that rounds: of the whole tensor, of each row or each column; of two levels, of the finite tiles. It
    gives those of the tensor, and those of its transpose; None where none are needed.

    Args:
        both: those of the transpose too.
    """

    def __init__(
        self, quantizer: Quantizer, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, both: bool = False
    ) -> None:
        told, tile = quantizers.known(quantizer), quantizer.tiling.tile
        assert told is not None
        made = cut(shape, tile, 8)  # no code is packed
        assert made is not None
        self._shared = both and tile.rows == tile.columns
        self._turned = None
        if both and not self._shared and tile != ROW:
            self._turned = Largest(quantizer.down, shape, dtype, device)
        two_level = told[0].kind == "two_level"
        self.zeros = 0
        """How many zeros a call may be given to raise."""
        self._needed, self._whole = two_level or not all(made.tile), not any(made.tile)
        if not self._needed or self._whole:
            return
        self._count = 1 if two_level else made.rows if made.tile[0] else made.columns
        self._across = made.columns if both and tile == ROW else 0
        self.zeros = self._count + self._across
        self._sizes = made.programs, made.rows, made.columns // made.unit
        self._launch = prepared(
            functions("tiles").maxima, device, WARPS, as_bits=True, SOURCE=KINDS[dtype], FINITE=two_level,
            H=made.tile[0], W=made.tile[1], UNIT=made.unit, ROWS=made.block[0], COLUMNS=made.block[1],
        )  # fmt: skip

    def __call__(self, x: Tensor, zeros: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        found = across = None
        if self._needed and self._whole:
            found = amax.run(x).view(torch.int32)
        elif self._needed:
            whole = torch.zeros(self.zeros, dtype=torch.int32, device=x.device) if zeros is None else zeros
            found, across = (whole[: self._count], whole[self._count :]) if self._across else (whole, None)
            programs, *sizes = self._sizes
            self._launch(programs, x, found, across, *sizes)
        if self._turned is not None:
            across = self._turned(x)[0]
        return found, found if self._shared else across


def _single(quantizer: Quantizer) -> Quantizer | None:
    """Of scales that have scales, the quantizer that leaves them as they are; None of others."""
    scales = quantizer.scales
    if scales is None or not isinstance(scales.rule, DoubleAbsmax):
        return None
    return replace(quantizer, scales=replace(scales, rule=absmax.absmax))


def _run_twice(
    x: Tensor, tensors: dict[str, Tensor], quantizer: Quantizer, single: Quantizer, seed: Seed | None, made: Cut
) -> None:
    """Codes and scales, as of a `single` quantisation; and then these scales. A tile is lost with its group."""
    scales: Any = quantizer.scales
    exact = torch.empty(tensors["scale"].shape, device=x.device, dtype=torch.float32)
    _launch(x, tensors["codes"], exact, None, single, seed, made)
    stored, kept = scales.rule.compressed(exact, quantizer.format)
    for name, tensor in stored.items():
        tensors[name].copy_(tensor)
    lost = scales.tile.spread(kept.isnan(), *matrix_shape(tuple(x.shape)))
    tensors["codes"].masked_fill_(lost[:, :: 8 // quantizer.format.bits], _zeros(quantizer.format))


@cache
def _zeros(format: Format) -> int:
    """A byte of codes of 0."""
    zero = int(encode(torch.zeros((), dtype=torch.float32, device="cpu"), format))
    return zero | zero << 4 if format.bits == 4 else zero


def _launch(
    x: Tensor, out: Tensor, scale: Tensor | None, whole: Tensor | None, quantizer: Quantizer, seed: Seed | None,
    made: Cut,
) -> None:  # fmt: skip
    values: Any = None if scale is not None else out.dtype
    # By the GPU's own instructions registers would spill of rows that start anywhere, and of values in float32.
    plainly = made.unit == 1 or (values is not None and x.dtype == torch.float32)
    given = quantizers.known(quantizer) if plainly else quantizers.told(quantizer, x.device, x.dtype)
    assert given is not None
    rule, element = given
    narrow = values is not None and values.itemsize == 2
    looked_up = None if element.bins is None else quantizers.table(quantizer.format, x.device)
    found, _ = Largest(quantizer, tuple(x.shape), x.dtype, x.device)(x)
    launch(
        functions("tiles").quantise, made.programs,
        bits(x), bits(out), None if scale is None else bits(scale), None if whole is None else bits(whole),
        found, looked_up, made.rows, made.columns // made.unit, *halves(seed),
        device=x.device, warps=WARPS, R=rule, Q=element, E=quantizers.e4m3() if rule.kind == "two_level" else None,
        SOURCE=KINDS[x.dtype], TARGET=KINDS.get(values), OUT=quantizers.written(values) if narrow else None,
        APART=scale is None and whole is not None, NOISY=seed is not None, H=made.tile[0], W=made.tile[1],
        UNIT=made.unit, ROWS=made.block[0], COLUMNS=made.block[1],
    )  # fmt: skip


def restored(
    tensors: dict[str, Tensor], out: Tensor, quantizer: Quantizer
) -> tuple[Cut, quantizers.Rule, quantizers.Meaning] | None:
    """What the kernel is compiled for; None where `run` does not write these values, wherever they are."""
    scales, format = quantizer.scales, quantizer.format
    if scales is None or tensors.keys() - _STORED or not lies_plain(out) or not out.numel():
        return None
    rule, meaning = quantizers.rule(format, scales.rule), quantizers.meaning(format)
    made = cut(tuple(out.shape), scales.tile, format.bits)
    if rule is None or meaning is None or made is None or not all(lies_plain(t, t.dtype) for t in tensors.values()):
        return None
    return (made, rule, meaning) if rule.kind != "power" or scales.rule.holds == "float8_e8m0fnu" else None


def run_dequantize(tensors: dict[str, Tensor], out: Tensor, quantizer: Quantizer) -> bool:
    """Write the values of `tensors` (`codes`, `scale` ...) to `out`. False where that is not done here: it takes dense
    contiguous tensors, values in fp32, bf16 or fp16."""
    found, format = restored(tensors, out, quantizer), quantizer.format
    if found is None:
        return False
    made, rule, meaning = found
    whole, group = tensors.get("tensor_scale", tensors.get("scale_offset")), tensors.get("scale_scale")
    coded: Any = quantizers.meaning(ocp.float8_e4m3fn)
    scale = coded.decoding if rule.kind == "two_level" else None
    launch(
        functions("restore").restore, made.blocks,
        bits(tensors["codes"]), bits(tensors["scale"]), None if whole is None else bits(whole),
        None if group is None else bits(group), quantizers.table(format, out.device),
        None if group is None else quantizers.table(MAP, out.device), bits(out), made.rows, made.columns // made.unit,
        device=out.device, warps=WARPS if made.unit > 1 else 2 * WARPS, R=rule, M=meaning,
        E=scale, TARGET=KINDS[out.dtype],
        OUT=None if out.dtype == torch.float32 else quantizers.written(out.dtype), H=made.tile[0], W=made.tile[1],
        UNIT=made.unit, ROWS=made.block[0], COLUMNS=made.block[1],
    )  # fmt: skip
    return True
