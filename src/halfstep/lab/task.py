"""What is trained: batches, a loss, and how to check that the data is sound."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.errors import DataError, ModelError
from halfstep.lab.data import VOCABULARY, Corpus
from halfstep.quant import derive_seed


Batch = dict[str, Tensor]


class Task(Protocol):
    """Batches that depend on (seed, step) alone, so that a resumed run sees what it would have seen."""

    def batch(self, seed: int, step: int) -> Batch:
        """The training batch of a step."""

    def held_out(self) -> list[Batch]:
        """The batches that the validation loss is the mean over."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of a batch, 0-d float32."""


class LanguageModelling:
    """Predict the next byte: the mean cross-entropy in nats over (batch, context) positions."""

    def __init__(self, corpus: Corpus, batch: int, context: int, validation_batches: int = 8) -> None:
        self.corpus = corpus
        self.size = batch
        self.context = context
        self.validation_batches = validation_batches

    def batch(self, seed: int, step: int) -> Batch:
        """Windows at uniform random places of the training part."""
        generator = torch.Generator().manual_seed(derive_seed(seed, step) >> 1)
        limit = len(self.corpus.train) - self.context
        starts = torch.randint(0, limit, (self.size,), generator=generator)
        return self._batch("train", starts)

    def held_out(self) -> list[Batch]:
        """Windows spread evenly over the held-out part."""
        limit = len(self.corpus.held_out) - self.context - 1
        count = self.validation_batches * self.size
        starts = torch.arange(count) * limit // count
        return [self._batch("held_out", piece) for piece in starts.view(-1, self.size)]

    def _batch(self, split: str, starts: Tensor) -> Batch:
        window = self.corpus.windows(split, starts, self.context + 1)
        return {"tokens": window[:, :-1], "targets": window[:, 1:]}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy of the model's logits (batch, context, 256), bare or as the output's `logits`."""
        output: Any = model(batch["tokens"])
        logits = getattr(output, "logits", output)
        expected = (*batch["tokens"].shape, VOCABULARY)
        if not isinstance(logits, Tensor) or logits.shape != expected:
            found = tuple(logits.shape) if isinstance(logits, Tensor) else type(output).__name__
            raise ModelError(f"the model returned {found}; expected logits of shape {expected}, one a byte value")
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), batch["targets"].reshape(-1))


def check_finite(batch: Batch, step: int) -> None:
    """Refuse a batch with an infinity or NaN: a model trained on it would be blamed for what the data did.

    Raises:
        DataError: naming the tensor, the step and the first bad place.
    """
    for name, tensor in batch.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            place = torch.nonzero(~torch.isfinite(tensor))[0].tolist()
            raise DataError(
                f"step {step}: the batch's {name!r} holds {float(tensor[tuple(place)])} at {place}; clean the data"
            )
