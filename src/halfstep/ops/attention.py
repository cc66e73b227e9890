"""Scaled dot-product attention on the best path that this machine has for its dtype."""

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.kernels import carried
from halfstep.ops.plain import Factors, factors_of
from halfstep.ops.scale import scale_backward, scaled
from halfstep.ops.stacks import stacked_linear
from halfstep.recipe import AttentionSpec


_ONE: Factors = (1.0, 1.0, 1.0, 1.0)


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
        noise: as `ops.stacks.stacked_linear`.
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
