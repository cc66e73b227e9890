"""Losses whose gradients are of unit size: the value is torch's, and the gradient that of the sum of losses."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.errors import ModelError, unknown
from halfstep.ops.function import run
from halfstep.ops.scale import scale_backward, scale_forward
from halfstep.unit import factors


Reduction = Literal["none", "mean", "sum"]


def cross_entropy(
    input: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    mult: float = 1.0,
) -> Tensor:
    """torch's cross-entropy of mult x, in float32 or wider; the gradient of the logits is that of the sum of losses,
    times classes / sqrt(classes - 1) / (1 - label_smoothing).

    input is (classes) or (batch, classes, ...), target (...) of classes, or probabilities of input's shape, whose
    factor is that of one-hot ones. The mean is over targets that are not `ignore_index`, whose logits have no gradient.
    Where logits are equal, the others' gradients have a root mean square of 1, whatever their number.

    The factor is on the loss's own gradient, a number, so that it costs no pass over the logits. A mult that is not 1
    is on the values alone, as u-muP has it.
    """
    factor = factors.cross_entropy(input.shape[0] if input.dim() == 1 else input.shape[1], label_smoothing)
    options: Any = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    losses = scale_forward(_wide(input), mult), target
    if reduction == "mean":
        total = F.cross_entropy(*losses, reduction="sum", **options)
        counted = target.numel() / input.shape[0 if input.dim() == 1 else 1]
        if not target.is_floating_point():
            return run(_Loss, total, (target != ignore_index).sum(), factor)  # type: ignore[no-any-return]
        return run(_Loss, total, total.new_tensor(counted), factor)  # type: ignore[no-any-return]
    _check(reduction)
    return scale_backward(F.cross_entropy(*losses, reduction=reduction, **options), factor)


def mse_loss(input: Tensor, target: Tensor, reduction: Reduction = "mean") -> Tensor:
    """torch's mean squared error, in float32 or wider; gradients are those of the sum of squares, times 8^-1/2.

    Raises:
        ModelError: the shapes differ, which torch would broadcast.
    """
    if input.shape != target.shape:
        raise ModelError(
            f"an input of shape {tuple(input.shape)} and a target of {tuple(target.shape)}; expected the same"
        )
    if reduction == "mean":
        total = F.mse_loss(_wide(input), _wide(target), reduction="sum")
        return run(_Loss, total, total.new_tensor(float(input.numel())), factors.mse_loss())  # type: ignore[no-any-return]
    _check(reduction)
    return scale_backward(F.mse_loss(_wide(input), _wide(target), reduction=reduction), factors.mse_loss())


def _wide(x: Tensor) -> Tensor:
    """A sum of 16-bit losses may overflow."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _check(reduction: str) -> None:
    if reduction not in ("none", "sum"):
        raise ModelError(unknown("reduction", reduction, ("mean", "none", "sum")))


class _Loss(torch.autograd.Function):
    """A sum over a count, whose gradient is the sum's times a factor: the count is not in it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(total: Tensor, count: Tensor, factor: float) -> Tensor:
        return total / count

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.factor = inputs[2]
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def tangent(ctx: Any, *tangents: Any) -> Tensor:
        return tangents[0] / ctx.saved_tensors[0]  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.factor, None, None
