"""Adapters of the linear layers of torch, PyTorch Geometric, Hugging Face and `halfstep.unit` (with multipliers)."""

from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from halfstep import unit
from halfstep.nn.product import product, weight_of
from halfstep.nn.quantized_weights import Kind, Weight
from halfstep.ops.function import cast_once
from halfstep.ops.part import part_of


def forward(
    stock: Any, module: Any, input: Tensor, channels: Tensor | None = None, tokens: Tensor | None = None
) -> Tensor:
    """`ops.linear` with the spec that `apply` left on the module; only training steps move scaling states.

    Args:
        channels: powers of two by which the input was multiplied, channel by channel; the rounded input is divided by
            them.
        tokens: scales by which the input was divided, token by token; the output is multiplied by them.
    """
    weight, bias = module._parameters.get("weight"), module.bias
    if type(weight) is not Parameter or part_of(module).stored:  # a tied weight is still a parameter when stored
        weight = weight_of(module, "weight", input)
    if tokens is None:
        return product(module, input, weight, bias, channels=channels)
    y = product(module, input, weight, None) * tokens
    return y if bias is None else y + bias.to(y.dtype)


def of_transposed(stock: Any, module: Any, x: Tensor) -> Tensor:
    """`ops.linear` with the weight (in, out) transposed."""
    return product(module, x, weight_of(module, "weight", x).t(), module.bias)


def with_bias_apart(stock: Any, module: Any, input: Tensor) -> Tensor:
    """`ops.linear` without the bias, which is added afterwards."""
    y = product(module, input, weight_of(module, "weight", input), None)
    return y if module.bias is None else y + module.bias


def under_autocast(stock: Any, module: Any, input: Tensor) -> Tensor:
    """The stock forward with its input cast to autocast's dtype once for all layers that read it."""
    following = part_of(module).following
    return stock(module, input if following is None else cast_once(input, following.last_input))  # type: ignore[no-any-return]


LINEAR = Kind(
    "nn.Linear",
    (nn.Linear, unit.Linear, "torch_geometric.nn.dense.linear.Linear"),
    lambda module: (Weight("weight"),),
    forward,
)
CONV1D = Kind(
    "Conv1D",
    ("transformers.pytorch_utils.Conv1D",),
    lambda module: (Weight("weight", transposed=True),),
    of_transposed,
)
"""GPT-2's linear layer, whose weight is (in, out)."""
FALCON = Kind(
    "FalconLinear",
    ("transformers.models.falcon.modeling_falcon.FalconLinear",),
    LINEAR.weights,
    with_bias_apart,
)
"""Falcon's linear layer, which adds its bias after the matmul was rounded."""
