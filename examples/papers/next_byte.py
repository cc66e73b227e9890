"""What the byte-level language models of this folder share: batches, the loss of the next byte, and held-out text."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.lab.data import Corpus


def batch(corpus: Corpus, rows: int, context: int, generator: torch.Generator) -> Tensor:
    """Windows of the training text, drawn at random: (rows, context + 1) int64."""
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
    """That loss as a number, without gradients."""
    with torch.no_grad():
        return float(loss(model, rows))
