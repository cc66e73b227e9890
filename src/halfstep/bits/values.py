"""The values of one tensor, wherever they lie, in a file or in memory; and the types in which they are stored."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class StoredType:
    """A type: `bits` of one value in the file, and the numpy type of the pieces."""

    name: str
    bits: int
    piece: np.dtype

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """The bytes that a tensor of this shape takes; packed types are filled up to whole bytes."""
        return -(-math.prod(shape) * self.bits // 8)


def _types(code: str, bits: int, *names: str) -> dict[str, StoredType]:
    return {name: StoredType(name, bits, np.dtype(code)) for name in names}


FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
"""The types of 8 bits that torch has."""

TYPES = {
    **_types("<u8", 64, "float64"),
    **_types("<u4", 32, "float32"),
    **_types("<u2", 16, "float16", "bfloat16"),
    **_types("u1", 8, *FLOAT8, "float4_e2m1fn_x2", "bool", "uint8"),
    **_types("u1", 6, "float6_e2m3fn", "float6_e3m2fn"),
    **_types("u1", 4, "float4_e2m1fn"),
    **_types("i1", 8, "int8"),
    **_types("<i2", 16, "int16"),
    **_types("<i4", 32, "int32"),
    **_types("<i8", 64, "int64"),
    **_types("<u2", 16, "uint16"),
    **_types("<u4", 32, "uint32"),
    **_types("<u8", 64, "uint64"),
    **_types("<c8", 64, "complex64"),
    **_types("<c16", 128, "complex128"),
}
"""Every type by torch's name."""


class Values(Protocol):
    """A tensor whose values can be read again and again, in pieces of bounded size."""

    @property
    def dtype(self) -> str:
        """torch's name without "torch."; values of a type of another name (GGUF's blocks) come decoded to float32."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its dimensions."""

    @property
    def numel(self) -> int:
        """The number of values."""

    @property
    def nbytes(self) -> int:
        """Their bytes as stored."""

    def chunks(self, nbytes: int) -> Iterator[NDArray[Any]]:
        """The values in row-major order, as 1-D read-only arrays of at most `nbytes` each.

        Floating types come as their bits (bfloat16 and float16 in uint16, float32 in uint32, float64 in uint64, all of
        8 bits in uint8), bool as uint8, integers and complex numbers as they are. What may go wrong is the source's to
        say: a file may be broken, or may have been changed meanwhile.
        """


class Shaped:
    """A tensor of a known shape."""

    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of values."""
        return math.prod(self.shape)


class Decoded(Shaped):
    """One whose values come in float32, in which it is not stored."""

    dtype = "float32"

    @property
    def nbytes(self) -> int:
        """The bytes of the values."""
        return 4 * self.numel


@dataclass(frozen=True, slots=True)
class InMemory:
    """A plain tensor of one of `dtypes.TYPES`, on any device, as `Values`."""

    tensor: Tensor

    @property
    def dtype(self) -> str:
        """torch's name without "torch."."""
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its dimensions."""
        return tuple(self.tensor.shape)

    @property
    def numel(self) -> int:
        """The number of values."""
        return self.tensor.numel()

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        return self.tensor.nbytes

    def chunks(self, nbytes: int) -> Iterator[NDArray[Any]]:
        """The values in row-major order; copied only where they do not lie so in this machine's memory."""
        for run in runs(self.tensor, max(nbytes // self.tensor.element_size(), 1)):
            dense = run if run.stride(0) == 1 else run.clone(memory_format=torch.contiguous_format)
            bits = dense.cpu().view(torch.uint8).numpy().view(TYPES[self.dtype].piece)
            bits.flags.writeable = False  # as a file's are: kernels are compiled for those
            yield bits


def runs(tensor: Tensor, count: int) -> Iterator[Tensor]:
    """The values in row-major order, flat, at most `count` at a time; copied only where they do not lie so."""
    if tensor.is_contiguous():
        flat = tensor.reshape(-1)
        yield from (flat[first : first + count] for first in range(0, flat.numel(), count))
        return
    row = math.prod(tensor.shape[1:])
    if row > count:
        for one in tensor:
            yield from runs(one, count)
    else:
        rows = count // row
        yield from (tensor[first : first + rows].reshape(-1) for first in range(0, len(tensor), rows))


def even(tensor: Values, count: int) -> Iterator[NDArray[Any]]:
    """The values in runs of `count` each, the last one shorter, wherever the source's own pieces end.

    Runs are copied only where a piece of the source ends within them, as where a map of a file does.
    """
    held: list[NDArray[Any]] = []
    size, itemsize = 0, TYPES[tensor.dtype].piece.itemsize if tensor.dtype in TYPES else 4
    for chunk in tensor.chunks(count * itemsize):
        held.append(chunk)
        size += chunk.size
        if size >= count:
            joined = _joined(held)
            yield joined[:count]
            held, size = ([joined[count:]], size - count) if size > count else ([], 0)
    if held:
        yield _joined(held)


def _joined(held: list[NDArray[Any]]) -> NDArray[Any]:
    if len(held) == 1:
        return held[0]
    joined = np.concatenate(held)
    joined.flags.writeable = False  # as a file's pieces are: kernels are compiled for those
    return joined
