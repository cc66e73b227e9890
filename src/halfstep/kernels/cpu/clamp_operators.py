"""Quantiles, clamped rows with a scale each, sparse matmuls and gradient estimators: by a kernel, else by torch.

As in `operators`, under `torch.compile` each is one opaque operator that writes to `out`.
"""

import json
from typing import Any

import torch
from torch import Tensor

from halfstep import formats
from halfstep.formats import Format
from halfstep.kernels.cpu import quantiles, rows, slopes
from halfstep.kernels.operator import Operator, blank, seed_in
from halfstep.quant import Clamp, Estimator, Quantizer, Scales, Tile
from halfstep.quant.cast import round_to
from halfstep.quant.quantizer import as_rows
from halfstep.quant.rounding import Seed
from halfstep.quant.scaling import Scaling, from_text
from halfstep.quant.tracing import has_memory


FoldedOrNone = tuple[Tensor, Tensor] | None
Parts = tuple[Tensor, Tensor | None, Tensor | None]
"""A sparse matrix: values, their columns, and where rows start; or a dense matrix and two None."""


def bounds(x: Tensor, clamp: Clamp) -> Tensor:
    """The `Clamp.bounds` of a matrix."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = torch.empty(2, x.shape[0] if clamp.tile == "row" else 1, dtype=wide, device=x.device)
    _QUANTILES(x, out, clamp)
    return out


def bounds_into(x: Tensor, out: Tensor, clamp: Clamp) -> None:
    """`Clamp.bounds` of a matrix, written to `out`."""
    if not quantiles.run(x, out, clamp) and not blank(x, out):
        out.copy_(clamp.bounds(x))


def amax(x: Tensor, bounds: Tensor | None, dim: int) -> Tensor:
    """The amax of each row (dim 1) or column (dim 0) of x clamped to the bounds; NaN where an element or a bound is
    NaN."""
    if has_memory(x) and (found := rows.run_amax(x, bounds, dim)) is not None:
        return found
    low = high = x.new_zeros([1 if i == dim else size for i, size in enumerate(x.shape)])
    if x.numel() and not (dim == 1 or bounds is None or bounds.shape[1] == 1):
        x, bounds = clamped(x, bounds), None
    if x.numel():
        low, high = torch.aminmax(x, dim=dim, keepdim=True)
    # Clamping is monotonic, so it is enough to clamp the minimum and the maximum.
    return torch.maximum(-clamped(low, bounds), clamped(high, bounds)).float()


def round_rows(
    x: Tensor, bounds: Tensor | None, factor: Tensor, format: Format, rounding: str, seed: Seed | None,
    steps: int | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """x clamped to its bounds, times factor (of a row or a column), rounded and saturated: with `steps`, times that, as
    int8; without, divided by the factor again, a power of two, in `dtype`."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _ROUND_ROWS(x, bounds, factor, out, format, rounding, seed, steps)
    return out


def round_rows_into(
    x: Tensor, bounds: Tensor | None, factor: Tensor, out: Tensor, format: Format, rounding: str, seed: Seed | None,
    steps: int | None,
) -> None:  # fmt: skip
    """The result of `round_rows`, written to `out`."""
    if not rows.run(x, out, bounds, factor, format, rounding, steps or 1) and not blank(x, out):
        rounded = round_to((clamped(x, bounds) * factor).nan_to_num(0.0), format, rounding, "saturate", seed)
        out.copy_(rounded * steps if steps is not None else rounded / factor)


def clamped(x: Tensor, bounds: Tensor | None) -> Tensor:
    """x in float32 (float64 stays), clamped to its bounds; NaN where a bound is NaN."""
    wide = x if x.dtype == torch.float64 else x.float()
    if bounds is None:
        return wide
    return torch.maximum(torch.minimum(wide, bounds[1][:, None]), bounds[0][:, None])


def fold(x: Tensor, scale: Tensor, format: Format, rounding: str, rule: Scaling, dtype: torch.dtype) -> FoldedOrNone:
    """x times scale (of a row or a column), rounded as one tensor by a rule, in `dtype`, and that tensor's scale; None
    where no kernel supports it."""
    return rows.run_folded(x, scale, format, rounding, rule, dtype) if has_memory(x) else None


def beyond(x: Tensor, clamp: Clamp, bounds: Tensor) -> Parts:
    """The part of a matrix that clamping removes: elements outside of the bounds, minus the bound, as a sparse
    matrix."""
    if not has_memory(x) and has_memory(x, or_fake=True):  # a FakeTensor has no values to count
        count = clamp.most_beyond(*x.shape)
        starts = x.new_empty(x.shape[0] + 1, dtype=torch.int64)
        return x.new_empty(count, dtype=torch.float32), x.new_empty(count, dtype=torch.int32), starts
    if not has_memory(x):
        return clamp.parts(x, bounds)[1].float(), None, None
    found = rows.run_beyond(x, bounds)
    return sparse(clamp.parts(x, bounds)[1].float()) if found is None else found


def sparse(whole: Tensor) -> Parts:
    """The nonzero elements of a matrix, row by row, as `Parts`."""
    rows, columns = whole.nonzero(as_tuple=True)
    starts = torch.zeros(whole.shape[0] + 1, dtype=torch.int64, device=whole.device)
    torch.cumsum(torch.bincount(rows, minlength=whole.shape[0]), 0, out=starts[1:])
    return whole[rows, columns], columns.int(), starts


def whole(values: Tensor, columns: Tensor, starts: Tensor, width: int) -> Tensor:
    """The dense matrix with these `Parts`."""
    height = len(starts) - 1
    rows = torch.repeat_interleave(
        torch.arange(height, device=values.device, dtype=torch.int64), starts.diff(), output_size=len(values)
    )
    return values.new_zeros(height, width).index_put_((rows, columns.long()), values)


