"""A small GPT: pre-norm blocks, causal attention, learned positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halfstep.nn import DotProductAttention


class Attention(nn.Module):
    """Causal multi-head self-attention on (batch, time, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = DotProductAttention()
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to the present and the past."""
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = self.mix(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, time, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """One block of the residual stream."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Tokens (batch, time) int64 -> logits (batch, time, vocabulary)."""

    def __init__(self, vocabulary: int, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # GPT-2's: the residual branches' last layers start smaller
                branch = name.endswith(("attention.proj.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if branch else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the next token at each position."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.int64))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]
