"""A small vision transformer with optional prompts: the model of foa.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from corruptions import SIDE
from torch import Tensor, nn

from halfstep.nn import DotProductAttention


HEADS, PATCH = 4, 4


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mix = DotProductAttention()

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, tokens, width) -> the same shape."""
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.mix(*parts).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    """Images (batch, side, side) -> logits (2, batch, 10) and class tokens after each block (batch, depth, width)."""

    def __init__(self, width: int = 48, depth: int = 2, side: int = SIDE) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH * PATCH, width)
        self.places = nn.Embedding(1 + (side // PATCH) ** 2, width)  # the first is the class token's
        nn.init.normal_(self.places.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor, prompts: Tensor | None = None, shift: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
        """Prompts (count, width) follow the class token. The second logits are those of its shifted feature."""
        cut = x.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).flatten(3).flatten(1, 2)
        token, places = self.places.weight.expand(len(x), -1, -1).tensor_split([1], 1)
        given = [] if prompts is None else [prompts.expand(len(x), -1, -1)]
        x = torch.cat([token, *given, self.patches(2 * cut - 1) + places], 1)
        features = []
        for block in self.blocks:
            x = block(x)
            features.append(x[:, 0])
        features[-1] = self.norm(features[-1])
        return self.head(torch.stack([features[-1], features[-1] + shift])), torch.stack(features, 1)
