"""Products of unit size: linear layers, matrices, convolutions."""

from __future__ import annotations

from torch import Tensor

from halfstep import ops
from halfstep.unit import factors
from halfstep.unit.constraint import Constraint


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, constraint: str | Constraint | None = "to_output"
) -> Tensor:
    """y = fan_in^-1/2 x w^T + b for x (..., in), weight (out, in), bias (out): torch's, of unit size.

    The factors are those of `factors.linear`, folded into the products. The product has the factor, the bias none.
    """
    return ops.linear(input, weight, bias, factors.linear(constraint))


def linear_readout(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, constraint: str | Constraint | None = None
) -> Tensor:
    """`linear` for a model's last layer: y = fan_in^-1 x w^T + b, so that logits begin small and keep their size after
    a step whatever the width. Nothing ties its factors unless a constraint is given: its input's edge is a cut-edge.

    Source: u-muP, Blake et al. 2025.
    """
    return ops.linear(input, weight, bias, factors.linear(constraint, readout=True))
