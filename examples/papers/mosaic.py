"""The lab's BERT with MosaicBERT's changes, each optional (Portes et al. 2023, arXiv 2312.17482, and its code)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.lab.tasks.mlm import BERT
from halfstep.nn import DotProductAttention


WORDS, CONTEXT = 1003, 64
"""The vocabulary before it is padded to a multiple of 64, and the longest sequence."""
PAD, MASK, CLS, OTHER = range(4)
"""The special tokens: padding, mask, class token, and unknown word."""
CHANGES = ("ALiBi", "GLU", "unpadding", "bf16 norms", "30% masked", "vocabulary")


def rows(keep: Tensor) -> Tensor:
    """The indices where a mask is true, and of other places, so that their number is a multiple of 64.

    A CPU's matmul is compiled for each new shape, which takes longer than the padding.
    """
    return keep.logical_not().argsort(stable=True)[: -(-int(keep.sum()) // 64) * 64]


@dataclass
class Layout:
    """A batch's words, attention's bias, and whether padding is left out (`packed`)."""

    real: Tensor
    bias: Tensor
    packed: bool

    def __post_init__(self) -> None:
        self.rows = rows(self.real.flatten())

    def pack(self, x: Tensor) -> Tensor:
        """(batch, time, ...) -> (1, words, ...)."""
        return x.flatten(0, 1).index_select(0, self.rows)[None]

    def pad(self, x: Tensor) -> Tensor:
        """(1, heads, words, d) -> (batch, heads, time, d)."""
        x = x[0].transpose(0, 1)
        padded = x.new_zeros(self.real.numel(), *x.shape[1:]).index_copy(0, self.rows, x)
        return padded.unflatten(0, self.real.shape).transpose(1, 2)


class Mixing(nn.Module):
    """Attention within a layout."""

    layout: Layout

    def __init__(self) -> None:
        super().__init__()
        self.inner = DotProductAttention()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v (batch, heads, time, d), or (1, heads, words, d) where words are packed -> the same shape."""
        at = self.layout
        if not at.packed:
            return self.inner(q, k, v, at.bias.to(q.dtype))
        mixed = self.inner(at.pad(q), at.pad(k), at.pad(v), at.bias.to(q.dtype))
        return at.pack(mixed.transpose(1, 2)).transpose(1, 2)


class Gated(nn.Module):
    """gelu(a) * b, where a and b are the halves of dense(x)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 2 * inner, bias=False)
        nn.init.normal_(self.dense.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., width) -> (..., inner)."""
        a, b = self.dense(x).chunk(2, dim=-1)
        return F.gelu(a) * b


class NarrowNorm(nn.LayerNorm):
    """A layer norm whose input, parameters and output are bf16 under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., width) -> the same shape."""
        if not torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            x, weight, bias = (t.bfloat16() for t in (x, self.weight, self.bias))
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class NoPositions(nn.Module):
    """Zero instead of position embeddings."""

    def forward(self, positions: Tensor) -> float:
        return 0.0


def slopes(heads: int) -> Tensor:
    """ALiBi's slopes for a number of heads that is a power of two: 2^(-8h/heads) for h = 1 ... heads."""
    return 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, dtype=torch.float32))


class Mosaic(BERT):
    """The lab's BERT with some of the changes; sequences may be padded."""

    def __init__(self, changes: Collection[str], layers: int = 2, width: int = 128, heads: int = 4) -> None:
        vocabulary = -(-WORDS // 64) * 64 if "vocabulary" in changes else WORDS
        super().__init__(vocabulary, CONTEXT, layers, width, heads, tied=True)
        self.packed, self.heads = "unpadding" in changes, heads
        self.alibi = "ALiBi" in changes
        if self.alibi:
            self.embeddings.position_embeddings = NoPositions()
        for block in self.encoder.layer:
            block.attention.self.mix = Mixing()
            if "GLU" in changes:
                block.intermediate = Gated(width, 4 * width)
        if "bf16 norms" in changes:
            for module in list(self.modules()):
                if "LayerNorm" in module._modules:
                    module.LayerNorm = NarrowNorm(width, eps=1e-12)

    def bias(self, real: Tensor) -> Tensor:
        """The bias of attention's logits: -10000 for padding, and ALiBi's -slope * distance."""
        bias = torch.where(real, 0.0, -1e4)[:, None, None]
        if not self.alibi:
            return bias
        places = torch.arange(real.shape[1], dtype=torch.float32)
        return bias - slopes(self.heads)[:, None, None] * (places[:, None] - places).abs()

    def features(self, tokens: Tensor, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The last block's output (places, width), and their indices in the batch: all places or, if words are packed,
        the words; of these, the chosen ones pass through what follows the last attention."""
        real, x = tokens != PAD, self.embeddings(tokens)
        at = Layout(real, self.bias(real), self.packed)
        places = at.rows if self.packed else torch.arange(real.numel())
        x = at.pack(x) if self.packed else x
        for block in self.encoder.layer:
            block.attention.self.mix.layout = at
        for block in self.encoder.layer[:-1]:
            x = block(x)
        last = self.encoder.layer[-1]
        branch = last.attention.self(x)
        if self.packed and chosen is not None:
            kept = rows(chosen.flatten().index_select(0, places))
            branch, x, places = branch.index_select(1, kept), x.index_select(1, kept), places[kept]
        x = last.attention.output(branch, x)
        return last.output(last.intermediate(x), x).flatten(0, 1), places

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of the targets (batch, time), which are -100 where there is none."""
        x, places = self.features(tokens, targets >= 0)
        return F.cross_entropy(self.cls["predictions"](x), targets.flatten()[places])
