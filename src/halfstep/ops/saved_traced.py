"""Functions for graphs of torch.compile whose gradients are computed from inputs rounded as saved for backward.

In a graph no saved-tensor hooks run. Gradients equal those of the eager model; the compiler decides what is stored.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfstep.ops.casts import fake_quantize
from halfstep.ops.function import SavesNothing
from halfstep.recipe import Storage


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor, storage: Storage) -> Tensor:
    """function(x), whose gradient is computed at x rounded by the storage."""
    return _Instead.apply(function(x.detach()), function(_kept(x, storage)))  # type: ignore[no-any-return,no-untyped-call]


def multiplied(x: Tensor, y: Tensor, storage: Storage) -> Tensor:
    """x * y, whose gradients are computed from x and y rounded by the storage."""
    return _Instead.apply((x * y).detach(), _kept(x, storage) * _kept(y, storage))  # type: ignore[no-any-return,no-untyped-call]


def layer_norm(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float, storage: Storage
) -> Tensor:
    """Layer normalization, whose gradients are computed from x rounded by the storage and x's unrounded statistics."""
    return _LayerNorm.apply(x, _kept(x.detach(), storage), weight, bias, shape, eps)[0]  # type: ignore[no-any-return,no-untyped-call]


def _kept(x: Tensor, storage: Storage) -> Tensor:
    """x rounded as the storage saves it for backward; gradients pass straight through."""
    if storage.dtype is not None:
        return x.to(storage.dtype).to(x.dtype)
    return fake_quantize(x.reshape(storage.matrix(tuple(x.shape))), storage.quantizer).view(x.shape)


class _Instead(SavesNothing):
    """The values of the first tensor; the gradient goes to the second."""

    @staticmethod
    def forward(x: Tensor, other: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0]


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, at: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int], eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.native_layer_norm(x, shape, weight, bias, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, at, weight, bias, ctx.shape, _ = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(at, *output[1:], weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        at, mean, rstd, weight, bias = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[i] for i in (0, 2, 3)]
        form = torch.ops.aten.native_layer_norm_backward
        x, grad_weight, grad_bias = form(grads[0], at, ctx.shape, mean, rstd, weight, bias, wanted)
        return x, None, grad_weight, grad_bias, None, None
