"""Multi-head self-attention of unit scale."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.errors import ModelError
from halfstep.ops.linear_passes import product_dtype
from halfstep.ops.noise import key_of
from halfstep.ops.part import part_of
from halfstep.ops.stacks import stacked_linear
from halfstep.recipe import AttentionSpec
from halfstep.unit.attention import scaled_dot_product_attention
from halfstep.unit.layers import dropout as unit_dropout
from halfstep.unit.modules.linear import Linear


class Attention(nn.Module):
    """Self-attention on (batch, time, width) with logits mult q k^T / head, its sum brought to unit variance.

    A recipe's `attention` rounds the operands of its two products; the factors stay.

    Args:
        is_causal: attend to the present and the past alone.
        dropout: the probability with which an attention weight becomes zero in training.
        mult: the temperature; sqrt(head) gives logits q k^T / sqrt(head), those of munit scaling and of stock models.
        square_root: take the square root of softmax's weights, whose squares sum to 1: the variance is then 1 at every
            place, whatever their number, if values are independent. Real ones are not, and the variance grows with the
            place: munit scaling's final recipe leaves it off, and norms after the branch instead.
        constraint: of the two linear layers.

    Raises:
        ModelError: heads that do not divide the width.

    Source: Blake et al. 2025, arXiv 2407.17465; Narayan et al. 2025, arXiv 2502.05967, section 2.1 (the square root).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        is_causal: bool = False,
        dropout: float = 0.0,
        mult: float = 1.0,
        square_root: bool = False,
        bias: bool = False,
        constraint: str = "to_output",
        **factory: Any,
    ) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise ModelError(f"{heads} heads for a width of {width} given; expected a number that divides it")
        self.heads, self.is_causal, self.dropout = heads, is_causal, dropout
        self.mult, self.square_root = mult, square_root
        self.qkv = Linear(width, 3 * width, bias, constraint=constraint, **factory)
        self.out_proj = Linear(width, width, bias, constraint=constraint, ends_branch=True, **factory)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(batch, time, width) -> the same shape; the mask is added to the logits, or False where not to attend."""
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attend = square_root_attention if self.square_root else scaled_dot_product_attention
        options: Any = {"dropout_p": self.dropout if self.training else 0.0, "is_causal": self.is_causal}
        options |= {"spec": part_of(self).attention, "noise": key_of(self)}
        mixed = attend(q, k, v, attn_mask=mask, mult=self.mult, **options)
        return self.out_proj(mixed.transpose(1, 2).reshape(batch, time, width))  # type: ignore[no-any-return]


def square_root_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    mult: float = 1.0,
    spec: AttentionSpec | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """sqrt(softmax(mult q k^T / d + mask)) v for q, k, v of shape (..., time, d).

    The square root is taken of the logarithm, whose gradient is finite where a weight is zero. Dropout keeps the
    variance: what is left is divided by sqrt(1 - p).

    Args:
        spec: how the operands of the two products are rounded; scores and weights are then float32.

    Source: Narayan et al. 2025, arXiv 2502.05967, equation 8, whose norm of the weights is to be squared.
    """
    if spec is not None and spec.rounds:
        dtype = product_dtype(query)
        with torch.autocast(query.device.type, enabled=False):
            logits = stacked_linear(query, key, spec.scores, dtype, noise) * (mult / query.shape[-1])
            weights = _square_roots(logits, attn_mask, dropout_p, is_causal)
            return stacked_linear(weights, value.mT, spec.mix, dtype, noise).to(dtype)
    logits = query @ key.mT * (mult / query.shape[-1])
    return _square_roots(logits, attn_mask, dropout_p, is_causal) @ value


def _square_roots(logits: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool) -> Tensor:
    """The square roots of softmax's weights, after dropout."""
    if is_causal:
        after = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(after, -torch.inf)
    if attn_mask is not None:
        is_added = attn_mask.is_floating_point()
        logits = logits + attn_mask if is_added else logits.masked_fill(~attn_mask, -torch.inf)
    weights = (F.log_softmax(logits, dim=-1) / 2).exp()
    return unit_dropout(weights, dropout_p, dropout_p > 0)
