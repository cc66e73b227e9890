"""Adapter of fused experts in Hugging Face's mixtures of experts: two parameters hold the weights of all experts.

transformers (5.0 and newer) delegates the experts' forward to a registered function (self, hidden_states, top_k_index,
top_k_weights); attributes of the module describe the layout of its parameters. `forward` here is such a function. The
experts of a layer share one scaling state for each operand of each of its two matmuls.
"""

from typing import Any

import torch
from torch import Tensor, nn

from halfstep.nn.product import grouped_product, product, weights_of
from halfstep.nn.quantized_weights import Kind, Weight
from halfstep.ops.function import no_autocast
from halfstep.quant.tracing import untraced


_LAYOUT = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts")


def resembles(module: nn.Module) -> bool:
    """Whether the module has a 3-dimensional parameter `down_proj`, the weights of several experts."""
    down = module._parameters.get("down_proj")
    return down is not None and down.dim() == 3


def fits(module: nn.Module) -> bool:
    """Whether the module follows transformers' interface for experts and has no norm after each of them."""
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
    """The weights of its two matmuls, with one matrix an expert."""
    names = {"up": "gate_up_proj" if module.has_gate else "up_proj", "down": "down_proj"}
    return tuple(
        Weight(name, product, transposed=module.is_transposed, stacked=True) for product, name in names.items()
    )


@untraced
def forward(stock: Any, module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Each expert's two matmuls on the tokens routed to it; outputs are weighted and summed in the order of experts.

    torch.compile breaks its graph here, since the number of tokens of each expert depends on data.
    """
    up, down = weights(module)
    experts, slot = top_k_index.sort(dim=-1, descending=True, stable=True)
    experts, row = experts.flatten().sort(stable=True)  # by expert, and by token within each
    counts = torch.bincount(experts, minlength=module.num_experts).tolist()[: module.num_experts]
    row = row[: sum(counts)]  # without rows of experts on other ranks
    inner = _products(module, up, _sent(hidden_states, row, slot.shape[-1]), counts)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    output = _products(module, down, inner, counts)
    weight = top_k_weights.gather(-1, slot).flatten().index_select(0, row)
    return _returned((output * weight[:, None]).to(hidden_states.dtype), row, len(hidden_states), slot.shape[-1])


def _sent(tokens: Tensor, row: Tensor, slots: int) -> Tensor:
    """The tokens at the given rows, where row = token index * slots + slot."""
    with no_autocast(tokens):  # autocast's lists refuse to stack bf16 under fp16
        # The gradient is summed slot by slot, from the last expert to the first, as in a loop over experts.
        return torch.stack([tokens] * slots, 1).flatten(0, 1).index_select(0, row)


def _returned(output: Tensor, row: Tensor, tokens: int, slots: int) -> Tensor:
    """The outputs of each token's experts, summed from the first expert to the last."""
    width = output.shape[-1]
    with no_autocast(output):
        spread = output.new_zeros(tokens * slots, width).index_copy(0, row, output)
    total = output.new_zeros(tokens, width)
    for each in reversed(spread.view(tokens, slots, width).unbind(1)):
        total = total + each
    return total


def _products(module: Any, weight: Weight, x: Tensor, counts: list[int]) -> Tensor:
    """The matmul of each expert's rows of x with its matrix, concatenated by expert; `counts` are the rows of each."""
    biases = getattr(module, f"{weight.name}_bias") if module.has_bias else None
    made = grouped_product(module, weight.name, x, biases, counts, weight.transposed)
    if made is not None:
        return made
    matrices = weights_of(module, weight.name, x, len(counts))
    pieces = []
    for expert, (rows, matrix) in enumerate(zip(x.split_with_sizes(counts), matrices, strict=True)):
        if len(rows):
            own, bias = matrix(), None if biases is None else biases[expert]
            pieces.append(product(module, rows, own.t() if weight.transposed else own, bias, weight.product))
    if pieces:
        return torch.cat(pieces)
    return x.new_zeros(0, getattr(module, weight.name).shape[2 if weight.transposed else 1])


EXPERTS = Kind("fused experts", (), weights, forward, fits)
"""The adapter of fused experts; attributes of a module, not its forward's class, decide whether it fits."""
