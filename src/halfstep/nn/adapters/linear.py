"""`nn.Linear`: its three products round their operands."""

from typing import Any

import torch
from torch import Tensor, nn

from halfstep import ops
from halfstep.nn.scaling import states_of


def fits(module: nn.Module) -> bool:
    """Whether `forward` below may stand in for the module's own: not where a subclass or a patch has another."""
    return type(module).forward is nn.Linear.forward and "forward" not in vars(module)


def forward(stock: Any, module: Any, input: Tensor) -> Tensor:
    """`ops.linear` with the spec that `apply` left on the module; only training steps move scaling states."""
    record = module.training and torch.is_grad_enabled()
    return ops.linear(input, module.weight, module.bias, module._halfstep_linear, states_of(module), record)
