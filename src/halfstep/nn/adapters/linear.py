"""`nn.Linear`: its three products round their operands."""

from typing import Any

from torch import Tensor

from halfstep import ops


def forward(stock: Any, module: Any, input: Tensor) -> Tensor:
    """`ops.linear` with the spec that `apply` left on the module."""
    return ops.linear(input, module.weight, module.bias, module._halfstep_linear)
