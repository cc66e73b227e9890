"""Operands of a linear layer as codes for native FP8 and FP4 GEMMs, and `product_of`, the matmul of two operands.

`product_of` takes the fastest path of this machine. An operand may have scales along the shared dimension (`folded`).

Tensor cores read both operands contiguously along the dimension that they sum over. A tensor enters two matmuls, one
summing over its columns, one over its rows. So it is rounded for both at once, and the second copy is saved for
backward.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from halfstep.kernels import scaled_mm, units_mm
from halfstep.kernels.cpu import clamp_operators as operators, whole_mm
from halfstep.kernels.gpu import here, layouts, rotated as gpu_rotated, turned
from halfstep.kernels.operator import plus, times
from halfstep.kernels.operators import rotate
from halfstep.kernels.scaled_mm import Tiles
from halfstep.ops.casts import Quantized, carrier, quantize, round_scaled, seed_of
from halfstep.ops.few_rows import StoredWeight, few_rows_product
from halfstep.ops.operand import Operand, decoded, factor_of, factor_or_amax, operand, scale_of
from halfstep.ops.plain import matmul
from halfstep.ops.remainder import Remainder
from halfstep.quant import TENSOR, Quantizer, layout
from halfstep.quant.cast import pack, unpack
from halfstep.quant.hadamard import RANDOM
from halfstep.quant.rounding import Seed
from halfstep.quant.tile import block
from halfstep.quant.tracing import has_memory
from halfstep.recipe import LinearSpec, Matmul


# ---- scales along the shared dimension, and remainders ---------------------------------------------------------------

Rest = tuple[Tensor | None, Tensor | None, Tensor | None]
"""The tensors of a `Remainder` (`Remainder.parts`), or None each."""


def folded(
    x: Tensor,
    rhs: Operand,
    quantizer: Quantizer,
    dtype: torch.dtype,
    state: Tensor | None,
    record: bool,
    down: bool,
    seed: Seed | None,
) -> tuple[Operand, Operand]:
    """The operand of x times the scales of rhs along the shared dimension, and the operand of rhs without these scales
    (integers).

    x is (rows, shared), or with `down` (shared, rows); rhs is (shared, n). x is rounded after the multiplication, so
    its rounding error differs from that of x alone.
    """
    assert rhs.scale is not None
    rest = None if rhs.remainder is None else rhs.remainder.over(rhs.scale)
    scale, scales = rhs.scale if down else rhs.scale.t(), quantizer.scales
    if quantizer == quantizer.plain and scales is not None and scales.tile == TENSOR:
        into = carrier(quantizer.format.key, dtype)
        made = operators.fold(x, scale, quantizer.format, quantizer.rounding, scales.rule, into)
        if made is not None:
            return Operand(*made), Operand(rhs.values, None, rest)
    wide = x.to(torch.promote_types(x.dtype, torch.float32)) * scale
    return operand(wide, quantizer, dtype, state, record, seed=seed), Operand(rhs.values, None, rest)


def rest_of(used: Any, is_kept: bool) -> Rest:
    """The tensors of an operand's remainder to save for backward; all None if it has none or `is_kept` is False."""
    return used.remainder.parts if is_kept and used.remainder is not None else (None, None, None)


def restored(rest: Rest, width: int) -> Remainder | None:
    """The `Remainder` of `width` columns rebuilt from its tensors; None if there is none."""
    return None if rest[0] is None else Remainder(rest[0], rest[1], rest[2], width)


def sparse_sum(lhs: Operand, rhs: Operand) -> Tensor | None:
    """The remainder of one operand times the other operand, in float32; None if neither has a remainder.

    Only for operands for which `is_sparse` is True; others with remainders take `Operand.widened`.
    """
    if lhs.remainder is not None:
        return lhs.remainder.times(rhs.values, rhs.scale)
    if rhs.remainder is None:
        return None
    return rhs.remainder.t().times(lhs.values.t(), None if lhs.scale is None else lhs.scale.t()).t()


