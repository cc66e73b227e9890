"""Products of unit size: linear layers, matrices, convolutions, attention."""

import math

import torch
from torch import Tensor

from halfstep import ops
from halfstep.errors import ModelError
from halfstep.ops.linear_passes import product_dtype
from halfstep.ops.plain import plain, plain_stacked
from halfstep.recipe import AttentionSpec, LinearSpec, Matmul, Multiplier
from halfstep.unit import factors
from halfstep.unit.constraint import Constraint, tied


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, constraint: str | Constraint | None = "to_output"
) -> Tensor:
    """y = fan_in^-1/2 x w^T + b for x (..., in), weight (out, in), bias (out): torch's, of unit size.

    The factors are those of `factors.linear`, folded into the products. The product has the factor, the bias none.
    """
    return ops.linear(input, weight, bias, factors.linear(constraint))


def linear_readout(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, constraint: str | Constraint | None = None
) -> Tensor:
    """`linear` for a model's last layer: y = fan_in^-1 x w^T + b, so that logits begin small and keep their size after
    a step whatever the width. Nothing ties its factors unless a constraint is given: its input's edge is a cut-edge.

    Source: u-muP, Blake et al. 2025.
    """
    return ops.linear(input, weight, bias, factors.linear(constraint, readout=True))


def matmul(input: Tensor, other: Tensor, constraint: str | Constraint | None = "to_output") -> Tensor:
    """x y for x (..., rows, shared), y (..., shared, columns) of unit size; neither is a weight (for which: `linear`).

    Where fewer matrices y than x are multiplied, or the other way, they are broadcast as by `torch.matmul`; where the
    constraint makes the gradient of these too large, a warning says what to do.

    Raises:
        ModelError: one of them is a vector, or their sizes do not fit.
    """
    if input.dim() < 2 or other.dim() < 2 or input.shape[-1] != other.shape[-2]:
        raise ModelError(
            f"a product of tensors of shapes {tuple(input.shape)} and {tuple(other.shape)}; expected "
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
    """torch's conv1d of unit size: fan-in is in / groups times the window, fan-out is out / groups times the window
    over the stride. Zeros of the padding count as terms: with a short input the edges make the output smaller."""
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
    """torch's conv2d of unit size; as `conv1d`."""
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
    """One number a dimension of space."""
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
    """softmax(mult q k^T / d + mask) v of unit size: q (..., queries, d), k (..., keys, d), v (..., keys, d_v).

    Logits are divided by d and not by its root, as u-muP has it, whose keys and queries align in training. One factor
    is on the output and on the gradients of q, k and v (`factors.attention`).

    A mask does not enter the factor, since it is data and the factor is a constant; say what yours is:

    Args:
        is_causal: a place attends to itself and those before it; without a mask.
        is_causal_mask: the mask is causal, or causal and more: the factor is causal attention's.
        spec, noise: how the operands of the two products are rounded, as for `ops.attention`; the factors stay.
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
    """What attention's scores are multiplied by beside 1 / sqrt(d), which makes it mult / d, and what the mixed values
    are: `factors.attention`; forward and backward."""
    return mult * max(width, 1) ** -0.5, factors.attention(queries, keys, width, mult, is_causal, dropout)


def multipliers(
    queries: int, keys: int, width: int, mult: float = 1.0, is_causal: bool = False, dropout: float = 0.0
) -> AttentionSpec:
    """`products` as a spec, whose operands a recipe may round."""
    numbers = products(queries, keys, width, mult, is_causal, dropout)
    scores, mix = (LinearSpec(*[Matmul(multiplier=Multiplier(constant=number))] * 3) for number in numbers)
    return AttentionSpec(scores, mix)
