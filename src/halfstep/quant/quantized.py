"""A quantised tensor: packed codes, the scales beside them, and how to get back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfstep.errors import QuantizationError
from halfstep.quant.cast import CONTAINERS, decode, prepare_out
from halfstep.quant.pack import packed_columns, unpack


if TYPE_CHECKING:
    from halfstep.quant.quantizer import Quantizer


@dataclass(frozen=True, eq=False)
class Quantized:
    """What a quantizer made of a tensor of that shape and dtype.

    `tensors` holds plain tensors by name: `codes` (rows, packed columns; see `quant.pack`), `scale` (tile rows, tile
    columns) where there are tiles, and what else the scale rule keeps. Saved and loaded by `halfstep.ops.storage`.
    """

    quantizer: Quantizer
    shape: tuple[int, ...]
    dtype: torch.dtype
    tensors: dict[str, Tensor]

    def __post_init__(self) -> None:
        expected = layout(self.quantizer, self.shape, self.dtype)
        if set(self.tensors) != set(expected):
            raise QuantizationError(f"tensors {sorted(self.tensors)} found; expected {sorted(expected)}")
        for name, (dtype, shape) in expected.items():
            found = self.tensors[name]
            if found.dtype != dtype or not _fits(tuple(found.shape), shape):
                sizes = tuple("any" if size is None else size for size in shape)
                raise QuantizationError(
                    f"{name!r} is {tuple(found.shape)} {found.dtype}; {self.quantizer.format.name} of shape "
                    f"{self.shape} has {sizes} {dtype}"
                )

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns: the last dimension, and all others flattened."""
        return matrix_shape(self.shape)

    @property
    def codes(self) -> Tensor:
        """The packed codes."""
        return self.tensors["codes"]

    @property
    def scale(self) -> Tensor:
        """The stored scales, an entry a tile: bytes of E8M0 or E4M3, or float32, as the scale rule has it.

        Raises:
            QuantizationError: there are none.
        """
        if "scale" not in self.tensors:
            raise QuantizationError(f"a plain cast to {self.quantizer.format.name} has no scale")
        return self.tensors["scale"]

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and whatever else is stored."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def dequantize(self, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """The values, in `dtype` (the original's when None) and the original shape.

        An element times its scale is formed in float32 (float64 for a float64 result), saturated to what the dtype
        holds and rounded to it. Tiles whose scale is NaN give NaN.
        """
        result = prepare_out(self.shape, self.dtype, self.codes.device, out, dtype)
        rows, columns = self.matrix_shape
        format, wide = self.quantizer.format, torch.float64 if result.dtype == torch.float64 else torch.float32
        codes = unpack(self.codes, format.bits, columns, format.high_nibble_first)
        values = decode(codes, format, wide)
        if self.quantizer.scaling is not None and self.quantizer.tile is not None:
            spread = self.quantizer.tile.spread
            if "zero_point" in self.tensors:
                values = values - spread(self.tensors["zero_point"], rows, columns)
            multiplier = spread(self.quantizer.scaling.multiplier(self.tensors, format), rows, columns)
            # A code that means a number other than 0 may stand in a tile without scale (a codebook's first entry).
            limit = torch.finfo(result.dtype).max
            values = torch.where(multiplier == 0, 0.0, values * multiplier.to(wide)).clamp(-limit, limit)
        if "outliers" in self.tensors:
            values = values.index_copy(1, self.tensors["outlier_columns"], self.tensors["outliers"].to(wide))
        return result.copy_(values.view(self.shape))


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor of that shape."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def layout(
    quantizer: Quantizer, shape: tuple[int, ...], dtype: torch.dtype
) -> dict[str, tuple[torch.dtype, tuple[int | None, ...]]]:
    """Name, dtype and shape of every tensor that a quantizer makes of one of that shape and dtype (None: any size)."""
    rows, columns = matrix_shape(shape)
    format = quantizer.format
    tensors: dict[str, tuple[torch.dtype, tuple[int | None, ...]]] = {
        "codes": (CONTAINERS[format.storage_bits], (rows, packed_columns(columns, format.bits)))
    }
    if quantizer.scaling is not None and quantizer.tile is not None:
        tensors |= quantizer.scaling.layout(quantizer.tile.grid(rows, columns))
    if quantizer.outliers is not None:
        tensors |= {"outlier_columns": (torch.int64, (None,)), "outliers": (dtype, (rows, None))}
    return tensors


def _fits(found: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    return len(found) == len(expected) and all(e is None or f == e for f, e in zip(found, expected, strict=True))
