"""Hugging Face's `Conv1D` (GPT-2): a linear layer whose weight is stored as (in, out)."""

from typing import Any

import torch
from torch import Tensor, nn

from halfstep import ops
from halfstep.nn.codes import weight_of
from halfstep.nn.scaling import states_of


NAME = "Conv1D"
PRODUCTS: tuple[str, ...] = ("",)


def fits(module: nn.Module) -> bool:
    """Whether the module is transformers' Conv1D, with its own forward."""
    stock: Any = next((kind for kind in type(module).__mro__ if _is_stock(kind)), None)
    return stock is not None and type(module).forward is stock.forward and "forward" not in vars(module)


def _is_stock(kind: Any) -> bool:
    return kind.__name__ == NAME and kind.__module__ == "transformers.pytorch_utils" and "forward" in vars(kind)


def forward(stock: Any, module: Any, x: Tensor) -> Tensor:
    """`ops.linear` on the transposed weight."""
    record = module.training and torch.is_grad_enabled()
    spec, states = module._halfstep_linear, states_of(module)
    return ops.linear(x, weight_of(module).t(), module.bias, spec, states, record)
