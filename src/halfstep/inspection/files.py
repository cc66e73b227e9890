"""Checkpoints, and read-only access to their files: regular files, in bounded reads and short-lived maps; limits.

Values are read through a memory map, because that is half as fast again as `pread` into a reused buffer (8.7 GB/s of
one core against 6, bit-or-ed from the page cache; 10 from memory). Its price is that the process dies of SIGBUS if the
file is truncated while it is mapped. So a map covers a few pieces only, and the file's size and time of change are
compared before each map: a file that was written to since it was opened is an error, except in the two milliseconds
that a map is in use.

The limits bound what a checkpoint may make its reader allocate: far above what real ones need, far below what a machine
has. Together they keep the memory of opening and reading below 300 MB, whatever a file claims.
"""

import json
import math
import mmap
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Protocol

import numpy as np

from halfstep.errors import CheckpointError


TENSORS = 200_000
"""The most tensors in one checkpoint; a mixture of 60 layers with 384 experts each, with separate scales, has 140
thousand."""

TEXT = 64 << 20
"""The most bytes of a JSON header or index; the largest real ones have some 20 million."""

PARSED = 160 << 20
"""The most bytes of the objects made of a header, by the parsers' own upper estimates."""

DIMENSIONS = 64
"""The most dimensions of a tensor, as in torch and numpy."""

REPEATS, SMALL = 64, 1 << 30
"""Tensors may together claim 64 times the bytes of their files (strides of 0, compression) plus one GiB."""


def check_count(count: int, what: object) -> None:
    """Check a number of tensors before they are created.

    Raises:
        CheckpointError: it is above the limit.
    """
    if count > TENSORS:
        raise CheckpointError(f"{what}: {count} tensors; expected at most {TENSORS}")


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `data`.

    Raises:
        CheckpointError: it is not a JSON object, is nested too deeply, too large, or has a key twice.
    """
    # An upper estimate: CPython's sizes of a dict, a list and a small value, and of the text itself.
    # one wide character makes the whole string wide
    needed = (
        data.count(b"{") * 240
        + data.count(b"[") * 96
        + data.count(b",") * 64
        + 2 * (1 if data.isascii() else 4) * len(data)
    )
    if needed > PARSED:
        raise CheckpointError(
            f"{what} would take {needed >> 20} MiB of memory; expected at most {PARSED >> 20}: no checkpoint needs more"
        )
    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except (UnicodeDecodeError, ValueError) as error:
        raise CheckpointError(f"{what} is not JSON: {error}; the file is broken, or is another kind of file") from error
    except RecursionError as error:
        raise CheckpointError(f"{what} nests too deeply; expected an object of flat objects") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{what} is a JSON {type(found).__name__}; expected an object")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return found


_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


@dataclass(frozen=True, slots=True)
class File:
    """A regular file, with its size and time of change when it was opened."""

    path: Path
    size: int
    stamp: tuple[int, int, int]

    @classmethod
    def of(cls, path: Path) -> "File":
        """The file at `path`.

        Raises:
            CheckpointError: it does not exist, cannot be read, or is not a regular file.
        """
        with _descriptor(path) as (_, status):
            return cls(path, status.st_size, _stamp(status))

    @contextmanager
    def opened(self) -> Iterator[int]:
        """A descriptor of the file, as a context.

        Raises:
            CheckpointError: it was changed since `of`.
        """
        with _descriptor(self.path) as (descriptor, status):
            self._same(status)
            yield descriptor

    def read(self, start: int, count: int) -> bytes:
        """`count` bytes from `start`.

        Raises:
            CheckpointError: the file ends before.
        """
        with self.opened() as descriptor:
            return self.read_from(descriptor, start, count)

    def read_from(self, descriptor: int, start: int, count: int) -> bytes:
        """`count` bytes from `start`, through an open descriptor."""
        self.within(start, count, "data")
        try:
            data = os.pread(descriptor, count, start)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read at byte {start}: {error}") from error
        if len(data) != count:
            raise CheckpointError(
                f"{self.path}: read {len(data)} bytes of {count} at byte {start}; copy the file again"
            )
        return data

    def within(self, start: int, count: int, what: str) -> None:
        """Check that bytes `start` to `start + count` are within the file.

        Raises:
            CheckpointError: they are not.
        """
        if start < 0 or count < 0 or start + count > self.size:
            raise CheckpointError(
                f"{self.path}: {what} should lie at bytes {start} to {start + count}, and the file has {self.size}; "
                "it is truncated or was edited: copy it again"
            )

    def view(self, descriptor: int, start: int, count: int, dtype: np.dtype) -> np.ndarray:
        """A read-only array of `count` values from byte `start`; the map is closed with the array."""
        self._same(os.fstat(descriptor))
        low = start - start % mmap.ALLOCATIONGRANULARITY
        nbytes = start - low + count * dtype.itemsize
        try:
            held = mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_READ, offset=low)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path}: cannot be mapped at byte {start}: {error}") from error
        return np.frombuffer(held, dtype, count, start - low)

    def _same(self, status: os.stat_result) -> None:
        if _stamp(status) != self.stamp:
            raise CheckpointError(f"{self.path}: the file was changed while it was being read; open it again")


def head(path: Path, count: int) -> bytes:
    """The first `count` bytes of the file at `path`: fewer if it is shorter, none if it is not a regular file."""
    if not path.is_file():
        return b""
    file = File.of(path)
    return file.read(0, min(count, file.size))


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ino


@contextmanager
def _descriptor(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    try:
        # Without blocking: opening a pipe would wait for a writer.
        descriptor = os.open(path, _FLAGS)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{str(path)!r} cannot be opened: {why}; expected a checkpoint's file") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{str(path)!r} is not a regular file; expected a checkpoint's file")
        yield descriptor, status
    finally:
        os.close(descriptor)


def inside(folder: Path, name: str, what: str) -> Path:
    """The path of the file called `name` in `folder`.

    A link may leave the folder in one case: the cache of Hugging Face keeps models--a--b/snapshots/<revision> full of
    links to models--a--b/blobs, and nothing else in that cache can be reached.

    Raises:
        CheckpointError: the name is absolute or goes up, or the file is a link to somewhere else.
    """
    parts = {*PurePosixPath(name).parts, *PureWindowsPath(name).parts}
    if not name or ".." in parts or PurePosixPath(name).is_absolute() or PureWindowsPath(name).anchor:
        raise CheckpointError(f"{what} names the file {name[:200]!r}; expected one in its own folder")
    path = folder / name
    try:
        home, target = folder.resolve(), path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{what} names the file {name[:200]!r}, which is not there: {error}") from error
    stores = [parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots"]
    if not any(target.is_relative_to(allowed) for allowed in (home, *stores)):
        raise CheckpointError(
            f"{what}: {name[:200]!r} is a link to {str(target)!r}, out of the folder; expected a file, or a link into "
            "the blobs of the Hugging Face cache that the folder belongs to"
        )
    return path


PIECE = 1 << 22
"""The default size of pieces of values, in bytes."""


class Source(Protocol):
    """Where the values of one tensor are, and how they are read."""

    def pieces(self, nbytes: int) -> Iterator[np.ndarray]:
        """The values in order as 1-D arrays of at most `nbytes` each."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint, as described by its headers.

    `dtype` is torch's name without "torch.", or GGUF's for its quantized types ("q4_0"); "float4_e2m1fn",
    "float6_e2m3fn" and "float6_e3m2fn" are packed types, whose pieces are their bytes. `nbytes` is the size as stored.
    Two tensors of equal `storage` are two names of the same values (tied weights). `name` is as in the file, control
    characters included: escape it before printing.
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
        """The values in row-major order, in pieces as described by `bits.values.Values`.

        Where the file stores values plainly a piece is a view of a map of the file: keep a copy, not the view.

        Raises:
            CheckpointError: the file was changed since it was opened, or its data are broken.
        """
        return self.source.pieces(nbytes)


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: the contents of its headers. Values are read by a tensor's `chunks`.

    `kind` is the reader's name. `config` is the config.json of a Hugging Face folder, None elsewhere.
    """

    path: Path
    kind: str
    files: tuple[Path, ...]
    tensors: tuple[StoredTensor, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, object] | None = None
    remarks: tuple[str, ...] = ()
    """Parts of the files that were not read, in words."""


@dataclass(frozen=True)
class Reader:
    """A kind of checkpoint: `recognises` examines a path's first bytes or files; `open` reads its headers."""

    name: str
    recognises: Callable[[Path], bool]
    open: Callable[[Path], Checkpoint]


