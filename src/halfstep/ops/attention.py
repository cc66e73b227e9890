"""Scaled dot-product attention on the best path that this machine has for its dtype, or with quantised operands.

Its products with quantised operands are of stacks of matrices.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.kernels import carried
from halfstep.kernels.operator import unseen
from halfstep.kernels.operators import rotate
from halfstep.ops.function import Once, apart, once, run
from halfstep.ops.operand import Operand, operand, signs_of
from halfstep.ops.part import KEY, Seeds, seeds_of
from halfstep.ops.plain import Factors, accumulated, factors_of, matrix, plain_stacked, scale_backward, scaled
from halfstep.quant.rounding import Seed
from halfstep.recipe import AttentionSpec, LinearSpec, Matmul


_ONE: Factors = (1.0, 1.0, 1.0, 1.0)


# ---- unrounded attention ---------------------------------------------------------------------------------------------


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    spec: AttentionSpec | None = None,
    factors: tuple[Factors, Factors] | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(d) + mask) v for q, k, v of shape (batch, heads, time, d), in autocast's dtype where it is
    on.

    Where 16-bit products are carried, the whole of it runs in float32 between one rounding of its inputs and one of
    its output, forward and backward.

    Args:
        is_causal: a place attends to itself and those before it; without a mask.
        mask: added to the scores, or False where a place must not attend.
        dropout: the probability with which a weight becomes zero.
        spec: how the operands of the two products are rounded; scores and softmax are then float32. Multipliers stand
            beside 1 / sqrt(d).
        factors: instead of a spec that rounds nothing, the numbers of its multipliers: of scores, and of the mix.
        noise: as `stacked_linear`.
    """
    device = query.device
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else query.dtype
    if spec is not None and (spec.rounds or not spec.multiplies):
        with torch.autocast(device.type, enabled=False):
            return rounded_attention(query, key, value, is_causal, mask, dropout, spec, dtype, noise)[0].to(dtype)
    if spec is not None:
        queries, keys, width = query.shape[-2], key.shape[-2], query.shape[-1]
        scores, mix = (
            factors_of(spec.scores, queries, keys, width),
            factors_of(spec.mix, queries, value.shape[-1], keys),
        )
        factors = scores or _ONE, mix or _ONE
    scale = None
    if not carried.supports(dtype, device):
        if factors is not None:
            query, key, value, scale = _multiplied(query, key, value, *factors)
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal, scale=scale)
    with torch.autocast(device.type, enabled=False):
        q, k, v = (operand.to(dtype).float() for operand in (query, key, value))
        mask = mask.float() if mask is not None and mask.is_floating_point() else mask
        if factors is not None:
            q, k, v, scale = _multiplied(q, k, v, *factors)
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, scale=scale).to(dtype)


def _multiplied(
    query: Tensor, key: Tensor, value: Tensor, scores: Factors, mix: Factors
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Inputs and the scale of the scores with which torch's attention has these factors on its products.

    That of the mixed values is on the values, whence it is on all gradients as well; only what differs from it is a
    factor on a gradient alone.
    """
    weights = mix[1] / mix[0] / scores[0]
    query, key = scale_backward(query, weights * scores[1]), scale_backward(key, weights * scores[2])
    return query, key, scaled(value, mix[0], mix[2]), query.shape[-1] ** -0.5 * scores[0]


# ---- attention with rounded products ---------------------------------------------------------------------------------


def rounded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    mask: Tensor | None,
    dropout: float,
    spec: AttentionSpec,
    dtype: torch.dtype,
    noise: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The mixed values and the weights after dropout, in float32; operands that are not rounded are of `dtype`."""
    scores = stacked_linear(query, key, spec.scores, dtype, noise) * query.shape[-1] ** -0.5
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -torch.inf)
    weights = F.dropout(F.softmax(scores, dim=-1), dropout, training=dropout > 0)
    return stacked_linear(weights, value.mT, spec.mix, dtype, noise), weights


# ---- products of stacks of matrices ----------------------------------------------------------------------------------


def stacked_linear(
    x: Tensor, weight: Tensor, spec: LinearSpec, dtype: torch.dtype, noise: Tensor | None = None
) -> Tensor:
    """x (..., rows, in) times weight (..., out, in) transposed: (..., rows, out) in float32.

    Each matrix of the stack is a linear layer's product, and so are the two of its backward; scales of a whole tensor
    are scales of the whole stack.

    Args:
        spec: how the six operands are rounded; its scalings keep no state.
        dtype: of operands that are not rounded.
        noise: the key that noise and signs follow from; None draws them from torch's default generator.
    """
    if not spec.rounds:
        return plain_stacked(x, weight, dtype, factors_of(spec, x.shape[-2], *weight.shape[-2:]))
    return run(_Rounded, x, weight, spec, dtype, noise)  # type: ignore[no-any-return]


class _Rounded(Once):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, spec: LinearSpec, dtype: torch.dtype, noise: Tensor | None) -> Tensor:
        return apart(_product(x, weight, spec.output, dtype, *_seeds(noise, x, spec.output)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, ctx.spec, ctx.dtype, ctx.noise = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = once(_form, grads[0], *ctx.saved_tensors, ctx.needs_input_grad[:2], ctx.spec, ctx.dtype, ctx.noise)
        return *found, None, None, None


def _form(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    needs: tuple[bool, ...],
    spec: LinearSpec,
    dtype: torch.dtype,
    noise: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The gradients of x and weight, as far as they are needed."""
    grad_x = grad_weight = None
    first, second = _seeds(noise, grad, spec.grad_input, spec.grad_weight)
    if needs[0]:
        grad_x = _product(grad, weight.mT, spec.grad_input, dtype, first).to(x.dtype)
    if needs[1]:
        grad_weight = _product(grad.mT, x.mT, spec.grad_weight, dtype, second).to(weight.dtype)
    return grad_x, grad_weight


def _seeds(noise: Tensor | None, x: Tensor, *products: Matmul) -> tuple[Seeds, ...]:
    return seeds_of(None if noise is None else {KEY: noise}, x, *products)


def _product(lhs: Tensor, rhs: Tensor, matmul: Matmul, dtype: torch.dtype, seeds: Seeds) -> Tensor:
    """lhs (..., rows, shared) times rhs (..., columns, shared) transposed, both rounded along the shared dimension."""
    with torch.autocast(lhs.device.type, enabled=False):
        times, signs = matmul.multiplier, signs_of(matmul, lhs, rhs, seeds.signs)
        multiplier = None if times is None else times.of(lhs.shape[-2], lhs.shape[-1], rhs.shape[-2])
        with unseen():
            if signs is not None:
                lhs, rhs = rotate(lhs, signs), rotate(rhs, signs)
            a, b = _operand(lhs, matmul.lhs, dtype, seeds.lhs), _operand(rhs, matmul.rhs, dtype, seeds.rhs)
        if matmul.accumulate is None:
            product = carried.run_stacked(a.values, b.values.mT, multiplier)
        else:
            product = accumulated(a.values.float(), b.values.mT.float(), matmul.accumulate)
            product = product if multiplier is None else product * multiplier
        for scale in (a.scale, b.scale):
            product = product if scale is None else product * scale
        return product


def _operand(x: Tensor, quantizer: Any, dtype: torch.dtype, seed: Seed | None) -> Operand:
    made = operand(matrix(x), quantizer, dtype, units=False, seed=seed).widened(dtype)
    return Operand(made.values.view(x.shape), made.scale)
