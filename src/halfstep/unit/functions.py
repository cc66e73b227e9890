"""Unit-scaled functions: linear layers, matmuls, convolutions, attention, norms, embeddings, residuals, losses."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep import ops
from halfstep.errors import ModelError, one_of
from halfstep.ops.function import run
from halfstep.ops.linear_passes import product_dtype
from halfstep.ops.plain import plain, plain_stacked, scale_backward, scale_forward, scaled, weighted_sum
from halfstep.recipe import AttentionSpec, LinearSpec, Matmul, Multiplier
from halfstep.unit import factors
from halfstep.unit.calibration import Constraint, tied


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, constraint: str | Constraint | None = "to_output"
) -> Tensor:
    """y = fan_in^-1/2 x w^T + b for x (..., in), weight (out, in), bias (out).

    The factors are those of `factors.linear`, as multipliers of the matmuls. The bias has no factor in the output.
    """
    return ops.linear(input, weight, bias, factors.linear(constraint))


def linear_readout(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, constraint: str | Constraint | None = None
) -> Tensor:
    """`linear` for a model's last layer: y = fan_in^-1 x w^T + b, so that logits start small and change in a step by a
    size that does not depend on the width. Its factors are not tied unless a constraint is given, since its input's
    edge is a cut-edge.

    Source: u-muP, Blake et al. 2025.
    """
    return ops.linear(input, weight, bias, factors.linear(constraint, readout=True))


def matmul(input: Tensor, other: Tensor, constraint: str | Constraint | None = "to_output") -> Tensor:
    """x y for x (..., rows, shared), y (..., shared, columns), scaled to unit variance; for weights use `linear`.

    Batch dimensions are broadcast as by `torch.matmul`; if the constraint makes the gradient of a broadcast operand too
    large, a warning says what to do.

    Raises:
        ModelError: an operand is a vector, or the shapes do not match.
    """
    if input.dim() < 2 or other.dim() < 2 or input.shape[-1] != other.shape[-2]:
        raise ModelError(
            f"a matmul of tensors of shapes {tuple(input.shape)} and {tuple(other.shape)}; expected "
            "(..., rows, shared) and (..., shared, columns)"
        )
    batch = torch.broadcast_shapes(input.shape[:-2], other.shape[:-2])  # type: ignore[no-untyped-call]
    copies = [max(math.prod(batch) / max(math.prod(x.shape[:-2]), 1), 1) for x in (input, other)]
    output, left, right = factors.matmul(input.shape[-2], input.shape[-1], other.shape[-1], copies[1])
    ideal, roots = (output, left * copies[0] ** -0.5, right), (copies[0] ** -0.5, copies[1] ** -0.5)
    numbers = (*tied("matmul", constraint, ideal, (input, other), roots), 1.0)
    dtype = product_dtype(input)
    with torch.autocast(input.device.type, enabled=False):
        if other.dim() == 2:
            return plain(input.to(dtype), other.to(dtype).mT, None, numbers)
        x, y = (operand.expand(*batch, *operand.shape[-2:]) for operand in (input, other))
        return plain_stacked(x, y.mT, dtype, numbers).to(dtype)


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    constraint: str | Constraint | None = "to_output",
) -> Tensor:
    """torch's conv1d, scaled to unit variance: fan-in is in / groups times the window, fan-out is out / groups times
    the window over the stride. Zeros of the padding count as terms, so for short inputs the output is smaller."""
    return _convolution(input, weight, bias, stride, padding, dilation, groups, constraint, 1)


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    constraint: str | Constraint | None = "to_output",
) -> Tensor:
    """torch's conv2d, scaled to unit variance; as `conv1d`."""
    return _convolution(input, weight, bias, stride, padding, dilation, groups, constraint, 2)


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int | tuple[int, ...],
    padding: int | tuple[int, ...] | str,
    dilation: int | tuple[int, ...],
    groups: int,
    constraint: str | Constraint | None,
    dims: int,
) -> Tensor:
    if weight.dim() != dims + 2:
        raise ModelError(
            f"conv{dims}d with a weight of shape {tuple(weight.shape)}; expected (out, in / groups{', size' * dims})"
        )
    dilations, margins = _each(dilation, dims), [0] * 2 * dims
    if padding == "same":
        if any(step != 1 for step in _each(stride, dims)):
            raise ModelError(f"padding = 'same' with stride = {stride}; expected a stride of 1, or a number of zeros")
        for dim, (size, step) in enumerate(zip(weight.shape[2:], dilations, strict=True)):
            total = step * (size - 1)
            margins[2 * (dims - 1 - dim) : 2 * (dims - dim)] = [total // 2, total - total // 2]
    elif isinstance(padding, str) and padding != "valid":
        raise ModelError(f"padding = {padding!r} found; expected a number of zeros, 'same' or 'valid'")
    zeros = (0,) * dims if isinstance(padding, str) else _each(padding, dims)
    window = ops.Window(_each(stride, dims), zeros, dilations, groups, margins=tuple(margins))
    return ops.convolution(x, weight, bias, window, factors.linear(constraint))


def _each(value: int | tuple[int, ...], dims: int) -> tuple[int, ...]:
    """The value as a tuple with one entry a spatial dimension."""
    values = (value,) * dims if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    *,
    mult: float = 1.0,
    is_causal_mask: bool = False,
    spec: AttentionSpec | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """softmax(mult q k^T / d + mask) v, scaled to unit variance: q (..., queries, d), k (..., keys, d), v (..., keys,
    d_v).

    Logits are divided by d, not by its square root, as in u-muP, since keys and queries align in training. The output
    and the gradients of q, k and v have one factor (`factors.attention`). It is a constant, which does not depend on
    the values of a mask.

    Args:
        is_causal: a position attends to itself and those before it; not together with a mask.
        is_causal_mask: the mask is causal (perhaps masking more): take the factor of causal attention.
        spec, noise: how the operands of the two matmuls are rounded, as for `ops.attention`; the factors stay.
    """
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], dim=-3) for x in (key, value))
    sizes = query.shape[-2], key.shape[-2], query.shape[-1]
    causal = is_causal or is_causal_mask
    if spec is not None and spec.rounds:
        spec = spec.times(multipliers(*sizes, mult, causal, dropout_p))
        return ops.attention(query, key, value, is_causal, attn_mask, dropout_p, spec, noise=noise)
    numbers = products(*sizes, mult, causal, dropout_p)
    scores, mix = ((number, number, number, 1.0) for number in numbers)
    return ops.attention(query, key, value, is_causal, attn_mask, dropout_p, factors=(scores, mix))


