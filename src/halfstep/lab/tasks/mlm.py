"""Masked language modelling: a small BERT fills in masked bytes of a text."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.errors import DataError
from halfstep.lab.models.gpt import begin
from halfstep.lab.task import VOCABULARY, Batch, Corpus, Facts, Metric, TaskSpec, TextTask, load_corpus, logits_of
from halfstep.nn import DotProductAttention


_SIZES = {"bert-tiny": (2, 128, 4), "bert-small": (6, 384, 6)}  # layers, width, heads
_MASK = VOCABULARY
"""The token that stands for a masked byte."""
_TOKENS = VOCABULARY + 1
_SHARE = 0.15
_NO_TARGET = -100


class MaskedLanguageModelling(TextTask):
    """Fill in masked bytes: the mean cross-entropy in nats over the chosen positions.

    15% of the positions of each window are chosen, the same number in each; of those, 80% get the mask token, 10% a
    random byte and 10% keep their byte. A model takes tokens (batch, time) int64 and returns logits (batch, time, 257),
    bare or as `.logits`.

    Source: Devlin et al. 2019, arXiv 1810.04805, section 3.1, on bytes instead of word pieces.
    """

    def __init__(self, corpus: Corpus, batch: int, context: int, validation_batches: int = 8) -> None:
        """Raises DataError: 15% of the context is less than half a position."""
        super().__init__(corpus, batch, context, validation_batches)
        self.chosen = round(_SHARE * context)
        if self.chosen == 0:
            raise DataError(f"context = {context} given; 15% of it is less than one position to mask. Give at least 4")

    def models(self) -> dict[str, Callable[[], nn.Module]]:
        """Two BERTs."""
        return {name: partial(BERT, _TOKENS, self.context, *size) for name, size in _SIZES.items()}

    def cut(self, text: Tensor, generator: torch.Generator) -> Batch:
        """Windows, masked."""
        order = torch.rand(text.shape, generator=generator, dtype=torch.float32, device="cpu").argsort(dim=1)
        chosen = torch.zeros_like(text, dtype=torch.bool).scatter_(1, order[:, : self.chosen], True)
        kind = torch.rand(text.shape, generator=generator, dtype=torch.float32, device="cpu")
        other = torch.randint(0, VOCABULARY, text.shape, generator=generator, dtype=torch.int64, device="cpu")
        shown = torch.where(kind < 0.8, _MASK, torch.where(kind < 0.9, other, text))
        return {
            "tokens": torch.where(chosen, shown, text),
            "targets": torch.where(chosen, text, _NO_TARGET),
        }

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy of the model's logits at the chosen positions."""
        logits, targets = _logits(model, batch["tokens"]).flatten(0, 1), batch["targets"].flatten()
        return F.cross_entropy(logits, targets, ignore_index=_NO_TARGET)

    def metric(self, model: nn.Module, losses: Sequence[float]) -> float:
        """Masked accuracy: the share of the chosen positions whose most probable token is the original byte."""
        right = sum(int((_logits(model, b["tokens"]).argmax(-1) == b["targets"]).sum()) for b in self.held_out())
        return right / (self.validation_batches * self.size * self.chosen)

    def by_heart(self) -> nn.Module:
        """A model that knows the held-out windows."""
        return _Reader(self.held_out())


class _Reader(nn.Module):
    def __init__(self, batches: list[Batch]) -> None:
        super().__init__()
        self.batches = batches

    def forward(self, tokens: Tensor) -> Tensor:
        known = next(batch for batch in self.batches if torch.equal(batch["tokens"], tokens))
        return F.one_hot(known["targets"].clamp(min=0), _TOKENS).float()


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    return logits_of(model(tokens), tokens, _TOKENS, "one a byte value and one for the mask")


mlm = TaskSpec(
    name="mlm",
    summary="a small BERT that fills in masked bytes: text of your own, or the Python standard library",
    facts=Facts(
        metric=Metric("masked accuracy", higher_is_better=True, best=1.0, form="{:.1%}"),
        defaults={"model": "bert-tiny"},
    ),
    open=lambda experiment: MaskedLanguageModelling(
        load_corpus(experiment.data, experiment.context), experiment.batch, experiment.context
    ),
    options=("data", "context"),
)


_EPS = 1e-12


class Embeddings(nn.Module):
    """norm(word + position + type); there is only one type of token."""

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
    """Multi-head attention of every position to every position, without the output projection."""

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
    """gelu(dense(x)), and the modules `after` it: x (..., width) -> (..., inner)."""
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
        tied: whether the decoder's weight is the word embedding, as in BERT's own checkpoints.
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
        begin(self, layers)
        if tied:
            decoder.weight = self.embeddings.word_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the token at each position; attention is bidirectional."""
        return self.cls["predictions"](self.encoder(self.embeddings(tokens)))  # type: ignore[no-any-return]
