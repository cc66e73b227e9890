"""Activations and dropout that keep unit variance, as modules."""

from __future__ import annotations

from torch import Tensor, nn

from halfstep.unit.activations import gelu, relu, sigmoid, silu, softmax, tanh
from halfstep.unit.layers import dropout


class GELU(nn.GELU):
    """`unit.gelu` as a module; `mult` sharpens it: gelu(mult x) / mult."""

    def __init__(self, approximate: str = "none", mult: float = 1.0, constraint: str = "to_output") -> None:
        super().__init__(approximate)
        self.mult, self.constraint = mult, constraint

    def forward(self, input: Tensor) -> Tensor:
        """Elementwise."""
        return gelu(input, approximate=self.approximate, mult=self.mult, constraint=self.constraint)


class SiLU(nn.SiLU):
    """`unit.silu` as a module; `mult` sharpens it: x sigmoid(mult x)."""

    def __init__(self, mult: float = 1.0, constraint: str = "to_output") -> None:
        super().__init__()
        self.mult, self.constraint = mult, constraint

    def forward(self, input: Tensor) -> Tensor:
        """Elementwise."""
        return silu(input, mult=self.mult, constraint=self.constraint)


class ReLU(nn.ReLU):
    """`unit.relu` as a module."""

    def __init__(self, constraint: str = "to_output") -> None:
        super().__init__()
        self.constraint = constraint

    def forward(self, input: Tensor) -> Tensor:
        """Elementwise."""
        return relu(input, constraint=self.constraint)


class Tanh(nn.Tanh):
    """`unit.tanh` as a module."""

    def __init__(self, constraint: str = "to_output") -> None:
        super().__init__()
        self.constraint = constraint

    def forward(self, input: Tensor) -> Tensor:
        """Elementwise."""
        return tanh(input, constraint=self.constraint)


class Sigmoid(nn.Sigmoid):
    """`unit.sigmoid` as a module."""

    def __init__(self, constraint: str = "to_output") -> None:
        super().__init__()
        self.constraint = constraint

    def forward(self, input: Tensor) -> Tensor:
        """Elementwise."""
        return sigmoid(input, constraint=self.constraint)


class Softmax(nn.Softmax):
    """`unit.softmax` as a module."""

    def __init__(self, dim: int, mult: float = 1.0, constraint: str = "to_output") -> None:
        super().__init__(dim)
        self.mult, self.constraint = mult, constraint

    def forward(self, input: Tensor) -> Tensor:
        """Over the dimension `dim`."""
        assert self.dim is not None
        return softmax(input, self.dim, mult=self.mult, constraint=self.constraint)


class Dropout(nn.Dropout):
    """`unit.dropout` as a module."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__(p)

    def forward(self, input: Tensor) -> Tensor:
        """Elementwise; the identity in eval mode."""
        return dropout(input, self.p, self.training)
