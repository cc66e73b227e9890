"""Attention of unit size, on the average over its places."""

from __future__ import annotations

from torch import Tensor

from halfstep import ops
from halfstep.recipe import AttentionSpec, LinearSpec, Matmul, Multiplier
from halfstep.unit import factors


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
