"""A small GPT: pre-norm blocks, causal attention, learned positions; and a version with unit-scaled layers."""

from typing import Any

import torch
from torch import Tensor, nn

from halfstep import unit
from halfstep.errors import ModelError, one_of
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
        """Attend to this and earlier positions."""
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = self.mix(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, time, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = (
            mlp
            if mlp is not None
            else nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        )

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
        begin(self, layers, ("attention.proj.weight", "mlp.2.weight"))

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the next token at each position."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.int64))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def begin(model: nn.Module, layers: int, ends: tuple[str, ...] = ()) -> None:
    """Initialise matrices from N(0, 0.02) and biases with zero; layers named by `ends` end residual branches and are
    smaller, as in GPT-2."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if name.endswith(ends) else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


class UnitGPT(nn.Module):
    """Tokens (batch, time) int64 -> logits (batch, time, vocabulary), like `GPT`, with weights of unit variance.

    The gradient that arrives at the logits is scaled to unit size, as `unit.cross_entropy` would, so that any mean
    cross-entropy may follow: the scaling undoes its 1 / positions and the size of the softmax of logits near zero.

    Args:
        parametrization: `umup`: norms at the start of each branch, u-muP's residual scheme; `munit`: norms at its end,
            a fixed tau, stock logits of attention and one factor in both directions.
    """

    def __init__(
        self, vocabulary: int, context: int, layers: int, width: int, heads: int, parametrization: str = "umup"
    ) -> None:
        super().__init__()
        # 0.4 is what the paper has for its models of 4 layers; tau falls with depth.
        mult = (width // heads) ** 0.5
        families: dict[str, dict[str, Any]] = {
            "umup": {"residual": unit.equal_shares()},
            "munit": {"residual": unit.fixed(0.4), "place": "res-post", "constraint": unit.SAME, "mult": mult},
        }
        options = families[one_of("parametrization of a UnitGPT", parametrization, families, ModelError)]
        readout = unit.SAME if parametrization == "munit" else "none"
        self.parametrization = parametrization
        self.token = unit.Embedding(vocabulary, width)
        self.position = unit.Embedding(context, width)
        self.blocks = unit.TransformerStack(layers, width, heads, norm="layer", mlp="gelu", is_causal=True, **options)
        self.norm = unit.LayerNorm(width)
        self.head = unit.LinearReadout(width, vocabulary, constraint=readout)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the next token at each position."""
        places = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.int64).expand_as(tokens)
        logits: Tensor = self.head(self.norm(self.blocks(unit.add(self.token(tokens), self.position(places)))))
        classes = logits.shape[-1]
        return unit.scale_backward(logits, tokens.numel() * classes / (classes - 1) ** 0.5)
