"""The operands of a linear layer's products in codes, as a GPU's tensor cores take them: laid out for each product.

Tensor cores multiply rows by rows: a product's two sides lie one after another along the dimension that it sums over. A
tensor enters two products, along its columns and along its rows. So it is rounded once for both, and the second copy,
not the first, is what a backward pass keeps.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from halfstep.kernels import scaled_mm, unit_kinds
from halfstep.kernels.gpu import layouts, rotated as gpu_rotated, turned
from halfstep.kernels.gpu.launch import here
from halfstep.kernels.rotation import rotate
from halfstep.kernels.scaled_mm import Tiles
from halfstep.ops.casts import Quantized, quantize, round_scaled, seed_of
from halfstep.ops.factors import factor_of, yet_to_form
from halfstep.ops.operand import Operand, operand
from halfstep.ops.stored import decoded
from halfstep.quant import TENSOR, Quantizer, layout
from halfstep.quant.hadamard import RANDOM
from halfstep.quant.memory import has_memory
from halfstep.quant.pack import pack, unpack
from halfstep.quant.rounding import Seed
from halfstep.quant.tile import block
from halfstep.recipe import LinearSpec, Matmul


@dataclass(frozen=True, eq=False)
class Coded:
    """A matrix in codes whose tiles share a scale: what was made of its rows, or `turned`, of its columns."""

    made: Quantized | Tiles
    dtype: torch.dtype
    """Of the product."""
    turned: bool = False
    remainder: ClassVar[None] = None
    """Tensor cores take nothing beside codes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns."""
        return self.made.matrix_shape[::-1] if self.turned else self.made.matrix_shape

    def t(self) -> "Coded":
        """The transposed matrix."""
        return replace(self, turned=not self.turned)

    def operand(self) -> Operand:
        """The same for a product that tensor cores do not compute."""
        made = self.made
        if isinstance(made, Tiles):
            tensors, wanted = made.tensors, layout(made.quantizer, made.matrix_shape, made.dtype)["scale"][0]
            if made.scale.dtype != wanted:  # numbers, all powers of two
                tensors = tensors | {"scale": (made.scale.view(torch.int32) >> 23).to(torch.uint8)}
            made = Quantized(made.quantizer, made.matrix_shape, made.dtype, tensors)
        matrix = decoded(made, self.dtype)
        return matrix.t() if self.turned else matrix


Side = Operand | Coded
Kept = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Values or codes, scale, and the scale of the whole tensor beside scales of tiles."""


class Units(NamedTuple):
    """Which products of a linear layer a GPU's tensor cores compute."""

    output: bool = False
    grad_input: bool = False
    grad_weight: bool = False
    there: bool = True
    """Whether the device may have any: then operands with one scale stay in their 8 bits."""
    both: frozenset[str] = frozenset()
    """The tensors (`input`, `weight`, `grad_output`) that `both_sides` makes for both of their products."""


NO_UNITS = Units(there=False)
_MOST = 4096
"""Sizes for which a spec keeps what is decided: batches may have any number of rows."""


