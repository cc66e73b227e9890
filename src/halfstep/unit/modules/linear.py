"""Linear layers with weights of unit variance, whose factors stand in their products."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from halfstep import ops
from halfstep.recipe import LinearSpec, Matmul, Multiplier
from halfstep.unit import factors
from halfstep.unit.groups import READOUT
from halfstep.unit.roles import Tag, set_tag


SAME = "same"
"""The constraint of munit scaling: one factor, fan_in^-1/2 (1 / fan_in of a readout), in all three products. All
gradients, the weight's too, are then those of y = fan_in^-1/2 x w^T."""

MULTIPLIERS = "_halfstep_multipliers"
"""Where a layer that is unit-scaled has what its products are multiplied by, a `LinearSpec`."""
_PLAIN = LinearSpec()


def multipliers_of(module: nn.Module) -> LinearSpec:
    """What the products of a layer that is unit-scaled are multiplied by; an empty spec of another."""
    return module.__dict__.get(MULTIPLIERS, _PLAIN)  # type: ignore[no-any-return]


class Linear(nn.Linear):
    """y = fan_in^-1/2 x w^T + b with w ~ N(0, 1) and b = 0; no bias unless asked for.

    The factors stand in the three products (`unit.multipliers_of`), so that any recipe rounds the operands as they are.

    Args:
        constraint: how the factors of y and of x's gradient are tied (`unit.get_constraint`), or `unit.SAME`.
        role: of the weight (`unit.KINDS`); `input` for the layer that takes the data.
        ends_branch: whether the layer is the last of a residual branch.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        constraint: str = "to_output",
        role: str = "hidden",
        ends_branch: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.constraint = constraint
        setattr(self, MULTIPLIERS, _multipliers(constraint, readout=role == "readout"))
        set_tag(self, "weight", Tag(role, ends_branch))
        if role == "readout":
            setattr(self, READOUT, constraint)

    def reset_parameters(self) -> None:
        """Weights from N(0, 1), biases zero."""
        reset(self)

    def extra_repr(self) -> str:
        """torch's, and the constraint."""
        return f"{super().extra_repr()}, constraint={self.constraint!r}"

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)"""
        return ops.linear(input, self.weight, self.bias, self.__dict__[MULTIPLIERS])


class LinearReadout(Linear):
    """The last layer: y = x w^T / fan_in + b, whose outputs shrink with the width at the start, as muP asks.

    Nothing ties its factors unless a constraint is given: its gradients are of unit scale.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        constraint: str = "none",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype, constraint=constraint, role="readout")


def reset(layer: Any) -> None:
    """Weights from N(0, 1), biases zero."""
    nn.init.normal_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def _multipliers(constraint: str, readout: bool) -> LinearSpec:
    if constraint != SAME:
        return factors.linear(constraint, readout=readout)
    power = -1.0 if readout else -0.5
    over_inputs = Matmul(multiplier=Multiplier(columns=power))
    return LinearSpec(Matmul(multiplier=Multiplier(shared=power)), over_inputs, over_inputs)