def is_sparse(lhs: Operand, rhs: Operand) -> bool:
    """Whether just one of two operands has a remainder, and the other's scale does not vary along the shared
    dimension."""
    if (lhs.remainder is None) == (rhs.remainder is None):
        return False
    return _outer(rhs.scale, 0) if lhs.remainder is not None else _outer(lhs.scale, 1)


def _outer(scale: Tensor | None, shared: int) -> bool:
    """Whether a scale does not vary along the shared dimension, so that it can multiply the result of the matmul."""
    return scale is None or not scale.dim() or scale.shape[shared] == 1


# ---- matrices as codes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Coded:
    """A matrix as codes and scales of tiles along its rows; with `turned`, `made` is its transpose, with tiles along
    its columns."""

    made: Quantized | Tiles
    dtype: torch.dtype
    """The dtype of the matmul's result."""
    turned: bool = False
    remainder: ClassVar[None] = None
    """Native GEMMs take no remainder."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns."""
        return self.made.matrix_shape[::-1] if self.turned else self.made.matrix_shape

    def t(self) -> "Coded":
        """The transposed matrix."""
        return replace(self, turned=not self.turned)

    def operand(self) -> Operand:
        """The same matrix decoded, for a matmul that tensor cores do not compute."""
        made = self.made
        if isinstance(made, Tiles):
            tensors, wanted = made.tensors, layout(made.quantizer, made.matrix_shape, made.dtype)["scale"][0]
            if made.scale.dtype != wanted:  # float32 powers of two, to E8M0
                tensors = tensors | {"scale": (made.scale.view(torch.int32) >> 23).to(torch.uint8)}
            made = Quantized(made.quantizer, made.matrix_shape, made.dtype, tensors)
        matrix = decoded(made, self.dtype)
        return matrix.t() if self.turned else matrix


Side = Operand | Coded
Kept = tuple[Tensor | None, Tensor | None, Tensor | None]
"""What is saved of an operand: its values or codes, its scale, and the tensor's scale of two-level scales; or None."""


# ---- matmuls on tensor cores -----------------------------------------------------------------------------------------


class TensorCores(NamedTuple):
    """Which matmuls of a linear layer a GPU's FP8 or FP4 tensor cores compute."""

    output: bool = False
    grad_input: bool = False
    grad_weight: bool = False
    in_8_bits: bool = True
    """Whether operands with one scale are stored in 8 bits, since the device may have such tensor cores."""
    both: frozenset[str] = frozenset()
    """The tensors (`input`, `weight`, `grad_output`) that `both_sides` rounds for both of their matmuls at once."""


NO_TENSOR_CORES = TensorCores(in_8_bits=False)
_MOST = 4096
"""The entries of a spec's cache `known` at which it is cleared: batches may have any number of rows."""


def tensor_cores_of(spec: LinearSpec, x: Tensor, weight: Tensor, dtype: torch.dtype) -> TensorCores:
    """Which matmuls of a layer with x (..., in) and weight (out, in) tensor cores compute, with results in `dtype`."""
    rows, sizes = x.numel() // max(x.shape[-1], 1), tuple(weight.shape)
    if not has_memory(x):
        return _tensor_cores_of(spec, rows, sizes, dtype, x.device)
    key = rows, sizes, dtype, x.device, scaled_mm.capability(x.device)
    if key not in spec.known:
        if len(spec.known) >= _MOST:
            spec.known.clear()
        spec.known[key] = _tensor_cores_of(spec, rows, sizes, dtype, x.device)
    return spec.known[key]  # type: ignore[no-any-return]


