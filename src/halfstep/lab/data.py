"""Data of tasks: byte-level text with its held-out part, and real handwritten digits."""

import glob
import gzip
import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from halfstep.errors import DataError


VOCABULARY = 256
_HELD_OUT = 20  # every twentieth document is held out; of a single one, its last twentieth
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes held out, each (length,) uint8."""

    train: Tensor
    held_out: Tensor
    digest: str
    """sha256 of both, so that a resumed run is sure to see the same data."""

    def windows(self, split: str, starts: Tensor, length: int) -> Tensor:
        """The windows of `length` bytes that begin at `starts`, as (len(starts), length) int64."""
        source = self.train if split == "train" else self.held_out
        return source[starts[:, None] + torch.arange(length, dtype=torch.int64, device="cpu")].long()


def load_corpus(path: str | None, context: int) -> Corpus:
    """The corpus at `path`: a text file, a folder of text files, or a glob; None is the standard library.

    Raises:
        DataError: nothing is there, or it is empty, binary, unreadable, or too short for `context` + 1 bytes.
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
    """Training and held-out bytes: whole documents are held out where there are enough of them."""
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


def part(batch: dict[str, Tensor], which: Tensor | slice) -> dict[str, Tensor]:
    """Some of a batch's examples."""
    return {name: tensor[which] for name, tensor in batch.items()}


@cache
def load_digits() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Training and held-out digits: every fifth is held out. scikit-learn itself is not imported, which takes seconds.

    `images` are (count, 1, 8, 8) float32 in [0, 1], and `classes` (count,) int64.

    Raises:
        DataError: scikit-learn is not installed, or keeps the file elsewhere.

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
