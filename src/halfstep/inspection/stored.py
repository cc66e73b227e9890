"""What a checkpoint holds: its tensors by name, and their values in pieces of bounded size."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np


PIECE = 1 << 22
"""Bytes of the pieces in which values are handed out unless asked otherwise."""


class Source(Protocol):
    """Where the values of one tensor lie, and how they are read."""

    def pieces(self, nbytes: int) -> Iterator[np.ndarray]:
        """The values in order as 1-D arrays of at most `nbytes` each."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint, as the headers describe it.

    `dtype` is torch's name without "torch.", or GGUF's for its quantised types ("q4_0"); "float4_e2m1fn",
    "float6_e2m3fn" and "float6_e3m2fn" are packed types, whose pieces are their bytes. `nbytes` is the size as stored.
    Two tensors of equal `storage` are two names of the same values (tied weights).
    `name` is as the file has it, control characters included: escape it before printing.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    nbytes: int
    storage: str
    source: Source = field(repr=False, compare=False)

    @property
    def numel(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    def chunks(self, nbytes: int = PIECE) -> Iterator[np.ndarray]:
        """The values in row-major order, in pieces as `bits.values.Values` describes them.

        Where the file holds values plainly a piece is a view of a map of the file: keep a copy, not the view.

        Raises:
            CheckpointError: the file was changed since it was opened, or its data are broken.
        """
        return self.source.pieces(nbytes)


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: what its headers say. Values are read by a tensor's `chunks`, when asked for.

    `kind` is the reader's name. `config` is the config.json of a Hugging Face folder, None elsewhere.
    """

    path: Path
    kind: str
    files: tuple[Path, ...]
    tensors: tuple[StoredTensor, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, object] | None = None
    remarks: tuple[str, ...] = ()
    """What of the files was not read, in words."""


@dataclass(frozen=True)
class Reader:
    """A kind of checkpoint: `recognises` looks at a path's first bytes or files; `open` reads its headers."""

    name: str
    recognises: Callable[[Path], bool]
    open: Callable[[Path], Checkpoint]
