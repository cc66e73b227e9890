"""The product of two operands of a linear layer, on the best path that this machine has for them."""

from dataclasses import replace

import torch
from torch import Tensor

from halfstep.kernels import scaled_mm, unit_kinds
from halfstep.kernels.cpu import whole_mm
from halfstep.kernels.watched import plus, times
from halfstep.ops.few_rows import StoredWeight, few_rows_product
from halfstep.ops.folding import is_sparse, sparse_sum
from halfstep.ops.matmul import matmul
from halfstep.ops.operand import Operand, scale_of
from halfstep.ops.sides import Coded, Side
from halfstep.recipe import Matmul


def forward_product(
    lhs: Side,
    weight: Side | StoredWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    product: Matmul,
    shared: int,
    evaluates: bool,
) -> Tensor:
    """lhs times the transpose of the weight (out, in)."""
    if evaluates and isinstance(lhs, Operand) and not isinstance(weight, Coded):
        y = few_rows_product(lhs, weight, bias, dtype, product, shared)
        if y is not None:
            return y
    matrix = stored_side(weight, dtype, isinstance(lhs, Coded)) if isinstance(weight, StoredWeight) else weight
    return product_of(lhs, matrix.t(), bias, dtype, product, shared)


def product_of(lhs: Side, rhs: Side, bias: Tensor | None, dtype: torch.dtype, product: Matmul, shared: int) -> Tensor:
    """lhs times rhs. A rotation fills their `shared` dimension up to whole blocks, no more for a multiplier."""
    multiplier = None
    if product.multiplier is not None:
        multiplier = product.multiplier.of(lhs.shape[0], shared, rhs.shape[1])
    if isinstance(lhs, Coded) and isinstance(rhs, Coded) and product.accumulate is None:
        along = not lhs.turned and rhs.turned  # what both are made of lies along the shared dimension
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
    """The product of rounded values, in whole numbers where both are such, and of what is sparse beside them. None
    where they are not, and nothing is."""
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
    """All of a stored weight: in its codes where the other side of the product is in codes (`coded`) too."""
    if coded and not weight.transposed and unit_kinds.is_tiled(weight.quantizer):
        return Coded(weight.quantized, dtype)
    return weight.operand()
