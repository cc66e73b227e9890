"""Factors of operations of two operands under a constraint; a warning where that of a broadcast one is too large."""

from __future__ import annotations

import warnings

from torch import Tensor

from halfstep.quant.memory import has_memory
from halfstep.unit.constraint import Constraint, get_constraint


_TIED = (
    "unit.{}: the operand of shape {} is broadcast to {:,.0f} copies, and its gradient, their sum, is {:.3g} "
    "times unit size, since the constraint ties it to the other factors. Give constraint=None where this operand is a "
    "parameter, or shares no input with the other; where both are made of one tensor x, give None and make this one "
    "of unit.scale_backward(x, {:.4g}), so that x's gradient stays the true one times a constant"
)


def tied(
    name: str,
    constraint: str | Constraint | None,
    ideal: tuple[float, float, float],
    operands: tuple[Tensor, Tensor],
    roots: tuple[float, float],
) -> tuple[float, float, float]:
    """The factors of the output and of both gradients under a constraint.

    The gradient of an operand that is broadcast is a sum over its copies: its ideal factor is smaller by their number's
    root, and a constraint gives it that of the others. From four copies on a warning says so, where its gradient
    becomes twice unit size or more.

    Args:
        name: of the function, which warns at its caller.
        ideal: of the output and both gradients, each of unit size by itself.
        roots: copies^-1/2 of each operand.
    """
    output, *grads = get_constraint(constraint)(*ideal)
    for i, (operand, root, wanted, given) in enumerate(zip(operands, roots, ideal[1:], grads, strict=True)):
        if root <= 0.5 and given >= 2 * wanted and operand.requires_grad and has_memory(operand):
            shape, copies = tuple(operand.shape), root**-2
            warnings.warn(_TIED.format(name, shape, copies, given / wanted, ideal[2 - i] / wanted), stacklevel=3)
    return output, grads[0], grads[1]
