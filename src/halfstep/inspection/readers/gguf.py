"""GGUF, the files of llama.cpp: pairs of keys and values, a table of tensors, then their bytes, aligned.

Source: ggml, docs/gguf.md, versions 2 and 3.
"""

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.bits.values import TYPES
from halfstep.errors import CheckpointError
from halfstep.inspection.files import (
    TEXT,
    Checkpoint,
    File,
    Plain,
    Reader,
    Source,
    StoredTensor,
    check_count,
    head,
    split,
)
from halfstep.inspection.gguf_blocks import BLOCKS, BlockType


MAGIC = b"GGUF"

PLAIN = {
    0: "float32", 1: "float16", 24: "int8", 25: "int16", 26: "int32", 27: "int64", 28: "float64", 30: "bfloat16",
}  # fmt: skip
"""The types without blocks, by their number in the file."""

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_DIMENSIONS = 4  # GGML_MAX_DIMS
_KEPT = 1 << 16  # most bytes of a string; a chat template has some ten thousand
_KEPT_ALL = 16 << 20
_DECODED = 1 << 20  # bytes of float32 that are decoded at once, so that the intermediate arrays stay in the cache


@dataclass(frozen=True, slots=True)
class Blocks:
    """`count` blocks from byte `start`, decoded as they are read."""

    file: File
    start: int
    count: int
    kind: BlockType

    def pieces(self, nbytes: int) -> Iterator[np.ndarray]:
        """The values in float32.

        Raises:
            CheckpointError: there is no decoder for the type.
        """
        if self.kind.decode is None:
            known = ", ".join(kind.name for kind in BLOCKS.values() if kind.decode)
            raise CheckpointError(f"{self.file.path}: {self.kind.name} is not decoded here; known: {known}")
        packed = Plain(self.file, self.start, self.count, np.dtype((np.void, self.kind.nbytes)))
        for piece in packed.pieces(_DECODED // (4 * self.kind.values) * self.kind.nbytes):
            with np.errstate(all="ignore"):  # infinite scales give infinite values and NaN, as in the file
                values = self.kind.decode(piece.view(np.uint8).reshape(-1, self.kind.nbytes))
            yield from split(values.reshape(-1), nbytes)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A line of the table of tensors; the file stores the innermost dimension of the shape first, here it is last."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class _Cursor:
    """Reads the header forward, in windows."""

    def __init__(self, file: File, descriptor: int) -> None:
        self.file, self.descriptor = file, descriptor
        self.at = self.base = 0
        self.window = b""

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > TEXT or end > self.file.size:
            raise CheckpointError(
                f"{self.file.path}: the header reaches to byte {end}; expected at most {min(TEXT, self.file.size)}; "
                "the file is truncated or broken"
            )
        if end > self.base + len(self.window):
            self.window = self.file.read_from(
                self.descriptor, self.at, max(count, min(1 << 20, self.file.size - self.at))
            )
            self.base = self.at
        piece = self.window[self.at - self.base : end - self.base]
        self.at = end
        return piece

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self, limit: int) -> str:
        length = self.number("<Q")
        if length > limit:
            raise CheckpointError(f"{self.file.path}: a name of {length} bytes in the header; expected at most {limit}")
        raw = self.take(length)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.file.path}: a name in the header is not UTF-8: {raw[:40]!r}") from error

    def skip(self, count: int) -> None:
        """Pass over bytes without reading them."""
        if count > 1 << 20:
            self.at += count - 1
            count = 1
        self.take(count)

    def skip_texts(self, count: int) -> None:
        """Pass over strings; a vocabulary has hundreds of thousands."""
        while count:
            at, window = self.at - self.base, self.window
            while count and at + 8 <= len(window):
                at += 8 + int.from_bytes(window[at : at + 8], "little")
                count -= 1
            self.at = self.base + at
            if count:  # the next length is not in the window, or not in the file
                self.skip(self.number("<Q"))
                count -= 1
        self.take(0)


