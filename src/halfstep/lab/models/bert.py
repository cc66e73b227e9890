"""A small BERT: blocks that normalise after each addition, attention both ways, learned positions, GELU.

Modules are named as Hugging Face names them, so that state dicts differ by the prefix `bert.` only. (Its copy of the
decoder's bias, `cls.predictions.bias`, is left out.)
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from halfstep.nn import DotProductAttention


_EPS = 1e-12


class Embeddings(nn.Module):
    """norm(word + position + type); there is one type of token."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocabulary, width)
        self.position_embeddings = nn.Embedding(context, width)
        self.token_type_embeddings = nn.Embedding(1, width)
        self.LayerNorm = nn.LayerNorm(width, eps=_EPS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, time) -> (batch, time, width)."""
        positions = self.position_embeddings(torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.int64))
        types = self.token_type_embeddings(torch.zeros_like(tokens))
        return self.LayerNorm(self.word_embeddings(tokens) + positions + types)  # type: ignore[no-any-return]


class SelfAttention(nn.Module):
    """Multi-head attention of every place to every place, without the projection behind it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mix = DotProductAttention()

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, time, width) -> the same shape."""
        batch, time, width = x.shape
        q, k, v = (
            project(x).view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        return self.mix(q, k, v).transpose(1, 2).reshape(batch, time, width)  # type: ignore[no-any-return]


class Output(nn.Module):
    """The end of a branch: norm(x + dense(branch))."""

    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inner, width)
        self.LayerNorm = nn.LayerNorm(width, eps=_EPS)

    def forward(self, branch: Tensor, x: Tensor) -> Tensor:
        """Add the branch to the residual stream x, and normalise."""
        return self.LayerNorm(x + self.dense(branch))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """norm(x + dense(attention(x)))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.self = SelfAttention(width, heads)
        self.output = Output(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The first half of a block."""
        return self.output(self.self(x), x)  # type: ignore[no-any-return]


def _activated(width: int, inner: int, **after: nn.Module) -> nn.Sequential:
    """gelu(dense(x)), and what comes after it: x (..., width) -> (..., inner)."""
    return nn.Sequential(OrderedDict(dense=nn.Linear(width, inner), activation=nn.GELU(), **after))


class Block(nn.Module):
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.intermediate = _activated(width, 4 * width)
        self.output = Output(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """One block of the residual stream."""
        x = self.attention(x)
        return self.output(self.intermediate(x), x)  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """The blocks, one after the other."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Block(width, heads) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """All blocks of the residual stream."""
        for block in self.layer:
            x = block(x)
        return x


class BERT(nn.Module):
    """Tokens (batch, time) int64 -> logits (batch, time, vocabulary).

    Args:
        tied: whether the decoder's weight is the word embedding, as it is in BERT's own checkpoints.
    """

    def __init__(
        self, vocabulary: int, context: int, layers: int, width: int, heads: int, *, tied: bool = False
    ) -> None:
        super().__init__()
        self.embeddings = Embeddings(vocabulary, context, width)
        self.encoder = Encoder(layers, width, heads)
        transform = _activated(width, width, LayerNorm=nn.LayerNorm(width, eps=_EPS))
        decoder = nn.Linear(width, vocabulary)
        predictions = nn.Sequential(OrderedDict(transform=transform, decoder=decoder))
        self.cls = nn.ModuleDict({"predictions": predictions})
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        if tied:
            decoder.weight = self.embeddings.word_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the token at each place, which sees all places."""
        return self.cls["predictions"](self.encoder(self.embeddings(tokens)))  # type: ignore[no-any-return]
