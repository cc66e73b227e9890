"""Operands with a scale for each number that a product sums over, and what a backward pass keeps of a remainder."""

from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.cpu import clamp_operators as operators
from halfstep.ops.carriers import carrier
from halfstep.ops.operand import Operand, operand
from halfstep.ops.remainder import Remainder
from halfstep.quant import TENSOR, Quantizer
from halfstep.quant.rounding import Seed


Rest = tuple[Tensor | None, Tensor | None, Tensor | None]
"""The parts of a remainder, or None."""


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
    """The operand of x (rows, shared), or where it lies `down` (shared, rows), times the scales of rhs (shared, n); and
    rhs divided by them: whole numbers.

    What x is rounded to, divided by the scales again, is what this product takes it for.
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
    """The tensors of an operand's remainder that the backward pass needs; three None where it needs none."""
    return used.remainder.parts if is_kept and used.remainder is not None else (None, None, None)


def restored(rest: Rest, width: int) -> Remainder | None:
    """The remainder again."""
    return None if rest[0] is None else Remainder(rest[0], rest[1], rest[2], width)


def sparse_sum(lhs: Operand, rhs: Operand) -> Tensor | None:
    """What the remainder of one of two operands adds to their product, in float32; None where neither has one.

    Where both have one, or the other's scales are summed over, there is no such sum: these are for `widened`.
    """
    if lhs.remainder is not None:
        return lhs.remainder.times(rhs.values, rhs.scale)
    if rhs.remainder is None:
        return None
    return rhs.remainder.t().times(lhs.values.t(), None if lhs.scale is None else lhs.scale.t()).t()


def is_sparse(lhs: Operand, rhs: Operand) -> bool:
    """Whether one of two operands has a remainder, and the other scales that multiply the product."""
    if (lhs.remainder is None) == (rhs.remainder is None):
        return False
    return _outer(rhs.scale, 0) if lhs.remainder is not None else _outer(lhs.scale, 1)


def _outer(scale: Tensor | None, shared: int) -> bool:
    """Whether a scale is one, or has one number for all that is summed over."""
    return scale is None or not scale.dim() or scale.shape[shared] == 1
