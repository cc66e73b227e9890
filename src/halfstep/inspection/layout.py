"""Where the values of a tensor lie in its file: one after the other, in strides, or in blocks of several files."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from halfstep.errors import CheckpointError
from halfstep.inspection.files import File


_MAPPED = 16 << 20  # bytes of one map: smaller ones cost more than the pages in them
_READ = 64 << 10  # bytes from which on a map costs less than reading them
_GAP = 16 << 10  # bytes between two tensors that cost less than a second read
_GATHERED = 32 << 20  # bytes that are gathered at once: each gathering may touch the pages of the whole tensor

Index = tuple[tuple[int, int], ...]
"""Of each dimension the first index and the one after the last."""


@dataclass(frozen=True, slots=True)
class Plain:
    """`count` values that lie in `file` one after the other, from byte `start`."""

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
    """The values of each, in memory: those near one another in a file by one read, so they must be small together."""
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
    """A tensor whose value at index i lies at byte start + sum(i * stride), strides counted in bytes."""

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
    wanted = row_major(shape)
    return all(size == 1 or stride == want for size, stride, want in zip(shape, strides, wanted, strict=True))


def slabs(shape: tuple[int, ...], itemsize: int) -> Iterator[Index]:
    """Blocks of `shape` that follow one another in row-major order, each of a bounded size in memory."""
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
    """The values in this machine's byte order; the same array where they are already."""
    return values.astype(values.dtype.newbyteorder("="), copy=False)


class Part(Protocol):
    """A part of a tensor whose own header is read only when its values are."""

    def located(self) -> Strided:
        """Where its values lie."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The `sizes` of a tensor from `offsets`, stored by themselves."""

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
