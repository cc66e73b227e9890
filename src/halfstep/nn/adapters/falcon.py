"""Hugging Face's `FalconLinear`: a linear layer that adds its bias after the product was rounded."""

from typing import Any

from torch import Tensor, nn

from halfstep.nn.product import product, weight_of
from halfstep.nn.quantized_weights import Weight


NAME = "FalconLinear"
FORWARD_OF = ("transformers.models.falcon.modeling_falcon.FalconLinear",)


def weights(module: nn.Module) -> tuple[Weight, ...]:
    """What the product multiplies by."""
    return (Weight("weight"),)


def forward(stock: Any, module: Any, input: Tensor) -> Tensor:
    """`ops.linear` without the bias, and then the bias."""
    y = product(module, input, weight_of(module, "weight", input), None)
    return y if module.bias is None else y + module.bias