def _tensor_cores_of(
    spec: LinearSpec, rows: int, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> TensorCores:
    across, shared = sizes
    output = on_tensor_cores(spec.output, rows, shared, across, dtype, device)
    grad_input = on_tensor_cores(spec.grad_input, rows, across, shared, dtype, device)
    if "weight" not in spec.rerounded and not output and grad_input and spec.grad_input.rhs is not None:
        grad_input = not units_mm.is_tiled(spec.grad_input.rhs)  # it takes the forward's operand, which has no codes
    grad_weight = on_tensor_cores(spec.grad_weight, across, rows, shared, dtype, device)
    between, first, second, third = spec.grad_input.rhs, spec.output, spec.grad_input, spec.grad_weight
    alone = between is None or between.rounding != "stochastic"
    both = {
        "input": output and grad_weight and goes_both_ways(first, third, first.lhs, third.rhs),
        "weight": output and grad_input and goes_both_ways(first, second, first.rhs, second.rhs),
        "grad_output": grad_input and grad_weight and goes_both_ways(second, third, second.lhs, third.lhs, alone),
    }
    return TensorCores(output, grad_input, grad_weight, both=frozenset(name for name, made in both.items() if made))


def on_tensor_cores(
    product: Matmul, rows: int, shared: int, across: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether the device's tensor cores compute a matmul (rows, shared) times (shared, across)."""
    if product.accumulate is not None or not scaled_mm.may_have_tensor_cores(device):
        return False
    sizes, multiplied = (rows, shared, across), product.multiplier is not None
    return scaled_mm.takes(product.lhs, product.rhs, sizes, dtype, device, multiplied)


# ---- operands of a matmul --------------------------------------------------------------------------------------------


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
    in_8_bits: bool = True,
) -> Side:
    """The matrix x, rounded, as one operand of a matmul that sums over dimension `dim`, along which the quantizer's
    tiles lie: a `Coded` if tensor cores compute the matmul (`coded`) and scales are of tiles, else `ops.operand`."""
    if quantizer is None or not coded or not units_mm.is_tiled(quantizer):
        down = quantizer if quantizer is None or dim else quantizer.down
        return operand(x, down, dtype, state, record, signs, dim, in_8_bits, seed)
    if signs is not None:
        plain = quantizer.plain
        constants = gpu_rotated.constants(x := x.contiguous(), signs, dim, plain, turned=True) if here(x) else None
        if constants is not None:
            shape, tensors = gpu_rotated.run_codes(
                x, signs, dim, plain, constants, seed_of(plain.rounding, seed, x.device)
            )
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
    """The operands of x for a matmul that sums over its columns, and for one that sums over its rows.

    Each is laid out for tensor cores, rounded with tiles along its matmul's shared dimension. With square tiles, or one
    scale a tensor, x is rounded once.

    Args:
        signs: of a Hadamard transform along x's rows, for the second matmul alone.
        given: the seeds of the two roundings; one rounding takes the first.
    """
    assert quantizer is not None
    quantizer = quantizer.plain
    scales, shapes = quantizer.tiling, (tuple(x.shape), tuple(x.shape)[::-1])
    along: Quantized | Tiles
    down: Quantized | Tiles
    if scales.tile == TENSOR:
        native = units_mm.dtype_of(quantizer.format)
        assert native is not None
        if here(x) and layouts.constants(x, quantizer, scale_given=True) is not None:
            formed = factor_or_amax(x, quantizer.format, scales.rule, state, record)
            one, other, scale = layouts.codes(x, quantizer, seed_of(quantizer.rounding, given[0], x.device), *formed)
            return Operand(one.view(native), scale), Operand(other.view(native).t(), scale)
        factor, amax = factor_of(x, quantizer.format, scales.rule, state, record)
        assert factor is not None
        scale = factor.reciprocal()
        codes = round_scaled(x, factor, quantizer.format, quantizer.rounding, native, given[0], amax)
        return Operand(codes, scale), Operand(codes.t().contiguous().t(), scale)
    constants = turned.constants(x, quantizer, signs) if signs is not None and here(x) else None
    if signs is not None and constants is None:
        first = side(x, quantizer, dtype, coded=True, seed=given[0])
        return first, side(x, quantizer, dtype, signs=signs, dim=0, coded=True, seed=given[1])
    if signs is not None and constants is not None:
        parts = layouts.empty(x, quantizer)
        seeds = [seed_of(quantizer.rounding, seed, x.device) for seed in given]
        turned.run(x, quantizer, constants, signs, *parts, seeds[0], seeds[1])
        along, down = (Tiles(quantizer, shape, x.dtype, made) for shape, made in zip(shapes, parts, strict=True))
    elif here(x) and layouts.constants(x, quantizer) is not None:
        form = "number" if units_mm.kind_of(quantizer) in units_mm.NUMBERS else "stored"
        parts = layouts.empty(x, quantizer, form, outer=scales.tile == block(128))
        layouts.run(x, quantizer, *parts, seed_of(quantizer.rounding, given[0], x.device))
        along, down = (Tiles(quantizer, shape, x.dtype, made) for shape, made in zip(shapes, parts, strict=True))
    else:
        along = made = quantize(x, quantizer, generator=given[0])
        square = scales.tile.rows == scales.tile.columns
        down = _transposed(made) if square else quantize(x.t(), quantizer, generator=given[1])
    if units_mm.is_tiled(quantizer):
        return Coded(along, dtype), Coded(down, dtype, turned=True)
    return _by_rows(along), _by_rows(down).t()


def _by_rows(made: Quantized | Tiles) -> Operand:
    """The operand of FP8 values with one scale a row."""
    return Operand(units_mm.in_dtype(made.codes, made.quantizer.format), scaled_mm.multiplier(made))


def _transposed(made: Quantized) -> Quantized:
    """The transpose of a matrix quantized in square tiles: its codes and scales transposed."""
    format = made.quantizer.format
    codes = unpack(made.codes, format.bits, made.matrix_shape[1], format.high_nibble_first)
    turned = {"codes": pack(codes.t().contiguous(), format.bits, format.high_nibble_first)}
    turned["scale"] = made.scale.t().contiguous()
    return Quantized(made.quantizer, made.matrix_shape[::-1], made.dtype, made.tensors | turned)


def goes_both_ways(
    first: Matmul, second: Matmul, quantizer: Quantizer | None, later: Quantizer | None, alone: bool = False
) -> bool:
    """Whether `both_sides` can round a tensor for these two matmuls, which round it with `quantizer` and `later`.

    They must be equal, and only the second matmul may rotate, with fixed signs. A second rounding must draw no noise,
    unless the caller says that nothing else is drawn in between (`alone`).
    """
    if quantizer is None or quantizer != later or first.hadamard is not None:
        return False
    tile = None if quantizer.scales is None else quantizer.scales.tile
    if second.hadamard is not None:
        along = tile is not None and tile.rows == 1 and units_mm.is_tiled(quantizer)
        return along and second.hadamard.seed != RANDOM and (quantizer.rounding != "stochastic" or alone)
    return quantizer.rounding != "stochastic" or (tile is not None and tile.rows == tile.columns)


def kept_parts(made: Side) -> Kept:
    """The tensors to save for backward of an operand that sums over its rows (the second of `both_sides`)."""
    if isinstance(made, Operand):
        return made.values, made.scale, None
    codes = units_mm.in_dtype(made.made.codes, made.made.quantizer.format)
    return codes, made.made.scale, made.made.tensors.get("tensor_scale")


def restored_side(kept: Kept, quantizer: Quantizer | None, dtype: torch.dtype) -> Side | None:
    """The operand rebuilt from `kept_parts`, with tiles of the quantizer along the shared dimension; None if no native
    8-bit or packed codes were saved."""
    values, scale, whole = kept
    if values is None or scale is None or quantizer is None or values.dtype not in units_mm.DTYPES:
        return None  # and codes have no remainder, since tensor cores take no clamp
    if not units_mm.is_tiled(quantizer):
        return Operand(values, scale)
    quantizer, codes = quantizer.plain, values.view(torch.uint8)
    shape = (codes.shape[0], codes.shape[1] * 8 // quantizer.format.bits)
    tensors = {"codes": codes, "scale": scale} | ({} if whole is None else {"tensor_scale": whole})
    return Coded(Tiles(quantizer, shape, dtype, tensors), dtype, turned=True)


# ---- the matmul ------------------------------------------------------------------------------------------------------


def forward_product(
    lhs: Side,
    weight: Side | StoredWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    product: Matmul,
    shared: int,
    evaluates: bool,
) -> Tensor:
    """lhs times the transpose of the weight (out, in), plus bias; in evaluation of few rows by their own kernel."""
    if evaluates and isinstance(lhs, Operand) and not isinstance(weight, Coded):
        y = few_rows_product(lhs, weight, bias, dtype, product, shared)
        if y is not None:
            return y
    matrix = stored_side(weight, dtype, isinstance(lhs, Coded)) if isinstance(weight, StoredWeight) else weight
    return product_of(lhs, matrix.t(), bias, dtype, product, shared)


def product_of(lhs: Side, rhs: Side, bias: Tensor | None, dtype: torch.dtype, product: Matmul, shared: int) -> Tensor:
    """lhs times rhs, plus bias, in `dtype`, on the fastest path of this machine.

    `shared` is the shared dimension's size for the multiplier: a rotation may have padded the operands' to whole
    blocks.
    """
    multiplier = None
    if product.multiplier is not None:
        multiplier = product.multiplier.of(lhs.shape[0], shared, rhs.shape[1])
    if isinstance(lhs, Coded) and isinstance(rhs, Coded) and product.accumulate is None:
        along = not lhs.turned and rhs.turned  # both are contiguous along the shared dimension
        y = scaled_mm.run_tiled(lhs.made, rhs.made, bias, dtype, multiplier) if along else None
        if y is not None:
            return y
    lhs = lhs.operand() if isinstance(lhs, Coded) else lhs
    rhs = rhs.operand() if isinstance(rhs, Coded) else rhs
    if min(lhs.values.itemsize, rhs.values.itemsize) > 1 and lhs.remainder is None and rhs.remainder is None:
        bias = None if bias is None else bias.to(dtype)
        return matmul(lhs.values, rhs.values, bias, scale_of(lhs, rhs), dtype, product.accumulate, multiplier)
    apart, y = sum(side.remainder is not None for side in (lhs, rhs)), None
    if product.accumulate is None and not apart:
        y = scaled_mm.run(lhs, rhs, bias, dtype, multiplier)
    if product.accumulate is None and apart < 2 and y is None:
        y = _with_remainders(lhs, rhs, bias, dtype, multiplier)
    if y is not None:
        return y
    lhs, rhs, bias = lhs.widened(dtype), rhs.widened(dtype), None if bias is None else bias.to(dtype)
    return matmul(lhs.values, rhs.values, bias, scale_of(lhs, rhs), dtype, product.accumulate, multiplier)


def _with_remainders(
    lhs: Operand, rhs: Operand, bias: Tensor | None, dtype: torch.dtype, multiplier: float | None
) -> Tensor | None:
    """The matmul with the remainder's part added, by an integer GEMM if both operands are integers. None if neither
    applies: no integers and no remainder."""
    more = sparse_sum(lhs, rhs) if is_sparse(lhs, rhs) else None
    if more is not None and multiplier is not None:
        more = times(more, multiplier)
    y = whole_mm.run(lhs, rhs, bias, dtype, multiplier, more)
    if y is not None or more is None:
        return y
    lhs, rhs = replace(lhs, remainder=None).widened(dtype), replace(rhs, remainder=None).widened(dtype)
    bias = None if bias is None else bias.to(dtype)
    product = matmul(lhs.values, rhs.values, bias, scale_of(lhs, rhs), dtype, None, multiplier)
    return plus(product.to(more.dtype), more).to(dtype)


def stored_side(weight: StoredWeight, dtype: torch.dtype, coded: bool) -> Side:
    """A stored weight as an operand: codes if the other operand is `coded` and tensor cores take them, else decoded."""
    if coded and not weight.transposed and units_mm.is_tiled(weight.quantizer):
        return Coded(weight.quantized, dtype)
    return weight.operand()
