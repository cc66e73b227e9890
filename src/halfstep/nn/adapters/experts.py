"""Fused experts of Hugging Face's mixtures: all experts' weights in two parameters, multiplied expert by expert.

transformers (5.0 and newer) hands the experts' forward to a function (self, hidden_states, top_k_index, top_k_weights)
that its users may register; it tells that function how the parameters lie by the attributes read here. This is such a
function. The experts of a layer share one scaling state for each operand of each of its two products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from halfstep.nn.product import product, weight_of
from halfstep.nn.quantized_weights import Weight


NAME = "fused experts"
FORWARD_OF = ()  # any forward: the attributes decide
_LAYOUT = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts")


def resembles(module: nn.Module) -> bool:
    """Whether the module keeps the weights of several experts in one parameter."""
    down = module._parameters.get("down_proj")
    return down is not None and down.dim() == 3


def fits(module: nn.Module) -> bool:
    """Whether the module, which has a parameter `down_proj`, follows transformers' interface for experts, and has no
    norm behind each of them."""
    return (
        resembles(module)
        and "forward" not in vars(module)
        and all(hasattr(module, name) for name in _LAYOUT)
        and hasattr(module, "_apply_gate" if module.has_gate else "act_fn")
        and not getattr(module, "has_post_expert_norm", False)
        and not getattr(module, "_is_expert_parallel", False)
        and module._parameters.get("gate_up_proj" if module.has_gate else "up_proj") is not None
    )


def weights(module: Any) -> tuple[Weight, ...]:
    """What its two products multiply by, expert by expert."""
    names = {"up": "gate_up_proj" if module.has_gate else "up_proj", "down": "down_proj"}
    return tuple(
        Weight(name, product, transposed=module.is_transposed, stacked=True) for product, name in names.items()
    )


def forward(stock: Any, module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Each expert's two products on the tokens that were sent to it, weighed and added up."""
    up, down = weights(module)
    total = torch.zeros_like(hidden_states)
    for expert in torch.unique(top_k_index).tolist():
        if expert >= module.num_experts:
            continue
        token, place = torch.where(top_k_index == expert)
        inner = _product(module, up, expert, hidden_states[token])
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        output = _product(module, down, expert, inner)
        total = total.index_add(0, token, (output * top_k_weights[token, place, None]).to(total.dtype))
    return total


def _product(module: Any, weight: Weight, expert: int, x: Tensor) -> Tensor:
    matrix = weight_of(module, weight.name, x, expert)
    bias = getattr(module, f"{weight.name}_bias")[expert] if module.has_bias else None
    return product(module, x, matrix.t() if weight.transposed else matrix, bias, weight.product)
