"""Hugging Face's `Conv1D` (GPT-2): a linear layer whose weight is stored as (in, out)."""

from typing import Any

from torch import Tensor, nn

from halfstep.nn.adopt import beneath
from halfstep.nn.product import product, weight_of
from halfstep.nn.quantized_weights import Weight


NAME = "Conv1D"


def fits(module: nn.Module) -> bool:
    """Whether the module is transformers' Conv1D, with its own forward."""
    stock: Any = next((kind for kind in type(module).__mro__ if _is_stock(kind)), None)
    return stock is not None and beneath(module).forward is stock.forward and "forward" not in vars(module)


def _is_stock(kind: Any) -> bool:
    return kind.__name__ == NAME and kind.__module__ == "transformers.pytorch_utils" and "forward" in vars(kind)


def weights(module: nn.Module) -> tuple[Weight, ...]:
    """What the product multiplies by."""
    return (Weight("weight", transposed=True),)


def forward(stock: Any, module: Any, x: Tensor) -> Tensor:
    """`ops.linear` on the transposed weight."""
    return product(module, x, weight_of(module, "weight", x).t(), module.bias)