def units_of(spec: LinearSpec, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Units:
    """The products of x (..., in) and a weight (out, in) that tensor cores compute, in `dtype`."""
    rows, sizes = x.numel() // max(x.shape[-1], 1), tuple(weight.shape)
    if not has_memory(x):
        return _units_of(spec, rows, sizes, dtype, x.device)
    key = rows, sizes, dtype, x.device, scaled_mm.capability(x.device)
    if key not in spec.known:
        if len(spec.known) >= _MOST:
            spec.known.clear()
        spec.known[key] = _units_of(spec, rows, sizes, dtype, x.device)
    return spec.known[key]  # type: ignore[no-any-return]


def _units_of(spec: LinearSpec, rows: int, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Units:
    across, shared = sizes
    output = on_units(spec.output, rows, shared, across, dtype, device)
    grad_input = on_units(spec.grad_input, rows, across, shared, dtype, device)
    if "weight" not in spec.rerounded and not output and grad_input and spec.grad_input.rhs is not None:
        grad_input = not unit_kinds.is_tiled(spec.grad_input.rhs)  # of what the forward left, which is not in codes
    grad_weight = on_units(spec.grad_weight, across, rows, shared, dtype, device)
    between, first, second, third = spec.grad_input.rhs, spec.output, spec.grad_input, spec.grad_weight
    alone = between is None or between.rounding != "stochastic"
    both = {
        "input": output and grad_weight and goes_both_ways(first, third, first.lhs, third.rhs),
        "weight": output and grad_input and goes_both_ways(first, second, first.rhs, second.rhs),
        "grad_output": grad_input and grad_weight and goes_both_ways(second, third, second.lhs, third.lhs, alone),
    }
    return Units(output, grad_input, grad_weight, both=frozenset(name for name, made in both.items() if made))


def on_units(product: Matmul, rows: int, shared: int, across: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether tensor cores there compute a product (rows, shared) times (shared, across)."""
    if product.accumulate is not None or not scaled_mm.is_there(device):
        return False
    sizes, multiplied = (rows, shared, across), product.multiplier is not None
    return scaled_mm.takes(product.lhs, product.rhs, sizes, dtype, device, multiplied)


def side(
    x: Tensor,
    quantizer: Quantizer | None,
    dtype: torch.dtype,
    state: Tensor | None = None,
    record: bool = False,
    signs: Tensor | None = None,
    dim: int = 1,
    coded: bool = False,
    seed: Seed | None = None,
    units: bool = True,
) -> Side:
    """The matrix x as one side of a product: `ops.operand`, where the shared dimension is `dim`, along which the
    quantizer's tiles lie. In codes where tensor cores compute the product (`coded`) and its scales are of tiles."""
    if quantizer is None or not coded or not unit_kinds.is_tiled(quantizer):
        down = quantizer if quantizer is None or dim else quantizer.down
        return operand(x, down, dtype, state, record, signs, dim, units, seed)
    if signs is not None:
        plain = quantizer.plain
        told = gpu_rotated.told(x := x.contiguous(), signs, dim, plain, turned=True) if here(x) else None
        if told is not None:
            drawn = seed_of(plain.rounding, seed, x.device)
            shape, tensors = gpu_rotated.run_codes(x, signs, dim, plain, told, drawn)
            return Coded(Quantized(plain, shape, torch.float32, tensors), dtype, not dim)
        x = rotate(x, signs, dim)
    return Coded(quantize(x if dim else x.t(), quantizer.plain, generator=seed), dtype, not dim)


def both_sides(
    x: Tensor,
    quantizer: Quantizer | None,
    dtype: torch.dtype,
    state: Tensor | None = None,
    record: bool = False,
    signs: Tensor | None = None,
    given: tuple[Seed | None, Seed | None] = (None, None),
) -> tuple[Side, Side]:
    """x as tensor cores take it along its columns, and along its rows, both rounded by the quantizer with its tiles
    along the dimension that is shared; each is laid out for its product. Square tiles, and one scale a tensor, have one
    rounding.

    Args:
        signs: of a Hadamard transform of x's rows, for the second product alone.
        given: the seeds of the two roundings; of one rounding, the first.
    """
    assert quantizer is not None
    quantizer = quantizer.plain
    scales = quantizer.scales
    shapes = tuple(x.shape), tuple(x.shape)[::-1]
    along: Quantized | Tiles
    down: Quantized | Tiles
    assert scales is not None
    if scales.tile == TENSOR:
        native = unit_kinds.dtype_of(quantizer.format)
        assert native is not None
        if here(x) and layouts.told(x, quantizer, given=True) is not None:
            formed = yet_to_form(x, quantizer.format, scales.rule, state, record)
            one, other, scale = layouts.codes(x, quantizer, seed_of(quantizer.rounding, given[0], x.device), *formed)
            return Operand(one.view(native), scale), Operand(other.view(native).t(), scale)
        factor, amax = factor_of(x, quantizer.format, scales.rule, state, record)
        assert factor is not None
        scale = factor.reciprocal()
        codes = round_scaled(x, factor, quantizer.format, quantizer.rounding, native, given[0], amax)
        return Operand(codes, scale), Operand(codes.t().contiguous().t(), scale)
    told = turned.told(x, quantizer, signs) if signs is not None and here(x) else None
    if signs is not None and told is None:
        first = side(x, quantizer, dtype, coded=True, seed=given[0])
        return first, side(x, quantizer, dtype, signs=signs, dim=0, coded=True, seed=given[1])
    if signs is not None and told is not None:
        parts = layouts.empty(x, quantizer)
        seeds = [seed_of(quantizer.rounding, seed, x.device) for seed in given]
        turned.run(x, quantizer, told, signs, *parts, seeds[0], seeds[1])
        along, down = (Tiles(quantizer, shape, x.dtype, made) for shape, made in zip(shapes, parts, strict=True))
    elif here(x) and layouts.told(x, quantizer) is not None:
        form = "number" if unit_kinds.kind_of(quantizer) in unit_kinds.NUMBERS else "stored"
        parts = layouts.empty(x, quantizer, form, outer=scales.tile == block(128))
        layouts.run(x, quantizer, *parts, seed_of(quantizer.rounding, given[0], x.device))
        along, down = (Tiles(quantizer, shape, x.dtype, made) for shape, made in zip(shapes, parts, strict=True))
    else:
        along = made = quantize(x, quantizer, generator=given[0])
        square = scales.tile.rows == scales.tile.columns
        down = _transposed(made) if square else quantize(x.t(), quantizer, generator=given[1])
    if unit_kinds.is_tiled(quantizer):
        return Coded(along, dtype), Coded(down, dtype, turned=True)
    return _by_rows(along), _by_rows(down).t()


def _by_rows(made: Quantized | Tiles) -> Operand:
    """FP8 numbers with a scale a row."""
    return Operand(unit_kinds.in_dtype(made.codes, made.quantizer.format), scaled_mm.multiplier(made))


def _transposed(made: Quantized) -> Quantized:
    """What the quantizer, of square tiles, makes of the transposed matrix."""
    format = made.quantizer.format
    codes = unpack(made.codes, format.bits, made.matrix_shape[1], format.high_nibble_first)
    turned = {"codes": pack(codes.t().contiguous(), format.bits, format.high_nibble_first)}
    turned["scale"] = made.scale.t().contiguous()
    return Quantized(made.quantizer, made.matrix_shape[::-1], made.dtype, made.tensors | turned)


def goes_both_ways(
    first: Matmul, second: Matmul, quantizer: Quantizer | None, later: Quantizer | None, alone: bool = False
) -> bool:
    """Whether `both_sides` makes what two products take of a tensor that they round with these quantizers: both alike,
    the first does not rotate it, the second by signs that are known, and where the second is rounded again that draws
    no noise of its own, or `alone`: nothing else is drawn between the two."""
    if quantizer is None or quantizer != later or first.hadamard is not None:
        return False
    tile = None if quantizer.scales is None else quantizer.scales.tile
    if second.hadamard is not None:
        along = tile is not None and tile.rows == 1 and unit_kinds.is_tiled(quantizer)
        return along and second.hadamard.seed != RANDOM and (quantizer.rounding != "stochastic" or alone)
    return quantizer.rounding != "stochastic" or (tile is not None and tile.rows == tile.columns)


def kept_parts(made: Side) -> Kept:
    """What a backward pass keeps of a side that goes along the rows."""
    if isinstance(made, Operand):
        return made.values, made.scale, None
    codes = unit_kinds.in_dtype(made.made.codes, made.made.quantizer.format)
    return codes, made.made.scale, made.made.tensors.get("tensor_scale")


def restored_side(kept: Kept, quantizer: Quantizer | None, dtype: torch.dtype) -> Side | None:
    """The side again; None where no tensor cores' codes were kept. Its quantizer's tiles lie along the shared
    dimension."""
    values, scale, whole = kept
    if values is None or scale is None or quantizer is None or values.dtype not in unit_kinds.DTYPES:
        return None  # tensor cores take no clamp's remainder, so that there is none beside codes
    if not unit_kinds.is_tiled(quantizer):
        return Operand(values, scale)
    quantizer, codes = quantizer.plain, values.view(torch.uint8)
    shape = (codes.shape[0], codes.shape[1] * 8 // quantizer.format.bits)
    tensors = {"codes": codes, "scale": scale} | ({} if whole is None else {"tensor_scale": whole})
    return Coded(Tiles(quantizer, shape, dtype, tensors), dtype, turned=True)
