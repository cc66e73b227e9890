"""The product of a layer that follows a recipe."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from halfstep import ops
from halfstep.nn.following import part_of
from halfstep.nn.quantized_weights import quantized_weight
from halfstep.nn.scaling import states_of
from halfstep.ops.operand import Operand
from halfstep.recipe import LinearSpec


_PLAIN = LinearSpec()  # of a layer that no rule rounds and another's forward multiplies by


def product(
    module: Any,
    x: Tensor,
    weight: Tensor | Operand,
    bias: Tensor | None,
    part: str = "",
    channels: Tensor | None = None,
) -> Tensor:
    """x w^T + b as the layer's spec says; only calls that train the model move scaling states.

    Args:
        part: of the layer's products, where it has several.
        channels: as `ops.linear` takes them.
    """
    shared = part_of(module)
    record = shared is not None and shared.trains(module)
    spec = vars(module).get("_halfstep_linear", _PLAIN)
    return ops.linear(x, weight, bias, spec, states_of(module, part), record, channels)


def weight_of(module: Any, name: str, x: Tensor, expert: int | None = None) -> Any:
    """The layer's parameter of that name, or one expert's, for a product with x; rounded already (an `Operand`) where
    the layer is quantised for inference."""
    if "_halfstep_stored" in vars(module):
        return quantized_weight(module, name, x, expert)
    weight = getattr(module, name)
    return ops.values_of(weight if expert is None else weight[expert])
