"""Hugging Face's `Conv1D` (GPT-2): a linear layer whose weight is stored as (in, out)."""

from typing import Any

from torch import Tensor, nn

from halfstep.nn.product import product, weight_of
from halfstep.nn.quantized_weights import Weight


NAME = "Conv1D"
FORWARD_OF = ("transformers.pytorch_utils.Conv1D",)


def weights(module: nn.Module) -> tuple[Weight, ...]:
    """What the product multiplies by."""
    return (Weight("weight", transposed=True),)


def forward(stock: Any, module: Any, x: Tensor) -> Tensor:
    """`ops.linear` on the transposed weight."""
    return product(module, x, weight_of(module, "weight", x).t(), module.bias)
