"""The base of tasks: data, batches, a loss, a metric, and checks that the data is sound.

It also loads data: byte-level text with its held-out part, and real handwritten digits.
"""

import glob
import gzip
import hashlib
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.errors import DataError, ModelError
from halfstep.lab.experiment import Experiment, Facts, Metric
from halfstep.quant import derive_seed


# ---- byte-level text -------------------------------------------------------------------------------------------------

VOCABULARY = 256
_HELD_OUT = 20  # every twentieth document is held out; of a single one, its last twentieth
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}


@dataclass(frozen=True)
class Corpus:
    """Training bytes and held-out bytes, each (length,) uint8."""

    train: Tensor
    held_out: Tensor
    digest: str
    """sha256 of both, so that a resumed run can check that its data is the same."""

    def windows(self, split: str, starts: Tensor, length: int) -> Tensor:
        """The windows of `length` bytes that begin at `starts`, as (len(starts), length) int64."""
        source = self.train if split == "train" else self.held_out
        return source[starts[:, None] + torch.arange(length, dtype=torch.int64, device="cpu")].long()


def load_corpus(path: str | None, context: int) -> Corpus:
    """The corpus at `path`: a text file, a folder of text files, or a glob; None is the standard library.

    Raises:
        DataError: there is no such file, or it is empty, binary, unreadable, or too short for `context` + 1 bytes.
    """
    where = path or "the standard library"
    train, held_out = _split(_standard_library() if path is None else _documents(path))
    for split, data in (("training", train), ("held-out", held_out)):
        if len(data) < 2 * (context + 1):
            raise DataError(
                f"{where}: its {split} part has {len(data)} bytes, and a context of {context} needs at least "
                f"{2 * (context + 1)}; give more text, or a smaller --context"
            )
    first, second = (torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in (train, held_out))
    return Corpus(first, second, hashlib.sha256(train + b"\0" + held_out).hexdigest())


def _split(documents: list[bytes]) -> tuple[bytes, bytes]:
    """Training and held-out bytes: whole documents are held out if there are enough of them."""
    if len(documents) < _HELD_OUT:
        whole = b"\n".join(documents)
        cut = len(whole) - len(whole) // _HELD_OUT
        return whole[:cut], whole[cut:]
    held = documents[_HELD_OUT - 1 :: _HELD_OUT]
    rest = [document for i, document in enumerate(documents) if i % _HELD_OUT != _HELD_OUT - 1]
    return b"\n".join(rest), b"\n".join(held)


def _standard_library() -> list[bytes]:
    """The documentation topics and the modules of the running Python, in the order of their paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = (p for p in root.rglob("*.py") if not _SKIPPED & set(p.relative_to(root).parts))
    return _read(sorted(paths, key=lambda p: p.relative_to(root).as_posix()), str(root))


def _documents(path: str) -> list[bytes]:
    given = Path(path).expanduser()
    if given.is_dir():
        found = sorted(p for p in given.rglob("*") if p.is_file() and not p.name.startswith("."))
        if not found:
            raise DataError(f"{path}: the folder holds no files; expected text files")
    elif given.is_file():
        found = [given]
    else:
        found = sorted(Path(p) for p in glob.glob(str(given), recursive=True) if Path(p).is_file())
        if not found:
            raise DataError(f"{path}: no such file or folder, and no file matches it as a pattern")
    return _read(found, path)


def _read(paths: Iterable[Path], where: str) -> list[bytes]:
    documents = []
    for path in paths:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read ({error.strerror}); fix its permissions or leave it out"
            ) from error
        if b"\0" in data:
            raise DataError(f"{path} is binary (it holds a zero byte at {data.index(0)}); expected text")
        if data.strip():
            documents.append(data)
    if not documents:
        raise DataError(f"{where}: every file is empty; expected text")
    return documents


# ---- handwritten digits ----------------------------------------------------------------------------------------------


def part(batch: dict[str, Tensor], which: Tensor | slice) -> dict[str, Tensor]:
    """Some of a batch's examples."""
    return {name: tensor[which] for name, tensor in batch.items()}


@cache
def load_digits() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Training and held-out digits: every fifth is held out. scikit-learn itself is not imported, since that takes
    seconds.

    `images` are (count, 1, 8, 8) float32 in [0, 1], and `classes` (count,) int64.

    Raises:
        DataError: scikit-learn is not installed, or stores the file elsewhere.

    Source: Alpaydin and Kaynak 1998, Optical Recognition of Handwritten Digits (UCI), its test part.
    """
    found = find_spec("sklearn")
    path = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz" if found and found.origin else None
    if path is None or not path.is_file():
        raise DataError("the digits come with scikit-learn, which is not there: pip install 'halfstep[lab]'")
    with gzip.open(path, "rt") as file:
        table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    every = {"images": table[:, :64].reshape(-1, 1, 8, 8) / 16, "classes": table[:, 64].long()}
    fifth = torch.arange(len(table), dtype=torch.int64, device="cpu") % 5 == 4
    return part(every, ~fifth), part(every, fifth)


# ---- tasks -----------------------------------------------------------------------------------------------------------

__all__ = [
    "END", "PAD", "START", "Batch", "ByHeart", "Facts", "Metric", "Spelling", "Task", "TaskSpec", "TextTask",
    "check_finite", "drawn", "greedy", "logits_of", "part", "stream", "without_marks",
]  # fmt: skip

Batch = dict[str, Tensor]
PAD, START, END = 0, 1, 2
"""The token ids of padding, of a text's start and of its end, in tasks that spell a text."""


