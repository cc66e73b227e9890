"""`nn.Linear`, `unit.Linear`, which is one with factors, and PyTorch Geometric's: their products round operands."""

from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from halfstep import unit
from halfstep.nn.product import product, weight_of
from halfstep.nn.quantized_weights import Weight
from halfstep.ops.part import part_of


NAME = "nn.Linear"
FORWARD_OF = (nn.Linear, unit.Linear, "torch_geometric.nn.dense.linear.Linear")


def weights(module: nn.Module) -> tuple[Weight, ...]:
    """What the product multiplies by."""
    return (Weight("weight"),)


def forward(
    stock: Any, module: Any, input: Tensor, channels: Tensor | None = None, tokens: Tensor | None = None
) -> Tensor:
    """`ops.linear` with the spec that `apply` left on the module; only training steps move scaling states.

    Args:
        channels: the input comes multiplied by it, a power of two a channel: what it is rounded to is divided by it.
        tokens: the input comes divided by it, a scale a token: the product is multiplied by it.
    """
    weight, bias = module._parameters.get("weight"), module.bias
    if type(weight) is not Parameter or part_of(module).stored:  # a tied weight stays beside its codes
        weight = weight_of(module, "weight", input)
    if tokens is None:
        return product(module, input, weight, bias, channels=channels)
    y = product(module, input, weight, None) * tokens
    return y if bias is None else y + bias.to(y.dtype)
