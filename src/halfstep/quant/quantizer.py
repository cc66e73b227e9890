"""A quantizer: how a tensor is rounded onto a format, and with which scales."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from halfstep import formats
from halfstep.errors import QuantizationError
from halfstep.formats import BlockFormat, Format
from halfstep.quant.cast import check_input, encode, encode_values, round_to, round_values
from halfstep.quant.pack import pack
from halfstep.quant.quantized import Quantized
from halfstep.quant.rounding import check_rounding, draw_seed, noise_bits
from halfstep.quant.scaling import Scaling, get_scaling
from halfstep.quant.tile import Tile


@dataclass(frozen=True)
class Quantizer:
    """How one operand is rounded: onto `format`, with a rounding mode and an overflow rule; in tiles that share a
    scale if there is a `scaling`.

    The matrix (last dimension; the others flattened to rows) is cut into tiles, each tile divided by its scale, each
    quotient rounded. Columns in which some |x| reaches `outliers` are kept apart, as they are, and are 0 for
    everything else.
    """

    format: Format
    rounding: str = "nearest_even"
    overflow: str = "saturate"
    tile: Tile | None = None
    scaling: Scaling | None = None
    outliers: float | None = None

    def __post_init__(self) -> None:
        check_rounding(self.rounding)
        if (self.tile is None) != (self.scaling is None):
            raise QuantizationError(
                f"a quantizer with tile {self.tile} and scaling {self.scaling}: give both, or neither for a plain cast"
            )
        if self.outliers is not None and (self.scaling is None or not self.outliers > 0):
            raise QuantizationError(
                f"outliers = {self.outliers}, scaling = {self.scaling}: expected a positive threshold beside tiles"
            )
        if self.scaling is not None and self.overflow != "saturate":
            raise QuantizationError(f"overflow={self.overflow!r} with scaled tiles: elements of a tile always saturate")

    def __call__(self, x: Tensor, generator: torch.Generator | int | None = None) -> Tensor:
        """The values of x after quantising and dequantising, in x's dtype and shape."""
        if self.scaling is None:
            return round_to(x, self.format, self.rounding, self.overflow, generator)
        return self.quantize(x, generator).dequantize()

    def quantize(self, x: Tensor, generator: torch.Generator | int | None = None) -> Quantized:
        """Codes and scales of x (any shape; float32, bfloat16, float16 or float64).

        Raises:
            QuantizationError: x is not floating point or requires grad; an unscaled NaN has no code.
        """
        check_input("quantize", x, self.rounding, self.overflow)
        if self.tile is None or self.scaling is None:
            codes = as_rows(encode(x, self.format, self.rounding, self.overflow, generator))
            return self._quantized(x, {"codes": codes})
        matrix = as_rows(x.detach())
        wide = matrix if matrix.dtype == torch.float64 else matrix.float()
        kept: dict[str, Tensor] = {}
        if self.outliers is not None:
            columns = (wide.abs() >= self.outliers).any(0).nonzero().flatten()
            kept = {"outlier_columns": columns, "outliers": matrix[:, columns]}
            wide = wide.index_fill(1, columns, 0.0)
        stored, multiplier = self.scaling.scale(wide, self.tile, self.format)
        quotient = self._quotient(wide, self.tile.spread(multiplier, *wide.shape)).flatten()
        noise = None
        if self.rounding == "stochastic":
            noise = noise_bits(draw_seed(generator), 0, x.numel(), x.device)
        if "zero_point" in stored:
            shift = self.tile.spread(stored["zero_point"], *wide.shape).flatten()
            quotient = round_values(quotient, _WHOLE, self.rounding, "saturate", noise, torch.float64) + shift
        codes = encode_values(quotient, self.format, self.rounding, "saturate", noise).view(wide.shape)
        return self._quantized(x, {"codes": codes, **stored, **kept})

    def _quotient(self, x: Tensor, multiplier: Tensor) -> Tensor:
        """x / multiplier; 0 in tiles of zeros, and in lost ones, whose scale says so."""
        wide = x.double() if self.scaling is not None and self.scaling.exact else x
        lost = multiplier.isnan() | (multiplier == 0)
        return torch.where(lost, 0.0, wide / torch.where(lost, 1.0, multiplier))

    def _quantized(self, x: Tensor, tensors: dict[str, Tensor]) -> Quantized:
        codes = pack(tensors["codes"], self.format.bits, self.format.high_nibble_first)
        return Quantized(self, tuple(x.shape), x.dtype, tensors | {"codes": codes})


_WHOLE = formats.Integer("whole", -(2**15) + 1, 2**15 - 1, source="steps from the zero point")


def as_rows(x: Tensor) -> Tensor:
    """x as a contiguous matrix: its last dimension, and all others flattened to rows."""
    return x.contiguous().view(prod(x.shape[:-1]), x.shape[-1] if x.dim() else 1)


def get_quantizer(
    format: str | Format | BlockFormat | torch.dtype | Quantizer,
    *,
    scale: str | None = None,
    rounding: str | None = None,
    overflow: str | None = None,
) -> Quantizer:
    """The quantizer of a format's name: tiles and scales as a block format has them, none for a scalar format.

    Args:
        format: `"mxfp4"`, `"nvfp4"`, `"nf4"`, `"e4m3fn"` ...; a Format, a BlockFormat, a `torch.dtype`; or a
            quantizer, to change something of it.
        scale: the rule for the scale, where the format has a choice (`floor`, `ceil`, `even`, `rceil` for MX ...).

    Raises:
        FormatError: unknown format.
        QuantizationError: a scale rule that the format does not have; an unknown rounding.

    >>> get_quantizer("mxfp4", scale="even").tile
    Tile(rows=1, columns=32)
    """
    changes: dict[str, Any] = {
        key: value for key, value in (("rounding", rounding), ("overflow", overflow)) if value is not None
    }
    if isinstance(format, Quantizer):
        if scale is not None:
            changes["scaling"] = get_scaling(scale)
        return replace(format, **changes)
    if not formats.is_block(format):
        if scale is not None:
            raise QuantizationError(
                f"scale={scale!r} for {formats.get(format).name}, which has none; block formats have: "
                f"{', '.join(formats.block_names())}"
            )
        return Quantizer(formats.get(format), **changes)
    block = formats.get_block(format)
    if scale is not None and scale not in block.rules:
        raise QuantizationError(f"{block.name} has no scale rule {scale!r}; it has: {', '.join(block.rules)}")
    return Quantizer(
        block.element,
        tile=Tile(*block.tile),
        scaling=get_scaling(scale or block.rules[0]),
        outliers=block.outliers,
        **changes,
    )
