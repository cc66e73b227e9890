"""Frozen weights of codes in a model that trains adapters beside them: gradients pass through to the layer's input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from halfstep import ops
from halfstep.ops.function import apart
from halfstep.ops.linear_passes import bias_gradient
from halfstep.ops.noise import KEY, seeds_of
from halfstep.ops.operand import Operand, operand
from halfstep.ops.plain import matrix
from halfstep.recipe import LinearSpec


@dataclass(frozen=True, eq=False)
class FrozenWeight:
    """A matrix (out, in) of a quantised layer, decoded whenever a product takes it: no pass keeps its values."""

    operand: Callable[[], Operand]
    rows: int

    def t(self) -> FrozenWeight:
        """The transposed matrix, of as many rows as columns it had."""
        return FrozenWeight(lambda: self.operand().t(), 0)

    def __getitem__(self, rows: slice) -> FrozenWeight:
        return FrozenWeight(lambda: self.operand()[rows], len(range(self.rows)[rows]))

    def split(self, rows: int) -> tuple[FrozenWeight, ...]:
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
                    values = weight.scaled()
                    weight = operand(values, later and later.down, grad.dtype, dim=0, seed=seeds.rhs)
                alone = LinearSpec(output=spec.grad_input)
                grad_x = ops.linear(grad, weight.t(), None, alone, ctx.states).to(ctx.dtypes[0])
            if ctx.needs_input_grad[1]:
                grad_bias = bias_gradient(matrix(grad), spec.grad_weight.multiplier).to(ctx.dtypes[1])
        return grad_x, grad_bias, None, None, None, None
