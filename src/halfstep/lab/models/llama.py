"""A small Llama: pre-norm blocks with RMSNorm, rotary positions, and gated MLPs; no biases.

Modules have Hugging Face's names, so that state dicts differ only by the prefix `model.`.
"""

import torch
from torch import Tensor, nn

from halfstep.lab.models.gpt import begin
from halfstep.ops import attention


_THETA = 10000.0
"""The longest wavelength of the positions, over 2 pi."""


class Attention(nn.Module):
    """Causal multi-head self-attention on (batch, time, width), with queries and keys rotated by their positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Attend to this and earlier positions."""
        batch, time, width = x.shape
        q, k, v = (
            project(x).view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = attention(rotated(q), rotated(k), v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, time, width))  # type: ignore[no-any-return]


def rotated(x: Tensor) -> Tensor:
    """x (batch, heads, time, d), with each pair (x_i, x_{i + d/2}) rotated by the angle position * theta^(-2i / d)."""
    time, size = x.shape[-2:]
    rates = _THETA ** (-torch.arange(0, size, 2, device=x.device, dtype=torch.int64).float() / size)
    angles = torch.arange(time, device=x.device, dtype=torch.int64).float()[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """The gated product, projected back."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(width, eps=1e-6)
        self.self_attn = Attention(width, heads)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=1e-6)
        self.mlp = MLP(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        """One block of the residual stream."""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """Tokens (batch, time) int64 -> logits (batch, time, vocabulary)."""

    def __init__(self, vocabulary: int, context: int, layers: int, width: int, heads: int) -> None:
        """`context` is unused; it is GPT's argument: rotary positions need no table."""
        super().__init__()
        inner = -(-8 * width // 24) * 8  # two thirds of 4 * width: as many weights as an MLP of two matrices
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        begin(self, layers, ("o_proj.weight", "down_proj.weight"))

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the next token at each position."""
        x = self.embed_tokens(tokens)
        for block in self.layers:
            x = block(x)
        return self.lm_head(self.norm(x))  # type: ignore[no-any-return]
