"""Quantization in tiles on a GPU: `Quantizer.quantize` of CUDA tensors, and `Quantized.dequantize`, bit for bit.

One pass: a program reads a block of whole tiles, finds each tile's amax, computes the scales, and rounds. One scale per
tensor, row or column, and the tensor's scale of two-level scaling, need a pass before it.
"""

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.formats import Format, ocp
from halfstep.kernels.cpu.arrays import separate
from halfstep.kernels.gpu import KINDS, UNIT, amax, bits, functions, halves, is_dense, launch, prepared, quantizers
from halfstep.quant import Quantizer, Tile
from halfstep.quant.cast import encode
from halfstep.quant.quantizer import layout, matrix_shape
from halfstep.quant.rounding import Seed
from halfstep.quant.scaling import absmax
from halfstep.quant.scaling.absmax import MAP, DoubleAbsmax
from halfstep.quant.tile import ROW


_LARGEST = 1 << 14  # the most elements of a tile
_BLOCK = 1 << 12  # elements of a block
WARPS = 8  # per program over 4096 elements: 16 elements per thread


_STORED = {"codes", "scale", "tensor_scale", "scale_scale", "scale_offset"}


class Cut(NamedTuple):
    """How a matrix is cut into blocks for kernels."""

    rows: int
    columns: int
    tile: tuple[int, int]
    """Rows and columns of a tile; 0 for a whole dimension."""
    block: tuple[int, int]
    unit: int
    """A divisor of the number of columns that the kernel may assume; `columns` itself where a block spans the
    columns."""

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return -(-self.rows // self.block[0]) * -(-self.columns // self.block[1])

    @property
    def programs(self) -> int:
        """The number of programs: one per block, or one per tile where tiles are taller than a block."""
        return -(-self.rows // max(self.block[0], self.tile[0])) * -(-self.columns // self.block[1])


def cut(shape: tuple[int, ...], tile: Tile, bits: int) -> Cut | None:
    """The blocks of a tensor of that shape in such tiles, with elements of `bits` bits. None where no kernel supports
    them: tile sizes that are no power of two or too large, and rows whose codes do not fill their last byte."""
    rows, columns = matrix_shape(shape)
    high, wide = tile.rows, tile.columns
    if (
        (0 in (high, wide) and high + wide > 1)  # a tile that spans one dimension is one row or one column
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
    """The blocks in which kernels quantize x, on any device. None where they do not support it: x must be dense,
    contiguous, and fp32, bf16 or fp16."""
    if not is_dense(x) or not x.numel() or quantizer.scales is None:
        return None
    single = _single(quantizer)
    if single is not None and quantizer.format.bits not in (4, 8):
        return None
    constants, made = (
        quantizers.constants(single or quantizer),
        cut(tuple(x.shape), quantizer.scales.tile, quantizer.format.bits),
    )
    if constants is None or made is None:
        return None
    if constants[0].second is not None and made.tile[0] > made.block[0]:
        return None  # the errors of a tile that is read in several strips are not summed
    return made if constants[0].kind != "two_level" or all(made.tile) else None


def run(x: Tensor, tensors: dict[str, Tensor], quantizer: Quantizer, seed: Seed | None) -> bool:
    """Write the tensors of `quantizer.quantize(x)` to `tensors` (`codes`, `scale` ...), which have its layout. False
    where no kernel supports it."""
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
    """Write x, quantized and dequantized, to `out`. False where no kernel supports it: x and out must have one shape
    and not overlap.

    With two levels of scales, if `tensor_scale` is given the tensor's scale is written to it and not applied to the
    values.
    """
    if not is_dense(out) or x.shape != out.shape or x.data_ptr() == out.data_ptr() or not separate(x, out):
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
    """The launch that finds the amaxes which scales need before the rounding pass, as int32 bits, for one shape and
    dtype.

    They are those of the whole tensor, or of each row or column; for two levels of scales, the largest over tiles
    without infinity or NaN. A call returns those for the tensor and those for its transpose; None where none are
    needed.

    Args:
        both: find those for the transpose too.
    """

    def __init__(
        self, quantizer: Quantizer, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, both: bool = False
    ) -> None:
        constants, tile = quantizers.constants(quantizer), quantizer.tiling.tile
        assert constants is not None
        made = cut(shape, tile, 8)  # with `bits` 8: only maxima are found, no codes packed
        assert made is not None
        self._shared = both and tile.rows == tile.columns
        self._turned = None
        if both and not self._shared and tile != ROW:
            self._turned = Largest(quantizer.down, shape, dtype, device)
        two_level = constants[0].kind == "two_level"
        self.zeros = 0
        """The size of the zeros that a call may pass, to be raised by atomic max."""
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
    """For a rule that quantizes its scales (`DoubleAbsmax`), the quantizer with unquantized scales; None for other
    rules."""
    scales = quantizer.scales
    if scales is None or not isinstance(scales.rule, DoubleAbsmax):
        return None
    return replace(quantizer, scales=replace(scales, rule=absmax.absmax))


def _run_twice(
    x: Tensor, tensors: dict[str, Tensor], quantizer: Quantizer, single: Quantizer, seed: Seed | None, made: Cut
) -> None:
    """Write the codes of the `single` quantizer, then quantize its scales. Tiles whose stored scale is NaN get codes of
    0: one that is not finite makes all scales of its group NaN."""
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
    """The byte whose codes all decode to 0."""
    zero = int(encode(torch.zeros((), dtype=torch.float32, device="cpu"), format))
    return zero | zero << 4 if format.bits == 4 else zero


def _launch(
    x: Tensor, out: Tensor, scale: Tensor | None, whole: Tensor | None, quantizer: Quantizer, seed: Seed | None,
    made: Cut,
) -> None:  # fmt: skip
    values: Any = None if scale is not None else out.dtype
    # With the GPU's conversion instructions registers would spill for unaligned rows, and for values of a float32
    # input.
    plainly = made.unit == 1 or (values is not None and x.dtype == torch.float32)
    given = quantizers.constants(quantizer) if plainly else quantizers.constants_on(quantizer, x.device, x.dtype)
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
    """The constants of the dequantizing kernel. None where it does not support these tensors, on any device."""
    scales, format = quantizer.scales, quantizer.format
    if scales is None or tensors.keys() - _STORED or not is_dense(out) or not out.numel():
        return None
    rule, meaning = quantizers.rule(format, scales.rule), quantizers.meaning(format)
    made = cut(tuple(out.shape), scales.tile, format.bits)
    if rule is None or meaning is None or made is None or not all(is_dense(t, t.dtype) for t in tensors.values()):
        return None
    return (made, rule, meaning) if rule.kind != "power" or scales.rule.holds == "float8_e8m0fnu" else None


def run_dequantize(tensors: dict[str, Tensor], out: Tensor, quantizer: Quantizer) -> bool:
    """Write the values of `tensors` (`codes`, `scale` ...) to `out`. False where no kernel supports it: all must be
    dense and contiguous, and `out` fp32, bf16 or fp16."""
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
