"""The MLPs of a transformer's block, from unit-scaled layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from halfstep.unit.activations import gated_silu
from halfstep.unit.modules.activations import GELU
from halfstep.unit.modules.linear import Linear


class GatedMLP(nn.Module):
    """down(up(x) silu(gate(x))): SwiGLU.

    The layers are not constrained one by one, since up and gate and down mirror each other: the product of their
    factors is the same in both directions.

    Args:
        width: of the input and the output.
        hidden: between them; None: 4 width.
        mult: how sharp the gate is, silu(g) = g sigmoid(mult g).
        constraint: `unit.SAME` for munit scaling's factors; None otherwise.
    """

    def __init__(
        self, width: int, hidden: int | None = None, mult: float = 1.0, constraint: str | None = None, **factory: Any
    ) -> None:
        super().__init__()
        hidden, constraint = hidden or 4 * width, constraint or "none"
        self.mult = mult
        self.up_proj = Linear(width, hidden, constraint=constraint, **factory)
        self.gate_proj = Linear(width, hidden, constraint=constraint, **factory)
        self.down_proj = Linear(hidden, width, constraint=constraint, ends_branch=True, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)"""
        return self.down_proj(  # type: ignore[no-any-return]
            gated_silu(self.up_proj(x), self.gate_proj(x), mult=self.mult)
        )


class MLP(nn.Module):
    """down(gelu(up(x))); arguments as of `GatedMLP`."""

    def __init__(
        self, width: int, hidden: int | None = None, mult: float = 1.0, constraint: str | None = None, **factory: Any
    ) -> None:
        super().__init__()
        hidden, constraint = hidden or 4 * width, constraint or "none"
        self.up_proj = Linear(width, hidden, constraint=constraint, **factory)
        self.act = GELU(mult=mult)
        self.down_proj = Linear(hidden, width, constraint=constraint, ends_branch=True, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)"""
        return self.down_proj(self.act(self.up_proj(x)))  # type: ignore[no-any-return]
