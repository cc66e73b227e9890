"""Scaled dot-product attention on the best path that this machine has for its dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.kernels import carried
from halfstep.ops.stacks import stacked_linear
from halfstep.recipe import AttentionSpec


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    spec: AttentionSpec | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(d) + mask) v for q, k, v of shape (batch, heads, time, d), in autocast's dtype where it is
    on.

    Where 16-bit products are carried, the whole of it runs in float32 between one rounding of its inputs and one of
    its output, forward and backward.

    Args:
        is_causal: a place attends to itself and those before it; without a mask.
        mask: added to the scores, or False where a place must not attend.
        dropout: the probability with which a weight becomes zero.
        spec: how the operands of the two products are rounded; scores and softmax are then float32.
    """
    device = query.device
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else query.dtype
    if spec is not None:
        with torch.autocast(device.type, enabled=False):
            return rounded_attention(query, key, value, is_causal, mask, dropout, spec, dtype)[0].to(dtype)
    if not carried.supports(dtype, device):
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal)
    with torch.autocast(device.type, enabled=False):
        q, k, v = (operand.to(dtype).float() for operand in (query, key, value))
        mask = mask.float() if mask is not None and mask.is_floating_point() else mask
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal).to(dtype)


def rounded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    mask: Tensor | None,
    dropout: float,
    spec: AttentionSpec,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The mixed values and the weights after dropout, in float32; operands that are not rounded are of `dtype`."""
    scores = stacked_linear(query, key, spec.scores, dtype) * query.shape[-1] ** -0.5
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -torch.inf)
    weights = F.dropout(F.softmax(scores, dim=-1), dropout, training=dropout > 0)
    return stacked_linear(weights, value.mT, spec.mix, dtype), weights
