"""Unit-scaled linear layers, convolutions and embeddings, with factors as multipliers of their matmuls."""

from typing import Any

from torch import Tensor, nn

from halfstep import ops
from halfstep.errors import ModelError
from halfstep.recipe import LinearSpec, Matmul, Multiplier
from halfstep.unit import factors
from halfstep.unit.functions import conv1d, conv2d, embedding
from halfstep.unit.roles import Tag, multipliers_of, set_tag, set_unit_part


SAME = "same"
"""The constraint of munit scaling: one factor, fan_in^-1/2 (1 / fan_in for a readout), in all three matmuls. All
gradients, also the weight's, are then those of y = fan_in^-1/2 x w^T."""


def _reset(layer: Any) -> None:
    """Initialize weights from N(0, 1) and biases to zero."""
    nn.init.normal_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


class Linear(nn.Linear):
    """y = fan_in^-1/2 x w^T + b with w ~ N(0, 1) and b = 0; by default without bias.

    The factors are multipliers of the three matmuls (`unit.multipliers_of`), so that recipes round unscaled operands.

    Args:
        constraint: how the factors of y and of the gradient of x are tied (`unit.get_constraint`), or `unit.SAME`.
        role: the weight's (`unit.KINDS`); `input` for the layer that takes the data.
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
        readout = role == "readout"
        set_unit_part(self, multipliers=_multipliers(constraint, readout), readout=constraint if readout else None)
        set_tag(self, "weight", Tag(role, ends_branch))

    reset_parameters = _reset

    def extra_repr(self) -> str:
        """As torch's, with the constraint."""
        return f"{super().extra_repr()}, constraint={self.constraint!r}"

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)"""
        return ops.linear(input, self.weight, self.bias, multipliers_of(self))


class LinearReadout(Linear):
    """The last layer: y = x w^T / fan_in + b, whose initial outputs shrink with the width, as muP requires.

    Its factors are not tied unless a constraint is given: its gradients then have unit size.
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


def _multipliers(constraint: str, readout: bool) -> LinearSpec:
    if constraint != SAME:
        return factors.linear(constraint, readout=readout)
    power = -1.0 if readout else -0.5
    over_inputs = Matmul(multiplier=Multiplier(columns=power))
    return LinearSpec(Matmul(multiplier=Multiplier(shared=power)), over_inputs, over_inputs)


class _Conv(nn.modules.conv._ConvNd):
    """The common base of Conv1d and Conv2d: factors, initialization and padding. torch's class follows in the MRO."""

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
        stock(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self.constraint = constraint
        set_unit_part(self, multipliers=factors.linear(constraint))
        set_tag(self, "weight", Tag(role))

    reset_parameters = _reset

    def _convolved(self, function: Any, x: Tensor) -> Tensor:
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            x, padding = nn.functional.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode), 0
        return function(  # type: ignore[no-any-return]
            x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups, self.constraint
        )


class Conv1d(_Conv, nn.Conv1d):
    """nn.Conv1d times fan_in^-1/2, fan_in = in_channels / groups * kernel, with w ~ N(0, 1); by default without bias.

    Arguments as torch's; `constraint` and `role` as for `unit.Linear`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(batch, in, time) -> (batch, out, time)"""
        return self._convolved(conv1d, input)


class Conv2d(_Conv, nn.Conv2d):
    """The unit-scaled nn.Conv2d, as `unit.Conv1d`."""

    def forward(self, input: Tensor) -> Tensor:
        """(batch, in, height, width) -> (batch, out, height, width)"""
        return self._convolved(conv2d, input)


class Embedding(nn.Embedding):
    """nn.Embedding with rows from N(0, 1), whose gradient is multiplied by (rows / look-ups)^1/2.

    Arguments as torch's.

    Raises:
        ModelError: `max_norm` or `scale_grad_by_freq` is given, which change the scale of rows or gradients.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.max_norm is not None or self.scale_grad_by_freq:
            raise ModelError(
                f"max_norm = {self.max_norm}, scale_grad_by_freq = {self.scale_grad_by_freq} given; expected neither "
                "in a table of unit scale: leave them out, or take nn.Embedding"
            )

    def forward(self, input: Tensor) -> Tensor:
        """Indices (...) int64 -> (..., width)"""
        return embedding(input, self.weight, self.padding_idx, self.sparse)
