"""Activations, dropout and norms that keep unit variance, as modules."""

from typing import Any

from torch import Tensor, nn

from halfstep.unit.activations import gelu, relu, sigmoid, silu, softmax, tanh
from halfstep.unit.functions import dropout, layer_norm, rms_norm


class _Constrained(nn.Module):
    """A base of modules with a constraint as their only argument."""

    def __init__(self, constraint: str = "to_output") -> None:
        super().__init__()
        self.constraint = constraint


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


class ReLU(_Constrained, nn.ReLU):
    """`unit.relu` as a module."""

    def forward(self, input: Tensor) -> Tensor:
        """Elementwise."""
        return relu(input, constraint=self.constraint)


class Tanh(_Constrained, nn.Tanh):
    """`unit.tanh` as a module."""

    def forward(self, input: Tensor) -> Tensor:
        """Elementwise."""
        return tanh(input, constraint=self.constraint)


class Sigmoid(_Constrained, nn.Sigmoid):
    """`unit.sigmoid` as a module."""

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


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm, by default without gain and bias: u-muP's hyperparameters transfer with norms that have none.

    The gradients of gain and bias, if any, are multiplied by rows^-1/2; the rest is as in nn.LayerNorm.
    """

    def __init__(
        self,
        normalized_shape: int | list[int],
        eps: float = 1e-5,
        elementwise_affine: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """(..., *normalized_shape) -> the same shape."""
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm, by default without gain; the gradient of a gain is multiplied by rows^-1/2."""

    def __init__(
        self,
        normalized_shape: int | list[int],
        eps: float | None = 1e-5,
        elementwise_affine: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., *normalized_shape) -> the same shape."""
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)
