"""The product of a layer that follows a recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from halfstep import ops
from halfstep.nn.frozen import FrozenWeight, frozen_product
from halfstep.nn.noise import localize, states_and_key
from halfstep.nn.quantized_weights import quantized_weight, rows_of
from halfstep.ops.few_rows import StoredWeight
from halfstep.ops.grouped import grouped_linear, supports_grouped
from halfstep.ops.linear_passes import product_dtype
from halfstep.ops.noise import key_of
from halfstep.ops.operand import Operand
from halfstep.ops.part import part_of
from halfstep.recipe import LinearSpec
from halfstep.unit import MULTIPLIERS


_PLAIN = LinearSpec()  # of a layer that no rule rounds and another's forward multiplies by


def product(
    module: Any,
    x: Tensor,
    weight: Tensor | Operand | StoredWeight | FrozenWeight | ops.RoundedWeight,
    bias: Tensor | None,
    part: str = "",
    channels: Tensor | None = None,
) -> Tensor:
    """x w^T + b as the layer's spec says; only calls that train the model move scaling states.

    Args:
        part: of the layer's products, where it has several.
        channels: as `ops.linear` takes them.
    """
    if isinstance(weight, FrozenWeight):

        def forward(x: Tensor, w: Operand, b: Tensor | None) -> Tensor:
            return product(module, x, w, b, part, channels)

        return frozen_product(x, bias, weight, spec_of(module), key_of(module), forward)
    if hasattr(weight, "device_mesh"):
        localize(module)
    own, states = part_of(module), states_and_key(module, part)
    record, evaluates = (False, False) if own.following is None else own.following.modes(module)
    spec = own.linear or module.__dict__.get(MULTIPLIERS, _PLAIN)
    return ops.linear(x, weight, bias, spec, states, record, channels, own.keeping, evaluates)


def grouped_product(
    module: Any, name: str, x: Tensor, bias: Tensor | None, counts: Sequence[int], transposed: bool
) -> Tensor | None:
    """The products of experts, whose matrices that parameter holds, each with its own rows of x, where one call forms
    all of them (`ops.grouped_linear`); None elsewhere."""
    own, spec = part_of(module), spec_of(module)
    if own.stored or own.keeping is not None or not supports_grouped(spec, x):
        return None
    weight = ops.values_of(getattr(module, name))
    if type(weight) not in (Tensor, Parameter):
        return None
    evaluates = own.following is not None and own.following.modes(module)[1]
    return grouped_linear(x, weight.mT if transposed else weight, bias, counts, spec, evaluates)


def spec_of(module: Any) -> LinearSpec:
    """How the layer's products round their operands, and what they are multiplied by."""
    return part_of(module).linear or module.__dict__.get(MULTIPLIERS, _PLAIN)


def records(module: Any) -> bool:
    """Whether this call trains the model, so that scaling states take in what they see."""
    following = part_of(module).following
    return following is not None and following.modes(module)[0]


def weight_of(module: Any, name: str, x: Tensor) -> Any:
    """The layer's parameter of that name for a product with x; rounded already (an `Operand`, or a `StoredWeight`)
    where the layer is quantised for inference."""
    if part_of(module).stored:
        return _stored(module, name, x)
    weight = getattr(module, name)
    return weight if type(weight) is Parameter else ops.values_of(weight)


def weights_of(module: Any, name: str, x: Tensor, experts: int) -> Sequence[Callable[[], Any]]:
    """`weight_of` for each of several experts, whose matrices the parameter holds: made when they are called for."""
    if part_of(module).stored:
        return [partial(_stored, module, name, x, expert) for expert in range(experts)]
    return [partial(ops.values_of, matrix) for matrix in ops.values_of(getattr(module, name)).unbind()]


def _stored(module: Any, name: str, x: Tensor, expert: int | None = None) -> Any:
    if part_of(module).adapts and torch.is_grad_enabled():
        like = x.new_empty(0, dtype=product_dtype(x))
        return FrozenWeight(lambda: _decoded(quantized_weight(module, name, like, expert)), rows_of(module, name))
    return quantized_weight(module, name, x, expert)


def repeated_weight(module: Any, name: str, x: Tensor, part: str) -> Any:
    """`weight_of` for products of that part with several tensors, of which x is one: rounded once for all of them, and
    with a gradient that adds up in float32."""
    weight = weight_of(module, name, x)
    if isinstance(weight, (Operand, StoredWeight, FrozenWeight)):
        return weight if isinstance(weight, FrozenWeight) else _decoded(weight)
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    if torch.compiler.is_compiling():  # a graph finds by itself what it computes twice
        return weight
    states, dtype = states_and_key(module, part), product_dtype(x)
    return ops.rounded_weight(weight, spec_of(module), dtype, states, records(module), x)


def _decoded(weight: Operand | StoredWeight) -> Operand:
    return weight.operand() if isinstance(weight, StoredWeight) else weight
