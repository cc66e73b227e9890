"""Norms whose gains and biases have gradients of unit scale."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from halfstep.unit.layers import layer_norm, rms_norm
from halfstep.unit.roles import Tag, set_tag


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm without gain and bias, unless asked for: u-muP transfers with norms that have none.

    Gain and bias, where there are, get gradients times rows^-1/2; values and the input's gradient are the stock ones.
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
        _tag(self)

    def forward(self, input: Tensor) -> Tensor:
        """(..., *normalized_shape) -> the same shape."""
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm without gain, unless asked for; its gain's gradient is multiplied by rows^-1/2."""

    def __init__(
        self,
        normalized_shape: int | list[int],
        eps: float | None = 1e-5,
        elementwise_affine: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        _tag(self)

    def forward(self, x: Tensor) -> Tensor:
        """(..., *normalized_shape) -> the same shape."""
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)


def _tag(norm: nn.Module) -> None:
    set_tag(norm, "weight", Tag("norm"))
    set_tag(norm, "bias", Tag("bias"))
