"""Fused experts of Hugging Face's mixtures: all experts' weights in two parameters, multiplied expert by expert.

transformers (5.0 and newer) hands the experts' forward to a function (self, hidden_states, top_k_index, top_k_weights)
that its users may register; it tells that function how the parameters lie by the attributes read here. This is such a
function. The experts of a layer share one scaling state for each operand of each of its two products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from halfstep import ops
from halfstep.nn.scaling import states_of


NAME = "fused experts"
PRODUCTS: tuple[str, ...] = ("up", "down")
_LAYOUT = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate", "act_fn", "num_experts")


def resembles(module: nn.Module) -> bool:
    """Whether the module keeps the weights of several experts in one parameter."""
    down = module._parameters.get("down_proj")
    return down is not None and down.dim() == 3


def fits(module: nn.Module) -> bool:
    """Whether the module follows transformers' interface for experts, and has no norm behind each of them."""
    return (
        resembles(module)
        and "forward" not in vars(module)
        and all(hasattr(module, name) for name in _LAYOUT)
        and not getattr(module, "has_post_expert_norm", False)
        and not getattr(module, "_is_expert_parallel", False)
        and module._parameters.get("gate_up_proj" if module.has_gate else "up_proj") is not None
    )


def forward(stock: Any, module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Each expert's two products on the tokens that were sent to it, weighed and added up."""
    up = "gate_up_proj" if module.has_gate else "up_proj"
    total = torch.zeros_like(hidden_states)
    for expert in torch.unique(top_k_index).tolist():
        if expert >= module.num_experts:
            continue
        token, place = torch.where(top_k_index == expert)
        inner = _product(module, "up", up, expert, hidden_states[token])
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        output = _product(module, "down", "down_proj", expert, inner)
        total = total.index_add(0, token, (output * top_k_weights[token, place, None]).to(total.dtype))
    return total


def _product(module: Any, product: str, name: str, expert: int, x: Tensor) -> Tensor:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    record = module.training and torch.is_grad_enabled()
    weight = weight.t() if module.is_transposed else weight
    return ops.linear(x, weight, bias, module._halfstep_linear, states_of(module, product), record)
