"""A small transformer from one sequence to another."""

import torch
from torch import Tensor, nn

from halfstep.nn import DotProductAttention


SIZES = {"transformer": (2, 64, 4), "transformer-wide": (3, 192, 6)}  # layers, width, heads


class Attention(nn.Module):
    """Multi-head attention of (batch, time, width) to itself or to a memory (batch, other time, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.mix = DotProductAttention()
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor, is_causal: bool = False) -> Tensor:
        """The attention output for each position of x."""
        batch, time, width = x.shape
        q = self.query(x).view(batch, time, self.heads, -1).transpose(1, 2)
        k, v = self.key_value(memory).view(batch, memory.shape[1], 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = self.mix(q, k, v, is_causal=is_causal)
        return self.proj(mixed.transpose(1, 2).reshape(batch, time, width))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Pre-norm self-attention, attention to the memory if there is one, and an MLP."""

    def __init__(self, width: int, heads: int, crossed: bool) -> None:
        super().__init__()
        self.norm1, self.own = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width) if crossed else None
        self.cross = Attention(width, heads) if crossed else None
        self.norm3 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """With a memory the layer is a decoder layer, and causal."""
        y = self.norm1(x)
        x = x + self.own(y, y, is_causal=memory is not None)
        if memory is not None and self.norm2 is not None and self.cross is not None:
            x = x + self.cross(self.norm2(x), memory)
        return x + self.mlp(self.norm3(x))  # type: ignore[no-any-return]


class Seq2Seq(nn.Module):
    """Source (batch, time) and target so far (batch, other time), int64 -> logits (batch, other time, vocabulary)."""

    def __init__(self, source: int, target: int, longest: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(source, width), nn.Embedding(target, width)
        self.position = nn.Embedding(longest, width)
        self.encoder = nn.ModuleList(Layer(width, heads, crossed=False) for _ in range(layers))
        self.decoder = nn.ModuleList(Layer(width, heads, crossed=True) for _ in range(layers))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.head = nn.Linear(width, target)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=width**-0.5 if "norm" not in name else 1.0)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """The logits of the next word at each position of the target."""
        x = self.source(source) + self.position(torch.arange(source.shape[1], device=source.device, dtype=torch.int64))
        for layer in self.encoder:
            x = layer(x)
        memory = self.norm1(x)
        y = self.target(target) + self.position(torch.arange(target.shape[1], device=target.device, dtype=torch.int64))
        for layer in self.decoder:
            y = layer(y, memory)
        return self.head(self.norm2(y))  # type: ignore[no-any-return]
