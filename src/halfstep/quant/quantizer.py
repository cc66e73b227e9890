"""Quantizers: how a tensor is rounded onto a format, with scales per tile; and quantized tensors."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from halfstep import formats
from halfstep.errors import QuantizationError
from halfstep.formats import BlockFormat, Format
from halfstep.quant.cast import (
    CONTAINERS,
    check_input,
    decode,
    encode,
    encode_values,
    pack,
    packed_columns,
    prepare_out,
    round_to,
    round_values,
    unpack,
)  # fmt: skip
from halfstep.quant.estimator import Clamp, Estimator
from halfstep.quant.rounding import Seed, check_rounding, draw_seed, noise_bits
from halfstep.quant.scaling import NonlinearScaling, Scaling, StatefulScaling, get_scaling
from halfstep.quant.tile import ROW, TENSOR, Tile
from halfstep.quant.tracing import has_memory


@dataclass(frozen=True)
class Scales:
    """The tile of elements that share a scale, and the rule that computes the scale.

    Raises:
        QuantizationError: a rule with a state, which has one scale per tensor, and another tile.
    """

    tile: Tile
    rule: Scaling

    def __post_init__(self) -> None:
        if isinstance(self.rule, StatefulScaling) and self.tile != TENSOR:
            raise QuantizationError(f"{self.rule.name} scaling with tile {self.tile}: it needs one scale per tensor")
        _ = self.rule.text  # cached now: a traced graph cannot take a cached property's lock

    def __str__(self) -> str:
        return f"{self.rule}, {self.tile}"

    @property
    def transposed(self) -> "Scales":
        """The scales of the transposed matrix."""
        return replace(self, tile=self.tile.transposed)


@dataclass(frozen=True)
class Quantizer:
    """How an operand is rounded: onto `format`, with a rounding mode and an overflow rule; in tiles that share a scale,
    if there are `scales`.

    The matrix (last dimension; the others flattened to rows) is cut into tiles, each tile divided by its scale, each
    quotient rounded. Columns in which some |x| reaches `outliers` are kept apart, unrounded, and count as 0 in their
    tiles. With a `clamp`, values beyond its quantiles are clamped first.
    """

    format: Format
    rounding: str = "nearest_even"
    overflow: str = "saturate"
    scales: Scales | None = None
    outliers: float | None = None
    clamp: Clamp | None = None
    estimator: Estimator | None = None
    """The derivative assumed for rounding, where a matmul's weight is rounded by this quantizer; None is 1."""

    def __post_init__(self) -> None:
        check_rounding(self.rounding)
        if self.outliers is not None and (self.scales is None or not self.outliers > 0):
            raise QuantizationError(
                f"outliers = {self.outliers}, scales = {self.scales}: expected a positive threshold beside scales"
            )
        if self.clamp is not None and (self.scales is None or not self.scales.rule.linear or self.outliers is not None):
            raise QuantizationError(
                f"{self.clamp} with scales = {self.scales} and outliers = {self.outliers}: expected scales that "
                "elements are multiplied by, and one way of keeping outliers"
            )
        if self.estimator is not None and self.format.bits > 8:
            raise QuantizationError(
                f"an {self.estimator} for {self.format.name}: it is a curve between neighbours that are far apart; "
                "expected a format of at most 8 bits"
            )
        if self.scales is not None and self.overflow != "saturate":
            raise QuantizationError(f"overflow={self.overflow!r} with scaled tiles: elements of a tile always saturate")

    def __call__(self, x: Tensor, generator: torch.Generator | Seed | None = None) -> Tensor:
        """The values of x after quantising and dequantising, in x's dtype and shape."""
        if self.scales is None:
            return round_to(x, self.format, self.rounding, self.overflow, generator)
        return self.quantize(x, generator).dequantize()

    @property
    def tiling(self) -> Scales:
        """`scales`, for a quantizer that has them."""
        assert self.scales is not None
        return self.scales

    @cached_property
    def stateful(self) -> StatefulScaling | None:
        """The scaling rule, if it depends on earlier steps; else None."""
        rule = self.scales and self.scales.rule
        return rule if isinstance(rule, StatefulScaling) else None

    @cached_property
    def plain(self) -> "Quantizer":
        """This quantizer without clamp and estimator: it rounds the clamped values."""
        return replace(self, clamp=None, estimator=None) if self.clamp or self.estimator else self

    @cached_property
    def by_rows(self) -> bool:
        """Whether this rounds to 4-bit values with one scale per row, or column, that its amax determines, and the
        scales are powers of two or the values are multiples of a common step."""
        scales = self.scales
        if scales is None or self.format.bits > 4 or scales.tile not in (ROW, ROW.transposed) or not self.factors:
            return False
        return scales.rule.exact or self._steps is not None

    @cached_property
    def factors(self) -> bool:
        """Whether the amax of a tile alone determines the factor on its elements (`Scaling.factor`)."""
        return (
            self.scales is not None
            and self.scales.rule.factor(torch.ones((), dtype=torch.float32, device="cpu"), self.format) is not None
        )

    @property
    def steps(self) -> int | None:
        """The factor that makes all values integers of at most 127, for a quantizer that is `by_rows` with scales that
        are no powers of two: its matmuls are integer ones. None for others: values times powers of two fit 16 bits."""
        return self._steps if self.by_rows and self.scales is not None and not self.scales.rule.exact else None

    @cached_property
    def _steps(self) -> int | None:
        tried = (steps for steps in (1, 2, 4, 8, 16) if all((v * steps).is_integer() for v in self.format.values()))
        return next((steps for steps in tried if max(self.format.max, -self.format.min) * steps <= 127), None)

    @cached_property
    def container(self) -> torch.dtype:
        """The dtype of packed codes."""
        return CONTAINERS[self.format.storage_bits]

    @cached_property
    def inner(self) -> "Quantizer | None":
        """The quantizer with the power-of-two rule inside the scale rule, if it has one (`Scaling.inner`); else
        None."""
        rule = self.scales.rule.inner if self.scales is not None else None
        return None if self.scales is None or rule is None else replace(self, scales=replace(self.scales, rule=rule))

    @cached_property
    def down(self) -> "Quantizer":
        """This quantizer with its tiles along columns: for an operand whose shared dimension is its first."""
        return self if self.scales is None else replace(self, scales=self.scales.transposed)

    def quantize(self, x: Tensor, generator: torch.Generator | Seed | None = None) -> "Quantized":
        """Codes and scales of x (any shape; float32, bfloat16, float16 or float64).

        Raises:
            QuantizationError: x is not floating point or requires grad; an unscaled NaN has no code.
        """
        check_input("quantize", x, self.rounding, self.overflow)
        if self.scales is None:
            codes = as_rows(encode(x, self.format, self.rounding, self.overflow, generator))
            return self._quantized(x, {"codes": codes})
        tile, rule = self.scales.tile, self.scales.rule
        matrix = as_rows(x.detach())
        wide = matrix if matrix.dtype == torch.float64 else matrix.float()
        kept: dict[str, Tensor] = {}
        if self.clamp is not None:
            wide, beyond = self.clamp.parts(wide, self.clamp.bounds(wide))
            if self.clamp.compensation:
                places = beyond.flatten().nonzero().flatten()
                kept = {"remainder_places": places, "remainder": beyond.flatten()[places]}
        if self.outliers is not None:
            columns = (wide.abs() >= self.outliers).any(0).nonzero().flatten()
            kept = {"outlier_columns": columns, "outliers": matrix[:, columns]}
            wide = wide.index_fill(1, columns, 0.0)
        stored, multiplier = rule.scale(wide, tile, self.format)
        if isinstance(rule, NonlinearScaling):
            quotient = rule.elements(wide, stored, tile, self.format).flatten()
        else:
            quotient = _quotient(wide, tile.spread(multiplier, *wide.shape), rule).flatten()
        draws = self.rounding == "stochastic"
        noise = noise_bits(draw_seed(generator, x.device), 0, x.numel(), x.device) if draws else None
        if "zero_point" in stored:
            shift = tile.spread(stored["zero_point"], *wide.shape).flatten()
            quotient = round_values(quotient, _WHOLE, self.rounding, "saturate", noise, torch.float64) + shift
        codes = encode_values(quotient, self.format, self.rounding, "saturate", noise).view(wide.shape)
        return self._quantized(x, {"codes": codes, **stored, **kept})

    def derivative(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        """The `estimator`'s derivative of rounding at each element of x: float32, of x's shape.

        Args:
            factor: the factor on x before rounding, where the scale depends on earlier steps.

        Raises:
            QuantizationError: there is no estimator, or no factor for a scale that depends on earlier steps.
        """
        if self.estimator is None:
            raise QuantizationError(f"the derivative of rounding to {self.format.name} without an estimator")
        matrix = as_rows(x.detach()).float()
        if factor is not None:
            matrix = matrix * factor
        elif self.scales is not None:
            tile, rule = self.scales.tile, self.scales.rule
            matrix = _quotient(matrix, tile.spread(rule.scale(matrix, tile, self.format)[1], *matrix.shape), rule)
        return self.estimator.derivative(matrix, self.format).view(x.shape)

    def _quantized(self, x: Tensor, tensors: dict[str, Tensor]) -> "Quantized":
        return Quantized(
            self,
            tuple(x.shape),
            x.dtype,
            tensors | {"codes": pack(tensors["codes"], self.format.bits, self.format.high_nibble_first)},
        )


@dataclass(frozen=True, eq=False)
class Quantized:
    """A quantized tensor: the codes and scales of a tensor of that shape and dtype, and the quantizer that made them.

    `tensors` holds plain tensors by name: `codes` (rows, packed columns; see `quant.pack`), `scale` (tile rows, tile
    columns) where there are tiles, and other tensors of the scale rule. Saved and loaded by `halfstep.ops.files`.
    """

    quantizer: Quantizer
    shape: tuple[int, ...]
    dtype: torch.dtype
    tensors: dict[str, Tensor]

    def __post_init__(self) -> None:
        first = next(iter(self.tensors.values()), None)
        if first is not None and not has_memory(first, or_fake=True):
            return  # checked when the tensor was made; tracing cannot
        expected = layout(self.quantizer, self.shape, self.dtype)
        if set(self.tensors) != set(expected):
            raise QuantizationError(f"tensors {sorted(self.tensors)} found; expected {sorted(expected)}")
        for name, (dtype, shape) in expected.items():
            found = self.tensors[name]
            if found.dtype == dtype and found.shape == shape:
                continue
            alike = len(found.shape) == len(shape) and all(
                e in (None, f) for f, e in zip(found.shape, shape, strict=True)
            )
            if found.dtype != dtype or not alike:
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
        """The stored scales, one per tile: bytes of E8M0 or E4M3, or float32, as the scale rule has it.

        Raises:
            QuantizationError: the quantizer has no scales.
        """
        if "scale" not in self.tensors:
            raise QuantizationError(f"a plain cast to {self.quantizer.format.name} has no scale")
        return self.tensors["scale"]

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors: codes, scales and others."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def dequantize(self, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """The values, in `dtype` (None: the original's) and the original shape.

        An element times its scale, or the result of a `NonlinearScaling`, is computed in float32 (the former in float64
        for a float64 result), then saturated to the dtype's range and rounded to it. Tiles whose scale is NaN give NaN.
        """
        result = prepare_out(self.shape, self.dtype, self.codes.device, out, dtype)
        rows, columns = self.matrix_shape
        format, wide = self.quantizer.format, torch.float64 if result.dtype == torch.float64 else torch.float32
        values = decode(unpack(self.codes, format.bits, columns, format.high_nibble_first), format, wide)
        if self.quantizer.scales is not None:
            tile, rule = self.quantizer.scales.tile, self.quantizer.scales.rule
            if "zero_point" in self.tensors:
                values = values - tile.spread(self.tensors["zero_point"], rows, columns)
            if isinstance(rule, NonlinearScaling):
                values = rule.values(values.float(), self.tensors, tile, format).to(wide)
            else:
                multiplier = tile.spread(rule.multiplier(self.tensors, format), rows, columns)
                # In a tile with scale 0 codes may decode to values other than 0 (a codebook's first entry).
                values = torch.where(multiplier == 0, 0.0, values * multiplier.to(wide))
            limit = torch.finfo(result.dtype).max
            values = values.clamp(-limit, limit)
        if "remainder" in self.tensors:
            places, rest = self.tensors["remainder_places"], self.tensors["remainder"].to(wide)
            values = values.flatten().index_add(0, places, rest)
        if "outliers" in self.tensors:
            values = values.index_copy(1, self.tensors["outlier_columns"], self.tensors["outliers"].to(wide))
        return result.copy_(values.view(self.shape))


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor of that shape."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def layout(
    quantizer: Quantizer, shape: tuple[int, ...], dtype: torch.dtype
) -> dict[str, tuple[torch.dtype, tuple[int | None, ...]]]:
    """The name, dtype and shape of every tensor of a quantized tensor of that shape and dtype (None: any size)."""
    rows, columns = matrix_shape(shape)
    tensors: dict[str, tuple[torch.dtype, tuple[int | None, ...]]] = {
        "codes": (quantizer.container, (rows, packed_columns(columns, quantizer.format.bits)))
    }
    if quantizer.scales is not None:
        tensors |= quantizer.scales.rule.layout(quantizer.scales.tile.grid(rows, columns))
    if quantizer.outliers is not None:
        tensors |= {"outlier_columns": (torch.int64, (None,)), "outliers": (dtype, (rows, None))}
    if quantizer.clamp is not None and quantizer.clamp.compensation:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        tensors |= {"remainder_places": (torch.int64, (None,)), "remainder": (wide, (None,))}
    return tensors


def _quotient(x: Tensor, multiplier: Tensor, rule: Scaling) -> Tensor:
    """x / multiplier; 0 in tiles of zeros, and in tiles whose scale is NaN."""
    if rule.multiplies:
        return torch.where(multiplier.isnan(), 0.0, x * multiplier)
    wide = x.double() if rule.exact else x
    lost = multiplier.isnan() | (multiplier == 0)
    return torch.where(lost, 0.0, wide / torch.where(lost, 1.0, multiplier))


_WHOLE = formats.Integer("whole", -(2**15) + 1, 2**15 - 1, source="steps from the zero point")


def as_rows(x: Tensor) -> Tensor:
    """x as a contiguous matrix: its last dimension, and all others flattened to rows."""
    return x.contiguous().view(math.prod(x.shape[:-1]), x.shape[-1] if x.dim() else 1)


def get_quantizer(
    format: str | Format | BlockFormat | torch.dtype | Quantizer,
    *,
    scale: str | None = None,
    rounding: str | None = None,
    overflow: str | None = None,
) -> Quantizer:
    """The quantizer for a format's name: with tiles and scales for a block format, without for a scalar format.

    Args:
        format: `"mxfp4"`, `"nvfp4"`, `"nf4"`, `"e4m3fn"` ...; a Format, a BlockFormat, a `torch.dtype`; or a quantizer,
            to change some of its options.
        scale: the scale rule, where the format has a choice (`floor`, `ceil`, `even`, `rceil` for MX ...).

    Raises:
        FormatError: unknown format.
        QuantizationError: a scale rule that the format does not have; an unknown rounding.

    >>> print(get_quantizer("mxfp4", scale="even").scales)
    even, 1x32
    """
    changes: dict[str, Any] = {
        key: value for key, value in (("rounding", rounding), ("overflow", overflow)) if value is not None
    }
    if isinstance(format, Quantizer):
        if scale is not None:
            if format.scales is None:
                raise _has_none(scale, format.format)
            changes["scales"] = replace(format.scales, rule=get_scaling(scale))
        return replace(format, **changes)
    if not formats.is_block(format):
        if scale is not None:
            raise _has_none(scale, formats.get(format))
        return Quantizer(formats.get(format), **changes)
    block = formats.get_block(format)
    if scale is not None and scale not in block.rules:
        raise QuantizationError(f"{block.name} has no scale rule {scale!r}; it has: {', '.join(block.rules)}")
    return Quantizer(
        block.element,
        scales=Scales(Tile(*block.tile), get_scaling(scale or block.rules[0])),
        outliers=block.outliers,
        **changes,
    )


def _has_none(scale: str, format: Format) -> QuantizationError:
    return QuantizationError(
        f"scale={scale!r} for {format.name}, which has none; block formats have: {', '.join(formats.block_names())}"
    )
