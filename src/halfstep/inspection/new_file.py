"""A new safetensors file, written piece by piece, which appears whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from numpy.typing import NDArray

from halfstep.bits.values import TYPES
from halfstep.errors import CheckpointError
from halfstep.inspection.readers.safetensors import DTYPES


CODES = {name: code for code, name in DTYPES.items()}
"""What safetensors calls torch's types."""


@dataclass(frozen=True)
class Part:
    """One tensor of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return TYPES[self.dtype].nbytes(self.shape)


class NewFile:
    """The file while it is written: each part is filled by its own appends, in any order among the parts."""

    def __init__(self, file: BinaryIO, parts: Sequence[Part], metadata: Mapping[str, str]) -> None:
        entries: dict[str, Any] = {"__metadata__": dict(metadata)}
        place = 0
        self._next: dict[str, int] = {}
        for part in parts:
            span = [place, place + part.nbytes]
            entries[part.name] = {"dtype": CODES[part.dtype], "shape": list(part.shape), "data_offsets": span}
            self._next[part.name] = place
            place += part.nbytes
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        self._file, self._start = file, 8 + len(header)
        file.write(len(header).to_bytes(8, "little") + header)
        self.nbytes = self._start + place

    def append(self, name: str, values: NDArray[Any]) -> None:
        """Write the next values of a part."""
        self._file.seek(self._start + self._next[name])
        self._file.write(values.reshape(-1).view("u1").data)
        self._next[name] += values.nbytes


@contextmanager
def new_file(path: Path, parts: Sequence[Part], metadata: Mapping[str, str]) -> Iterator[NewFile]:
    """Write a file that is at `path` when the block ends, and nowhere if it fails or is interrupted.

    Raises:
        CheckpointError: there is a file of that name, before or afterwards; or it cannot be written.
    """
    refuse_existing(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("xb") as file:
            new = NewFile(file, parts, metadata)
            yield new
            file.flush()
            os.fsync(file.fileno())
            assert file.seek(0, os.SEEK_END) == new.nbytes
        os.link(partial, path)  # unlike a rename this replaces nothing
    except FileExistsError as error:
        refuse_existing(path)
        raise CheckpointError(f"{str(partial)!r} is in the way; remove it") from error
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


def refuse_existing(path: Path) -> None:
    """Raise a CheckpointError if there is something at `path`, or its folder cannot be written to."""
    if path.exists() or path.is_symlink():
        raise CheckpointError(f"{str(path)!r} exists; name a file that does not, or remove it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"{str(path)!r} cannot be written: its folder {str(path.parent)!r} is not there, or read-only; name a file "
            "in a folder that can be written to"
        )
