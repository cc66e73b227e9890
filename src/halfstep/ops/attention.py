"""Scaled dot-product attention: torch's, in float32 where 16-bit matmuls are emulated, or with quantized operands.

Quantized operands are multiplied by `stacked_linear`, a batched matmul.
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
    """softmax(q k^T / sqrt(d) + mask) v for q, k, v of shape (batch, heads, time, d), in autocast's dtype if it is on.

    Where 16-bit matmuls are emulated, forward and backward round the inputs once, compute in float32 and round the
    output once.

    Args:
        is_causal: a position attends to itself and those before it; not together with a mask.
        mask: added to the scores, or boolean: False where a position must not attend.
        dropout: the probability with which a weight becomes zero.
        spec: how the operands of the two matmuls are rounded; scores and softmax are then float32. Its multipliers
            apply in addition to 1 / sqrt(d).
        factors: the values of the multipliers of the scores and of the mix, instead of a spec that rounds nothing.
        noise: as for `stacked_linear`.
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
    """Query, key and value, and the scale of the scores, with which torch's attention applies these factors.

    The factor of the mix multiplies the value, and with it all gradients; only the quotients by it are factors on
    gradients alone.
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
    """The attention output and the weights after dropout, both float32; unrounded operands are cast to `dtype`."""
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
    """x (..., rows, in) times the transpose of weight (..., out, in): (..., rows, out) in float32.

    Each matrix is multiplied as in a linear layer, forward and backward; a scale of a whole tensor is one scale of the
    whole stack.

    Args:
        spec: how the six operands are rounded; its scalings have no state.
        dtype: the dtype that unrounded operands are cast to.
        noise: the key from which the seeds of noise and signs are hashed; None uses torch's default generator.
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
    """The gradients of x and weight; None for those that `needs` leaves out."""
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
    """lhs (..., rows, shared) times the transpose of rhs (..., columns, shared), rounded along the shared dimension."""
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
    made = operand(matrix(x), quantizer, dtype, in_8_bits=False, seed=seed).widened(dtype)
    return Operand(made.values.view(x.shape), made.scale)