def sparse_product(
    values: Tensor, columns: Tensor | None, starts: Tensor | None, width: int, down: bool, other: Tensor,
    scale: Tensor | None,
) -> Tensor:  # fmt: skip
    """The sparse matrix (rows, width), or its transpose if `down`, @ `other`, times scale: float32."""
    height = values.shape[0] if starts is None else len(starts) - 1
    out = torch.empty(width if down else height, other.shape[1], dtype=torch.float32, device=values.device)
    _SPARSE_PRODUCT((values, columns, starts), width, down, other, scale, out)
    return out


def sparse_product_into(parts: Parts, width: int, down: bool, other: Tensor, scale: Tensor | None, out: Tensor) -> None:
    """The result of `sparse_product`, written to `out`."""
    if blank(out, out):
        return
    values, columns, starts = parts
    other = other.to(torch.bfloat16) if other.dtype == torch.int8 else other
    if columns is not None and starts is not None:
        other = other.contiguous()
        if rows.run_sparse(values, columns, starts, width, down, other, scale, out):
            return
    matrix = values if columns is None or starts is None else whole(values, columns, starts, width)
    product = (matrix.t() if down else matrix) @ other.float()
    out.copy_(product if scale is None else product.mul_(scale))


def estimate(grad: Tensor, x: Tensor, quantizer: Quantizer, factor: Tensor | None) -> Tensor:
    """`grad` multiplied in place by the derivative of rounding x (`Quantizer.derivative`); grad must have no other
    reference."""
    _ESTIMATE(grad, x, quantizer, factor)
    return grad


def estimate_into(grad: Tensor, x: Tensor, quantizer: Quantizer, factor: Tensor | None) -> None:
    """Multiply `grad` by that derivative in place."""
    if blank(x, grad):
        return
    estimator, format, scales = quantizer.estimator, quantizer.format, quantizer.scales
    assert estimator is not None
    if factor is None and scales is not None and scales.rule.linear and not scales.rule.two_level:
        factor = scales.rule.factor(scales.tile.reduce(x.abs(), "amax").float(), format)
    factor = x.new_ones((), dtype=torch.float32) if scales is None else factor
    if factor is not None and x.dim() == 2 and x.numel():
        high, wide = (scales.tile.rows or x.shape[0], scales.tile.columns or x.shape[1]) if scales else x.shape
        by_tile = factor.reshape(-1, factor.shape[-1] if factor.dim() else 1)
        if slopes.run(grad, x, by_tile, high, wide, format, estimator):
            return
    grad.mul_(quantizer.derivative(x, factor))


# ---- the same as operators, for torch.compile -----------------------------------------------------------------------


def _quantiles(x: Tensor, out: Tensor, clamp: str) -> None:
    bounds_into(x.contiguous(), out, Clamp(**json.loads(clamp)))


def _round_rows(
    x: Tensor, bounds: Tensor | None, factor: Tensor, out: Tensor, key: str, rounding: str, seed: Tensor | None,
    steps: int | None,
) -> None:  # fmt: skip
    drawn = seed_in(rounding, seed, x.device)
    round_rows_into(x.contiguous(), bounds, factor, out, formats.from_key(key), rounding, drawn, steps)


def _sparse_product(whole: Tensor, other: Tensor, scale: Tensor | None, out: Tensor, down: bool) -> None:
    sparse_product_into(sparse(whole), whole.shape[1], down, other, scale, out)


def _estimate(
    grad: Tensor, x: Tensor, factor: Tensor | None, key: str, rows: int, columns: int, rule: str | None, estimator: str
) -> None:
    scales = None if rule is None else Scales(Tile(rows, columns), from_text(rule))
    quantizer = Quantizer(formats.from_key(key), scales=scales, estimator=Estimator(**json.loads(estimator)))
    estimate_into(grad, as_rows(x), quantizer, factor)


def _estimate_terms(grad: Tensor, x: Tensor, quantizer: Quantizer, factor: Tensor | None) -> tuple[Any, ...]:
    s, estimator = quantizer.scales, quantizer.estimator
    assert estimator is not None
    rows, columns, rule = (s.tile.rows, s.tile.columns, s.rule.text) if s else (0, 0, None)
    return grad, x, factor, quantizer.format.key, rows, columns, rule, estimator.text


_QUANTILES = Operator(
    "quantiles(Tensor x, Tensor(a!) out, str clamp) -> ()",
    bounds_into,
    _quantiles,
    lambda x, out, clamp: (x, out, clamp.text),
)
_ROUND_ROWS = Operator(
    "round_rows(Tensor x, Tensor? bounds, Tensor factor, Tensor(a!) out, str key, str rounding, Tensor? seed, "
    "int? steps) -> ()",
    round_rows_into,
    _round_rows,
    lambda x, bounds, factor, out, format, *rest: (x, bounds, factor, out, format.key, *rest),
)
_SPARSE_PRODUCT = Operator(
    "sparse_product(Tensor whole, Tensor other, Tensor? scale, Tensor(a!) out, bool down) -> ()",
    sparse_product_into,
    _sparse_product,
    lambda parts, width, down, other, scale, out: (parts[0], other, scale, out, down),
)
_ESTIMATE = Operator(
    "estimate(Tensor(a!) grad, Tensor x, Tensor? factor, str key, int rows, int columns, str? rule, "
    "str estimator) -> ()",
    estimate_into,
    _estimate,
    _estimate_terms,
)