def products(
    queries: int, keys: int, width: int, mult: float = 1.0, is_causal: bool = False, dropout: float = 0.0
) -> tuple[float, float]:
    """(factor of the scores in addition to 1 / sqrt(d), which makes mult / d in all; factor of the output,
    `factors.attention`), both forward and backward."""
    return mult * max(width, 1) ** -0.5, factors.attention(queries, keys, width, mult, is_causal, dropout)


def multipliers(
    queries: int, keys: int, width: int, mult: float = 1.0, is_causal: bool = False, dropout: float = 0.0
) -> AttentionSpec:
    """`products` as the multipliers of a spec, to be combined with a recipe's rounding."""
    numbers = products(queries, keys, width, mult, is_causal, dropout)
    scores, mix = (LinearSpec(*[Matmul(multiplier=Multiplier(constant=number))] * 3) for number in numbers)
    return AttentionSpec(scores, mix)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """torch's layer norm, whose output has unit variance; gradients of weight and bias have the factor rows^-1/2."""
    factor = factors.norm(_rows(input, normalized_shape))
    weight, bias = (None if part is None else scale_backward(part, factor) for part in (weight, bias))
    return F.layer_norm(input, list(normalized_shape), weight, bias, eps)


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """torch's RMS norm, whose output has unit size; the gradient of the weight has the factor rows^-1/2. The mean
    square is computed in float32."""
    weight = None if weight is None else scale_backward(weight, factors.norm(_rows(input, normalized_shape)))
    return F.rms_norm(input, list(normalized_shape), weight, eps)


def _rows(x: Tensor, shape: Sequence[int]) -> int:
    return x.numel() // max(math.prod(shape), 1)


def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, sparse: bool = False) -> Tensor:
    """torch's embedding lookup; the gradient of the table has the factor sqrt(rows / lookups).

    It is applied to the gradient of the output or of the table, whichever is smaller.
    """
    factor = factors.embedding(weight.shape[0], input.numel())
    if sparse or input.numel() < weight.shape[0]:
        return scale_backward(F.embedding(input, weight, padding_idx, sparse=sparse), factor)
    return F.embedding(input, scale_backward(weight, factor), padding_idx)


