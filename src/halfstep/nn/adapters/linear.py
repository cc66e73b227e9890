"""`nn.Linear`: its three products round their operands."""

from typing import Any

import torch
from torch import Tensor, nn

from halfstep import ops
from halfstep.nn.codes import weight_of
from halfstep.nn.scaling import states_of


PRODUCTS: tuple[str, ...] = ("",)
NAME = "nn.Linear"


def fits(module: nn.Module) -> bool:
    """Whether `forward` below may stand in for the module's own: not where a subclass or a patch has another."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and "forward" not in vars(module)


def forward(
    stock: Any, module: Any, input: Tensor, channels: Tensor | None = None, tokens: Tensor | None = None
) -> Tensor:
    """`ops.linear` with the spec that `apply` left on the module; only training steps move scaling states.

    Args:
        channels: the input comes multiplied by it, a power of two a channel: the weight is divided by it.
        tokens: the input comes divided by it, a scale a token: the product is multiplied by it.
    """
    record = module.training and torch.is_grad_enabled()
    weight, bias = weight_of(module), module.bias
    if channels is not None:
        weight = weight * channels.reciprocal().to(weight.dtype)
    if tokens is None:
        return ops.linear(input, weight, bias, module._halfstep_linear, states_of(module), record)
    product = ops.linear(input, weight, None, module._halfstep_linear, states_of(module), record) * tokens
    return product if bias is None else product + bias.to(product.dtype)
