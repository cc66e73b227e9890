"""Convolutions with weights of unit variance, whose factors stand in their products."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.unit import factors
from halfstep.unit.modules.linear import MULTIPLIERS, reset
from halfstep.unit.products import conv1d, conv2d
from halfstep.unit.roles import Tag, set_tag


class _Conv(nn.modules.conv._ConvNd):
    """What both have: factors, unit variance, and padding. torch's class comes after it, whose `__init__` it calls."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = False,
        padding_mode: Any = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        constraint: str = "to_output",
        role: str = "hidden",
    ) -> None:
        stock: Any = super().__init__
        where = stride, padding, dilation, groups
        stock(in_channels, out_channels, kernel_size, *where, bias, padding_mode, device, dtype)
        self.constraint = constraint
        setattr(self, MULTIPLIERS, factors.linear(constraint))
        set_tag(self, "weight", Tag(role))

    def reset_parameters(self) -> None:
        """Weights from N(0, 1), biases zero."""
        reset(self)

    def _convolved(self, function: Any, x: Tensor) -> Tensor:
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode), 0
        return function(  # type: ignore[no-any-return]
            x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups, self.constraint
        )


class Conv1d(_Conv, nn.Conv1d):
    """nn.Conv1d times fan_in^-1/2, fan_in = in_channels / groups * kernel, with w ~ N(0, 1); no bias unless asked for.

    Arguments as torch's; `constraint` and `role` as of `unit.Linear`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(batch, in, time) -> (batch, out, time)"""
        return self._convolved(conv1d, input)


class Conv2d(_Conv, nn.Conv2d):
    """nn.Conv2d as `unit.Conv1d`."""

    def forward(self, input: Tensor) -> Tensor:
        """(batch, in, height, width) -> (batch, out, height, width)"""
        return self._convolved(conv2d, input)