def dropout(input: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Dropout that keeps the variance: kept elements of x are divided by sqrt(1 - p); in evaluation x itself."""
    factor = factors.dropout(p)
    if not training or p == 0:
        return input
    if p == 1:
        return input * 0.0
    return input * torch.empty_like(input).bernoulli_(1 - p).mul_(1 / factor)


def add(input: Tensor | float, other: Tensor | float, constraint: str | Constraint | None = "to_output") -> Tensor:
    """(x + y) / sqrt(2); a scalar, or a tensor of one element, is added without a factor.

    If the constraint makes the gradient of a broadcast operand too large, a warning says what to do.
    """
    if not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return torch.add(input, other)
    ideal = factors.add(tuple(input.shape), tuple(other.shape))
    output, *grads = tied("add", constraint, ideal, (input, other), ideal[1:])
    if grads[0] == grads[1] == output and input.shape == other.shape:
        return weighted_sum(input, other, (output, output), (output, output))
    return scaled(torch.add(scale_backward(input, grads[0]), scale_backward(other, grads[1])), output, 1.0)


def residual_split(
    input: Tensor, *, variance_fraction: float | None = None, ratio: float | None = None
) -> tuple[Tensor, Tensor]:
    """x twice, as (branch, skip); their gradients are added with the weights of `residual_add`.

    The branch's weight is applied at its output in the forward and at its input in the backward, so that gradients
    inside the branch have unit size, and the gradient of x is that of the weighted sum.

    Args:
        variance_fraction, ratio: one of the two; see `factors.residual`.
    """
    branch, skip = factors.residual(variance_fraction, ratio)
    return run(_Split, input, branch, skip)  # type: ignore[no-any-return]


def residual_add(
    branch: Tensor, skip: Tensor, *, variance_fraction: float | None = None, ratio: float | None = None
) -> Tensor:
    """The weighted sum of a branch's output and the skip connection of `residual_split`; gradients pass unscaled.

    Args:
        variance_fraction, ratio: as for `residual_split`.

    Raises:
        ModelError: branch and skip have different shapes.
    """
    if branch.shape != skip.shape:
        raise ModelError(
            f"a residual's branch of shape {tuple(branch.shape)} and skip of {tuple(skip.shape)}; expected the same"
        )
    weight, rest = factors.residual(variance_fraction, ratio)
    return weighted_sum(skip, branch, (rest, weight), (1.0, 1.0))


class _Split(torch.autograd.Function):
    """The autograd Function that returns x twice; its gradient is a times the first's plus b times the second's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, a: float, b: float) -> tuple[Tensor, Tensor]:
        return x.view_as(x), x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, ctx.a, ctx.b = inputs

    @staticmethod
    def tangent(ctx: Any, *tangents: Any) -> tuple[Tensor, Tensor]:
        return tangents[0].view_as(tangents[0]), tangents[0].view_as(tangents[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        branch, skip = grads
        if torch.is_grad_enabled():
            return branch * ctx.a + skip * ctx.b, None, None
        return torch.mul(skip, ctx.b).add_(branch, alpha=ctx.a), None, None


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
    """torch's cross-entropy of mult x, in float32 or wider; the gradient of the logits is that of the sum of losses
    times classes / sqrt(classes - 1) / (1 - label_smoothing).

    input is (classes) or (batch, classes, ...), target (...) of class indices, or probabilities of input's shape, for
    which the factor is that of one-hot targets. The mean is over targets other than `ignore_index`, whose logits have
    no gradient. At equal logits the gradients of the others have a root mean square of 1, whatever their number.

    The factor is applied to the loss's own gradient, a scalar, and costs no pass over the logits. mult multiplies the
    values alone, not the gradients, as in u-muP.
    """
    factor = factors.cross_entropy(input.shape[0] if input.dim() == 1 else input.shape[1], label_smoothing)
    options: Any = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    losses = scale_forward(_wide(input), mult), target
    if reduction == "mean":
        total = F.cross_entropy(*losses, reduction="sum", **options)
        if target.is_floating_point():
            count = total.new_tensor(target.numel() / input.shape[0 if input.dim() == 1 else 1])
        else:
            count = (target != ignore_index).sum()
        return run(_Loss, total, count, factor)  # type: ignore[no-any-return]
    one_of("reduction", reduction, ("mean", "none", "sum"), ModelError)
    return scale_backward(F.cross_entropy(*losses, reduction=reduction, **options), factor)


def mse_loss(input: Tensor, target: Tensor, reduction: Reduction = "mean") -> Tensor:
    """torch's mean squared error, in float32 or wider; gradients are those of the sum of squares times 8^-1/2.

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
    one_of("reduction", reduction, ("mean", "none", "sum"), ModelError)
    return scale_backward(F.mse_loss(_wide(input), _wide(target), reduction=reduction), factors.mse_loss())


def _wide(x: Tensor) -> Tensor:
    """x in float32 or wider, since a sum of 16-bit losses may overflow."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Loss(torch.autograd.Function):
    """The autograd Function of total / count, whose gradient is that of `total` times a factor, without the count."""

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