def open_gguf(path: Path) -> Checkpoint:
    """The tensors of a GGUF file; arrays in its metadata are replaced by their length.

    Raises:
        CheckpointError: the header is broken, or tensors are not within the file.
    """
    file = File.of(path)
    with file.opened() as descriptor:
        cursor = _Cursor(file, descriptor)
        if cursor.take(4) != MAGIC:
            raise CheckpointError(f"{path} does not begin with GGUF")
        version = cursor.number("<I")
        if version not in (2, 3):
            order = "; it is in big-endian order" if version & 0xFFFF == 0 else ""
            raise CheckpointError(f"{path}: GGUF version {version}{order}; expected 2 or 3: convert the model again")
        count, pairs = cursor.number("<Q"), cursor.number("<Q")
        check_count(max(count, pairs), path)
        metadata = _metadata(cursor, pairs)
        entries = [_entry(cursor) for _ in range(count)]
    alignment = _alignment(metadata, path)
    start = -(-cursor.at // alignment) * alignment
    tensors = tuple(_tensor(file, start, entry) for entry in entries)
    _check_places(file, alignment, entries, tensors)
    return Checkpoint(path, reader.name, (path,), tensors, metadata)


def _metadata(cursor: _Cursor, count: int) -> dict[str, str]:
    found: dict[str, str] = {}
    kept = 0
    for _ in range(count):
        key = cursor.text(_KEPT)
        if key in found:
            raise CheckpointError(f"{cursor.file.path}: the key {key!r} is there twice")
        found[key] = _value(cursor, cursor.number("<I"))
        kept += len(key) + len(found[key])
        if kept > _KEPT_ALL:
            raise CheckpointError(f"{cursor.file.path}: metadata of more than {_KEPT_ALL >> 20} MiB of text")
    return found


def _value(cursor: _Cursor, kind: int) -> str:
    if kind in _SCALARS:
        return str(cursor.number(_SCALARS[kind]))
    if kind == _STRING:
        return cursor.text(_KEPT)
    if kind != _ARRAY:
        raise CheckpointError(f"{cursor.file.path}: a value of type {kind} in the header; expected 0 to 12")
    inner, count = cursor.number("<I"), cursor.number("<Q")
    if inner in _SCALARS:
        cursor.skip(count * struct.calcsize(_SCALARS[inner]))
    elif inner == _STRING:
        cursor.skip_texts(count)
    else:
        raise CheckpointError(
            f"{cursor.file.path}: an array of type {inner} in the header; expected scalars or strings"
        )
    return f"[{count} values]"


def _alignment(metadata: dict[str, str], path: Path) -> int:
    found = metadata.get("general.alignment", "32")
    if not re.fullmatch("[0-9]{1,6}", found) or int(found).bit_count() != 1:
        raise CheckpointError(f"{path}: an alignment of {found[:80]!r}; expected a power of two")
    return int(found)


def _entry(cursor: _Cursor) -> _Entry:
    name, dimensions = cursor.text(_KEPT), cursor.number("<I")
    if dimensions > _DIMENSIONS:
        raise CheckpointError(
            f"{cursor.file.path}: tensor {name!r} has {dimensions} dimensions; expected at most {_DIMENSIONS}"
        )
    shape = tuple(cursor.number("<Q") for _ in range(dimensions))
    return _Entry(name, shape[::-1], cursor.number("<I"), cursor.number("<Q"))


def _tensor(file: File, start: int, entry: _Entry) -> StoredTensor:
    what, count = f"{file.path}: tensor {entry.name!r}", math.prod(entry.shape)
    source: Source
    if plain := TYPES.get(PLAIN.get(entry.kind, "")):
        name, nbytes = plain.name, plain.nbytes(entry.shape)
        source = Plain(file, start + entry.offset, count, plain.piece)
    elif block := BLOCKS.get(entry.kind):
        if not entry.shape or entry.shape[-1] % block.values:
            raise CheckpointError(
                f"{what}: shape {entry.shape} in {block.name}, whose blocks have {block.values} values"
            )
        name, nbytes = block.name, count // block.values * block.nbytes
        source = Blocks(file, start + entry.offset, count // block.values, block)
    else:
        raise CheckpointError(f"{what} is of type {entry.kind}, which is not known here; it is newer, or broken")
    file.within(start + entry.offset, nbytes, f"tensor {entry.name!r}")
    return StoredTensor(entry.name, name, entry.shape, file.path, nbytes, f"{file.path}:{start + entry.offset}", source)


def _check_places(file: File, alignment: int, entries: list[_Entry], tensors: tuple[StoredTensor, ...]) -> None:
    end = 0
    for entry, tensor in sorted(zip(entries, tensors, strict=True), key=lambda pair: (pair[0].offset, pair[1].nbytes)):
        if entry.offset % alignment or entry.offset < end:
            raise CheckpointError(
                f"{file.path}: tensor {entry.name!r} begins at byte {entry.offset}; expected a multiple of {alignment} "
                f"behind the tensor before it, which ends at {end}"
            )
        end = entry.offset + tensor.nbytes


reader = Reader("GGUF", lambda path: head(path, 4) == MAGIC, open_gguf)