_MAPPED = 16 << 20  # bytes of one map: smaller ones cost more than the pages in them
_READ = 64 << 10  # bytes from which on a map costs less than reading them
_GAP = 16 << 10  # bytes between two tensors that cost less than a second read
_GATHERED = 32 << 20  # bytes gathered at once: each gather may touch all pages of the tensor

Index = tuple[tuple[int, int], ...]
"""For each dimension the first index and the one after the last."""


@dataclass(frozen=True, slots=True)
class Plain:
    """`count` contiguous values in `file`, from byte `start`."""

    file: File
    start: int
    count: int
    dtype: np.dtype

    def pieces(self, nbytes: int) -> Iterator[np.ndarray]:
        """The values in order."""
        size = self.count * self.dtype.itemsize
        if 0 < size <= min(nbytes, _READ):
            yield native(np.frombuffer(self.file.read(self.start, size), self.dtype))
            return
        each = max(nbytes // self.dtype.itemsize, 1)
        step = each * max(_MAPPED // (each * self.dtype.itemsize), 1)  # so that no piece ends with a map
        with self.file.opened() as descriptor:
            for first in range(0, self.count, step):
                start, count = self.start + first * self.dtype.itemsize, min(step, self.count - first)
                yield from split(native(self.file.view(descriptor, start, count, self.dtype)), nbytes)


def read_together(sources: Mapping[str, Plain]) -> dict[str, np.ndarray]:
    """The values of each source, in memory: neighbours in a file are read together, so all must be small."""
    runs: list[list[tuple[str, Plain]]] = []
    for name, one in sorted(sources.items(), key=lambda item: (item[1].file.path, item[1].start)):
        last = runs[-1][-1][1] if runs else one
        if not runs or last.file is not one.file or one.start - last.start - last.count * last.dtype.itemsize > _GAP:
            runs.append([])
        runs[-1].append((name, one))
    found: dict[str, np.ndarray] = {}
    for run in runs:
        low, stop = run[0][1].start, max(one.start + one.count * one.dtype.itemsize for _, one in run)
        data = run[0][1].file.read(low, stop - low)
        found |= {name: native(np.frombuffer(data, one.dtype, one.count, one.start - low)) for name, one in run}
    return found


@dataclass(frozen=True, slots=True)
class Strided:
    """A tensor whose value at index i is at byte start + sum(i * stride), with strides in bytes."""

    file: File
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype

    def pieces(self, nbytes: int) -> Iterator[np.ndarray]:
        """The values in row-major order."""
        with self.file.opened() as descriptor:
            for index in slabs(self.shape, self.dtype.itemsize):
                yield from split(self.block(descriptor, index).reshape(-1), nbytes)

    def block(self, descriptor: int, index: Index) -> np.ndarray:
        """The values of a block of the tensor, which must not be empty."""
        shape = tuple(stop - first for first, stop in index)
        low = sum(first * stride for (first, _), stride in zip(index, self.strides, strict=True))
        span = sum((size - 1) * stride for size, stride in zip(shape, self.strides, strict=True))
        held = self.file.view(descriptor, self.start + low, span + self.dtype.itemsize, np.dtype("u1"))
        return native(np.ndarray(shape, self.dtype, held.data, 0, self.strides))


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in values, of a contiguous tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether these strides, in values, are the contiguous ones; those of dimensions of size 1 do not matter."""
    axes = zip(shape, strides, row_major(shape), strict=True)
    return all(size == 1 or stride == wanted for size, stride, wanted in axes)


def slabs(shape: tuple[int, ...], itemsize: int) -> Iterator[Index]:
    """Consecutive blocks of `shape` in row-major order, each of bounded size."""
    if 0 in shape:
        return
    if not shape:
        yield ()
        return
    limit = _GATHERED // itemsize
    axis = next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) <= limit)
    rows = max(limit // math.prod(shape[axis + 1 :]), 1)
    whole = tuple((0, size) for size in shape[axis + 1 :])
    for lead in range(math.prod(shape[:axis])):
        outer = tuple((int(i), int(i) + 1) for i in np.unravel_index(lead, shape[:axis])) if axis else ()
        for first in range(0, shape[axis], rows):
            yield (*outer, (first, min(first + rows, shape[axis])), *whole)


def split(values: np.ndarray, nbytes: int) -> Iterator[np.ndarray]:
    """A 1-D array in pieces of at most `nbytes`."""
    step = max(nbytes // values.itemsize, 1)
    return (values[first : first + step] for first in range(0, len(values), step))


def native(values: np.ndarray) -> np.ndarray:
    """The values in this machine's byte order; the same array if they have it already."""
    return values.astype(values.dtype.newbyteorder("="), copy=False)


class Part(Protocol):
    """A part of a tensor whose own header is read only when its values are."""

    def located(self) -> Strided:
        """Where its values are."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The part of a tensor of these `sizes` from `offsets` on, stored by itself."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    part: Part


@dataclass(frozen=True, slots=True)
class Mosaic:
    """A tensor stored in parts that together cover it once."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    parts: tuple[Placed, ...]

    def pieces(self, nbytes: int) -> Iterator[np.ndarray]:
        """The values in row-major order."""
        located = [(placed, placed.part.located()) for placed in self.parts]
        if len(located) == 1 and self.parts[0].sizes == self.shape:
            yield from located[0][1].pieces(nbytes)
            return
        for slab in slabs(self.shape, self.dtype.itemsize):
            yield from split(self._filled(slab, located).reshape(-1), nbytes)

    def _filled(self, slab: Index, located: list[tuple[Placed, Strided]]) -> np.ndarray:
        values = np.empty([stop - first for first, stop in slab], self.dtype)
        missing = np.ones(values.shape, bool)
        for placed, strided in located:
            common = [
                (max(first, offset), min(stop, offset + size))
                for (first, stop), offset, size in zip(slab, placed.offsets, placed.sizes, strict=True)
            ]
            if any(first >= stop for first, stop in common):
                continue
            here = tuple(slice(f - first, s - first) for (f, s), (first, _) in zip(common, slab, strict=True))
            there = tuple((f - offset, s - offset) for (f, s), offset in zip(common, placed.offsets, strict=True))
            with strided.file.opened() as descriptor:
                values[here] = strided.block(descriptor, there)
            if not missing[here].all():
                raise CheckpointError(f"tensor {self.name!r}: two of its parts overlap; the checkpoint is broken")
            missing[here] = False
        if missing.any():
            raise CheckpointError(f"tensor {self.name!r}: its parts do not cover it; the checkpoint is broken")
        return values
