"""The product of a layer that follows a recipe; with frozen weights of codes, gradients go to its input alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from halfstep import ops
from halfstep.nn.noise import localize, states_and_key
from halfstep.nn.quantized_weights import quantized_weight, rows_of
from halfstep.ops.few_rows import StoredWeight
from halfstep.ops.function import apart
from halfstep.ops.grouped import grouped_linear, supports_grouped
from halfstep.ops.linear_passes import bias_gradient, product_dtype
from halfstep.ops.noise import KEY, key_of, seeds_of
from halfstep.ops.operand import Operand, operand
from halfstep.ops.part import part_of
from halfstep.ops.plain import matrix
from halfstep.quant.memory import has_memory
from halfstep.recipe import LinearSpec
from halfstep.unit import multipliers_of


def product(
    module: Any,
    x: Tensor,
    weight: "Tensor | Operand | StoredWeight | FrozenWeight | ops.RoundedWeight",
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
    spec, following = own.linear or multipliers_of(module), own.following
    if following is None:
        return ops.linear(x, weight, bias, spec, states, False, channels, own.keeping)
    record, evaluates = following.modes(module)
    cached = following.cached
    used = weight if cached is None else cached.weight((module, part), weight, x, spec, states, record)
    return ops.linear(x, used, bias, spec, states, record, channels, own.keeping, evaluates, following.last_input)


def grouped_product(
    module: Any, name: str, x: Tensor, bias: Tensor | None, counts: Sequence[int], transposed: bool
) -> Tensor | None:
    """The products of experts, whose matrices that parameter holds, each with its own rows of x, where one call forms
    all of them (`ops.grouped.grouped_linear`); None elsewhere."""
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
    return part_of(module).linear or multipliers_of(module)


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
    if not has_memory(x, or_fake=True):  # a graph finds by itself what it computes twice
        return weight
    states, dtype = states_and_key(module, part), product_dtype(x)
    return ops.rounded_weight(weight, spec_of(module), dtype, states, records(module), x)


def _decoded(weight: Operand | StoredWeight) -> Operand:
    return weight.operand() if isinstance(weight, StoredWeight) else weight


@dataclass(frozen=True, eq=False)
class FrozenWeight:
    """A matrix (out, in) of a quantised layer, decoded whenever a product takes it: no pass keeps its values."""

    operand: Callable[[], Operand]
    rows: int

    def t(self) -> "FrozenWeight":
        """The transposed matrix, of as many rows as columns it had."""
        return FrozenWeight(lambda: self.operand().t(), 0)

    def __getitem__(self, rows: slice) -> "FrozenWeight":
        return FrozenWeight(lambda: self.operand()[rows], len(range(self.rows)[rows]))

    def split(self, rows: int) -> "tuple[FrozenWeight, ...]":
        """The matrix in pieces of so many rows."""
        return tuple(self[start : start + rows] for start in range(0, self.rows, rows))


def frozen_product(
    x: Tensor,
    bias: Tensor | None,
    weight: FrozenWeight,
    spec: LinearSpec,
    noise: Tensor | None,
    forward: Callable[..., Tensor],
) -> Tensor:
    """What `forward(x, operand, bias)` makes, with gradients of x and bias, formed as the spec says of the input
    gradient's product: the gradient that arrives is rounded, and the weight once more where that product rounds it
    otherwise than the forward one."""
    return _Frozen.apply(x, bias, weight, spec, noise, forward)  # type: ignore[no-any-return, no-untyped-call]


class _Frozen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        weight: FrozenWeight,
        spec: LinearSpec,
        noise: Tensor | None,
        forward: Callable[..., Tensor],
    ) -> Tensor:
        ctx.states = {} if noise is None else {KEY: noise}
        ctx.weight, ctx.spec, ctx.dtypes = weight, spec, (x.dtype, None if bias is None else bias.dtype)
        return apart(forward(x, weight.operand(), bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        spec, grad_x, grad_bias = ctx.spec, None, None
        with torch.autocast(grad.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                weight, later = ctx.weight.operand(), spec.grad_input.rhs
                (seeds,) = seeds_of(ctx.states, grad, spec.grad_input)
                if "weight" in spec.rerounded:
                    weight = operand(weight.scaled(), later and later.down, grad.dtype, dim=0, seed=seeds.rhs)
                alone = LinearSpec(output=spec.grad_input)
                grad_x = ops.linear(grad, weight.t(), None, alone, ctx.states).to(ctx.dtypes[0])
            if ctx.needs_input_grad[1]:
                grad_bias = bias_gradient(matrix(grad), spec.grad_weight.multiplier).to(ctx.dtypes[1])
        return grad_x, grad_bias, None, None, None, None
