"""A decoder with rotary positions, whose attention rounds its operands to a dtype: the model of anchor.py."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention


KEYS, VALUES = 16, 16


def rotated(x: Tensor, positions: Tensor, base: float = 1e4) -> Tensor:
    """Queries or keys (..., length, size) rotated by their positions (..., length), in x's dtype; angles in float64."""
    half = x.shape[-1] // 2
    angles = positions[..., None].double() * base ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Reader(nn.Module):
    """A decoder of two blocks with rotary positions, whose attention rounds its operands to a dtype."""

    def __init__(self, width: int = 64, heads: int = 2, depth: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.key, self.value = nn.Embedding(KEYS + 1, width), nn.Embedding(VALUES + 1, width)
        sizes = ((width, 3 * width), (width, width), (width, 2 * width), (2 * width, width))
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            norms, layers = [nn.LayerNorm(width), nn.LayerNorm(width)], [nn.Linear(*size) for size in sizes]
            self.blocks.append(nn.ModuleList([*norms, *layers]))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VALUES + 1)

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | BlockMask, narrow: torch.dtype, seen: Any = None
    ) -> Tensor:
        """Logits of the answers to tokens (batch, length, 2); `seen` collects logits and weights of each attention."""
        x = self.key(tokens[..., 0]) + self.value(tokens[..., 1])
        for before, between, inner, out, up, down in self.blocks:
            qkv = inner(before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            q, k, v = qkv.to(torch.promote_types(qkv.dtype, torch.float32))
            q, k = rotated(q, positions[:, None]), rotated(k, positions[:, None])
            if isinstance(mask, BlockMask):
                mixed = flex_attention(q, k, v, block_mask=mask)
            else:
                with torch.autocast("cpu", enabled=False):  # operands are in 16 bits, sums and softmax are not
                    q, k, v = (t.to(narrow).to(t.dtype) for t in (q, k, v))
                    logits = (q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2)
                    weights = torch.where(mask, logits, -math.inf).softmax(-1)
                    mixed = weights.to(narrow).to(v.dtype) @ v
                if seen is not None:
                    seen.append((logits, weights))
            x = x + out(mixed.transpose(1, 2).flatten(2))
            x = x + down(F.gelu(up(between(x))))
        return self.head(self.norm(x))  # type: ignore[no-any-return]