class Task(ABC):
    """Data, loss and metric. Batches depend only on (seed, step), so a resumed run sees the same ones."""

    @abstractmethod
    def models(self) -> Mapping[str, Callable[[], nn.Module]]:
        """This task's models that come with halfstep, by name, as functions that build them."""

    @abstractmethod
    def batch(self, seed: int, step: int) -> Batch:
        """The training batch of a step, from 1."""

    @abstractmethod
    def held_out(self) -> list[Batch]:
        """The batches that the validation loss is averaged over, the same for every seed."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of a batch, 0-d float32."""

    def metric(self, model: nn.Module, losses: Sequence[float]) -> float | None:
        """The metric over the held-out batches, whose losses are given; the model is in eval mode."""
        return None

    def logits(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """The logits (..., classes) and correct classes (...) whose cross-entropy is the loss of a model's output.

        None if the loss is not a cross-entropy.
        """
        return None

    def by_heart(self) -> nn.Module | None:
        """A model that knows the answers of the held-out part: the conformance tests expect `Metric.best` from it. None
        if the metric has no answers."""
        return None

    def count(self, batch: Batch) -> int:
        """The size of a batch in the unit of `Facts.unit`: its examples."""
        return len(next(iter(batch.values())))

    def digest(self) -> str:
        """sha256 of the data, so that a resumed run can check that its data is the same."""
        digest = hashlib.sha256()
        for batch in [*self.held_out(), self.batch(0, 1)]:
            for name, tensor in batch.items():
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


class TextTask(Task):
    """A task on windows of a text: `batch` examples of `context` bytes."""

    beyond = 0
    """Bytes of a window after its context."""

    def __init__(self, corpus: Corpus, batch: int, context: int, validation_batches: int = 8) -> None:
        self.corpus = corpus
        self.size = batch
        self.context = context
        self.validation_batches = validation_batches

    @abstractmethod
    def cut(self, window: Tensor, generator: torch.Generator) -> Batch:
        """The batch of windows (examples, context + beyond) int64; the generator draws its noise."""

    def batch(self, seed: int, step: int) -> Batch:
        """Windows at uniformly random positions of the training part."""
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
        """The number of tokens."""
        return batch["tokens"].numel()

    def digest(self) -> str:
        """The corpus's digest."""
        return self.corpus.digest


class ByHeart(nn.Module):
    """A model that outputs known rows (texts, time) int64 whatever its input: logits over that many classes."""

    def __init__(self, rows: Tensor, classes: int) -> None:
        super().__init__()
        self.rows, self.classes = rows, classes

    def forward(self, of: Tensor, text: Tensor) -> Tensor:
        """The logits of what follows each position of the text so far."""
        return F.one_hot(self.rows[:, 1 : text.shape[1] + 1], self.classes).float()


class Spelling(Task):
    """Read a text from something else: the mean cross-entropy in nats over the text without padding.

    A model takes the source and the text so far (batch, time) int64, and returns logits (batch, time, classes).
    """

    source: str
    """The batch's key of the source."""
    text: str
    """The batch's key of the text: START, token ids, END, then PAD."""
    classes: int

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy without padding."""
        text = batch[self.text]
        logits = model(batch[self.source], text[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), ignore_index=PAD)

    def spelled(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """The model's greedy texts for the held-out part, and the correct ones, both (rows, time)."""
        (batch,) = self.held_out()
        text = batch[self.text]
        return greedy(partial(model, batch[self.source]), text[:, :1], text.shape[1] - 1), text

    def by_heart(self) -> nn.Module:
        """A model that spells the held-out texts correctly."""
        return ByHeart(self.held_out()[0][self.text], self.classes)


@dataclass(frozen=True)
class TaskSpec:
    """A task by name, which `halfstep compare --task NAME` opens."""

    name: str
    summary: str
    facts: Facts
    open: Callable[[Experiment], Task]
    """A function that loads or generates the data of an experiment."""
    options: Collection[str] = ()
    """The optional fields of an experiment that this task reads."""


# ---- functions that tasks share --------------------------------------------------------------------------------------


def logits_of(output: Any, tokens: Tensor, count: int, each: str) -> Tensor:
    """A model's output for tokens (batch, time), bare or as `.logits`: (batch, time, count); `each` names the last
    dimension.

    Raises:
        ModelError: it is not a tensor of that shape.
    """
    logits, expected = getattr(output, "logits", output), (*tokens.shape, count)
    if not isinstance(logits, Tensor) or logits.shape != expected:
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(output).__name__
        raise ModelError(f"the model returned {found}; expected logits of shape {expected}, {each}")
    return logits


def stream(seed: int, step: int) -> torch.Generator:
    """A separate random generator for the batch of a step."""
    return torch.Generator().manual_seed(derive_seed(seed, step) >> 1)


def drawn(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Random indices (size,) int64 below `count`."""
    return torch.randint(count, (size,), generator=generator, dtype=torch.int64, device="cpu")


def greedy(model: Callable[[Tensor], Tensor], text: Tensor, count: int) -> Tensor:
    """Texts (rows, time) int64 extended by `count` tokens, each with the largest logit at the last position."""
    for _ in range(count):
        text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
    return text


def without_marks(row: Tensor) -> list[int]:
    """The token ids between START and END."""
    numbers: list[int] = row.tolist()[1:]
    return numbers[: numbers.index(END)] if END in numbers else numbers


def check_finite(batch: Batch, step: int) -> None:
    """Refuse a batch with an infinity or NaN, which would be blamed on the model.

    Raises:
        DataError: naming the tensor, the step and the first bad index.
    """
    for name, tensor in batch.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            place = torch.nonzero(~torch.isfinite(tensor))[0].tolist()
            raise DataError(
                f"step {step}: the batch's {name!r} holds {float(tensor[tuple(place)])} at {place}; clean the data"
            )
