"""What is trained: batches, a loss, a metric, and how to check that the data is sound."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.errors import DataError, ModelError
from halfstep.lab.data import Corpus, part
from halfstep.lab.experiment import Experiment, Facts, Metric
from halfstep.quant import derive_seed


__all__ = [
    "END", "PAD", "START", "Batch", "ByHeart", "Facts", "Metric", "Spelling", "Task", "TaskSpec", "TextTask",
    "check_finite", "drawn", "greedy", "logits_of", "part", "stream", "without_marks",
]  # fmt: skip

Batch = dict[str, Tensor]
PAD, START, END = 0, 1, 2
"""What stands around and behind the numbers of a text that a model spells."""


class Task(ABC):
    """Data, loss and metric. Batches depend on (seed, step) alone: a resumed run sees what it would have seen."""

    @abstractmethod
    def models(self) -> Mapping[str, Callable[[], nn.Module]]:
        """The models for this task that come with halfstep, by name, as functions that make them."""

    @abstractmethod
    def batch(self, seed: int, step: int) -> Batch:
        """The training batch of a step, from 1."""

    @abstractmethod
    def held_out(self) -> list[Batch]:
        """The batches that the validation loss is the mean over. They are the same for every seed."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of a batch, 0-d float32."""

    def metric(self, model: nn.Module, losses: Sequence[float]) -> float | None:
        """The field's metric over the held-out batches, whose losses are given; the model is in eval mode."""
        return None

    def logits(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """The logits (..., classes) and right classes (...) that the loss of a model's output is a cross-entropy of.

        None where it is another loss.
        """
        return None

    def by_heart(self) -> nn.Module | None:
        """A model that knows the answers of the held-out part: the conformance tests expect `Metric.best` of it. None
        where the metric is not one of answers."""
        return None

    def count(self, batch: Batch) -> int:
        """How much a batch holds, in the unit of `Facts.unit`: its examples."""
        return len(next(iter(batch.values())))

    def digest(self) -> str:
        """sha256 of the data, so that a resumed run is sure to see the same."""
        digest = hashlib.sha256()
        for batch in [*self.held_out(), self.batch(0, 1)]:
            for name, tensor in batch.items():
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


class TextTask(Task):
    """A task on windows of a text: `batch` examples of `context` bytes."""

    beyond = 0
    """Bytes of a window beyond its context."""

    def __init__(self, corpus: Corpus, batch: int, context: int, validation_batches: int = 8) -> None:
        self.corpus = corpus
        self.size = batch
        self.context = context
        self.validation_batches = validation_batches

    @abstractmethod
    def cut(self, window: Tensor, generator: torch.Generator) -> Batch:
        """The batch of windows (examples, context + beyond) int64, whose noise the generator draws."""

    def batch(self, seed: int, step: int) -> Batch:
        """Windows at uniform random places of the training part."""
        generator, length = stream(seed, step), self.context + self.beyond
        starts = drawn(len(self.corpus.train) - length + 1, self.size, generator)
        return self.cut(self.corpus.windows("train", starts, length), generator)

    def held_out(self) -> list[Batch]:
        """Windows spread evenly over the held-out part."""
        generator, length = stream(-1, 0), self.context + self.beyond
        count = self.validation_batches * self.size
        starts = torch.arange(count, dtype=torch.int64, device="cpu") * (len(self.corpus.held_out) - length) // count
        pieces = starts.view(-1, self.size)
        return [self.cut(self.corpus.windows("held_out", piece, length), generator) for piece in pieces]

    def count(self, batch: Batch) -> int:
        """Tokens."""
        return batch["tokens"].numel()

    def digest(self) -> str:
        """The corpus's."""
        return self.corpus.digest


class ByHeart(nn.Module):
    """Says rows (texts, time) int64 that it knows, whatever it is to say them of: logits of so many classes."""

    def __init__(self, rows: Tensor, classes: int) -> None:
        super().__init__()
        self.rows, self.classes = rows, classes

    def forward(self, of: Tensor, text: Tensor) -> Tensor:
        """What follows each number of the text so far."""
        return F.one_hot(self.rows[:, 1 : text.shape[1] + 1], self.classes).float()


class Spelling(Task):
    """Read a text off something else: the mean cross-entropy in nats over what is there of it.

    A model takes the one and the text so far (batch, time) int64, and returns logits (batch, time, classes).
    """

    source: str
    """What a batch calls that which is read."""
    text: str
    """What it calls the text: START, numbers, END, and PAD behind it."""
    classes: int

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy, padding left out."""
        text = batch[self.text]
        logits = model(batch[self.source], text[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), ignore_index=PAD)

    def spelled(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """What a model makes of the held-out part, greedily, and what is right, both (rows, time)."""
        (batch,) = self.held_out()
        text = batch[self.text]
        return greedy(partial(model, batch[self.source]), text[:, :1], text.shape[1] - 1), text

    def by_heart(self) -> nn.Module:
        """Spells the held-out texts as they are."""
        return ByHeart(self.held_out()[0][self.text], self.classes)


@dataclass(frozen=True)
class TaskSpec:
    """A task by name: what `halfstep compare --task NAME` opens."""

    name: str
    summary: str
    facts: Facts
    open: Callable[[Experiment], Task]
    """Read or make the data of an experiment."""
    options: Collection[str] = ()
    """The fields of an experiment, among those that not every task has, that this one reads."""


def logits_of(output: Any, tokens: Tensor, count: int, each: str) -> Tensor:
    """What a model returned for tokens (batch, time), bare or as `.logits`: (batch, time, count), `each` in words.

    Raises:
        ModelError: it is no tensor of that shape.
    """
    logits, expected = getattr(output, "logits", output), (*tokens.shape, count)
    if not isinstance(logits, Tensor) or logits.shape != expected:
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(output).__name__
        raise ModelError(f"the model returned {found}; expected logits of shape {expected}, {each}")
    return logits


def stream(seed: int, step: int) -> torch.Generator:
    """A random generator for the batch of a step, of its own."""
    return torch.Generator().manual_seed(derive_seed(seed, step) >> 1)


def drawn(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Places (size,) int64 among so many, drawn at random."""
    return torch.randint(count, (size,), generator=generator, dtype=torch.int64, device="cpu")


def greedy(model: Callable[[Tensor], Tensor], text: Tensor, count: int) -> Tensor:
    """Texts (rows, time) int64 with `count` numbers more: each time those of the largest logits at the last place."""
    for _ in range(count):
        text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
    return text


def without_marks(row: Tensor) -> list[int]:
    """The numbers between START and END."""
    numbers: list[int] = row.tolist()[1:]
    return numbers[: numbers.index(END)] if END in numbers else numbers


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
