"""Utilities of the byte-level language models in this folder: batches, next-byte loss, held-out text, generation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.lab.task import Corpus


def batch(corpus: Corpus, rows: int, context: int, generator: torch.Generator) -> Tensor:
    """Windows of the training text at random positions: (rows, context + 1) int64."""
    starts = torch.randint(len(corpus.train) - context - 1, (rows,), generator=generator)
    return corpus.windows("train", starts, context + 1)


def windows(corpus: Corpus, rows: int, context: int) -> Tensor:
    """Windows spread evenly over the held-out text: (rows, context + 1) int64."""
    starts = torch.linspace(0, len(corpus.held_out) - context - 1, rows).long()
    return corpus.windows("held-out", starts, context + 1)


def loss(model: nn.Module, rows: Tensor) -> Tensor:
    """The mean cross-entropy of each window's next bytes, in nats."""
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def held_out(model: nn.Module, rows: Tensor) -> float:
    """The same loss as a number, without gradients."""
    with torch.no_grad():
        return float(loss(model, rows))


@torch.no_grad()
def generated(model: Any, ids: Tensor, new: int, temperature: float, top: int, draw: torch.Generator) -> Tensor:
    """The prompts followed by sampled bytes."""
    past, step = None, ids
    for _ in range(new):
        out = model(step, past_key_values=past, use_cache=True)
        past, last = out.past_key_values, out.logits[:, -1].float()
        if top:
            last = last.masked_fill(last < last.topk(top).values[:, -1:], -torch.inf)
        step = torch.multinomial((last / temperature).softmax(-1), 1, generator=draw)
        ids = torch.cat([ids, step], 1)
    return ids


def repeated(rows: Tensor, length: int = 6) -> float:
    """The share of sequences of `length` bytes that occurred before in their text."""
    grams = [row.unfold(0, length, 1).tolist() for row in rows]
    return 1 - sum(len(set(map(tuple, row))) for row in grams) / sum(map(len, grams))
