"""Scaled dot-product attention as a module, so that a recipe can round the operands of its two matmuls."""

from torch import Tensor, nn

from halfstep import ops
from halfstep.ops.part import key_of, part_of


class DotProductAttention(nn.Module):
    """softmax(q k^T / sqrt(d) + mask) v, without parameters: `ops.attention` under a recipe.

    A recipe does not see functional calls. A model that computes attention by this module follows `Recipe.attention`;
    without a recipe the module is torch's scaled_dot_product_attention.

    Args:
        dropout: the probability with which an attention weight becomes zero in training.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """q, k, v (batch, heads, time, d) -> (batch, heads, time, d); see `ops.attention`."""
        dropout = self.dropout if self.training else 0.0
        return ops.attention(query, key, value, is_causal, mask, dropout, part_of(self).attention, noise=key_of(self))
