"""Stored tensors seen another way: in another order, the first rows alone, or codes of a byte times their scales."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep.bits.pair import as_numbers
from halfstep.bits.pieces import even
from halfstep.bits.values import TYPES, Decoded, Shaped, Values
from halfstep.inspection.schemes import Shape


HELD = 1 << 30
"""Bytes of a tensor that is read whole to be put in another order."""


@dataclass(frozen=True)
class Held(Shaped):
    """A tensor put in another order: the whole of it is in memory."""

    held: NDArray[Any]
    dtype: str
    shape: Shape

    @classmethod
    def turned(cls, matrix: Values) -> Held:
        """The transposed matrix."""
        rows, columns = matrix.shape
        return cls(_whole(matrix).reshape(rows, columns).T, matrix.dtype, (columns, rows))

    @classmethod
    def ordered(cls, tensor: Values, rows: NDArray[np.intp], columns: NDArray[np.intp]) -> Held:
        """A tensor with the slices of its first two dimensions in the order that their indices have here."""
        values = _whole(tensor).reshape(rows.size, columns.size, -1)[rows]
        return cls(values[:, columns], tensor.dtype, tensor.shape)

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        return self.held.nbytes

    def chunks(self, nbytes: int) -> Iterator[NDArray[Any]]:
        """The values in row-major order, copied."""
        each = max(nbytes // self.held.itemsize, 1)
        rows = max(each * len(self.held) // max(self.numel, 1), 1)
        for first in range(0, len(self.held), rows):
            flat = np.ascontiguousarray(self.held[first : first + rows]).ravel()
            flat.flags.writeable = False  # as a file's pieces are: kernels are compiled for those
            yield from (flat[i : i + each] for i in range(0, flat.size, each))


def _whole(tensor: Values) -> NDArray[Any]:
    return np.concatenate([piece.copy() for piece in tensor.chunks(1 << 24)])


@dataclass(frozen=True)
class First(Shaped):
    """The first values of a tensor, as many as a `shape` has."""

    whole: Values
    shape: Shape

    @property
    def dtype(self) -> str:
        """That of the whole."""
        return self.whole.dtype

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        return self.whole.nbytes * self.numel // self.whole.numel

    def chunks(self, nbytes: int) -> Iterator[NDArray[Any]]:
        """The values in row-major order."""
        left = self.numel
        for piece in self.whole.chunks(nbytes):
            if left:
                yield piece[:left]
            left -= min(left, piece.size)
            if not left:
                return


@dataclass(frozen=True)
class Scaled(Decoded):
    """Codes of a byte each times their scales, in float32: `tile` rows and columns share one, 0 for all of them."""

    codes: Values
    scales: Values
    tile: tuple[int, int]
    divisor: float = 1.0
    """By which scales are divided first: bitsandbytes keeps the largest magnitude of a row."""

    @property
    def shape(self) -> Shape:  # type: ignore[override]
        """That of the codes."""
        return self.codes.shape

    def chunks(self, nbytes: int) -> Iterator[NDArray[Any]]:
        """The values in row-major order."""
        columns = self.shape[-1]
        high = self.tile[0] or self.shape[-2] if len(self.shape) > 1 else 1
        wide, across = self.tile[1] or columns, -(-columns // (self.tile[1] or columns))
        scales = np.concatenate([_scales(piece, self.scales.dtype) for piece in self.scales.chunks(1 << 20)])
        scales = (scales / np.float32(self.divisor)).reshape(-1, across)
        each = max(nbytes // 4, 1)
        rows = max(each // columns, 1)
        for i, piece in enumerate(even(self.codes, rows * columns)):
            values = as_numbers(piece, self.codes.dtype).astype(np.float32).reshape(-1, columns)
            down = (i * rows + np.arange(len(values))) // high if len(scales) > 1 else np.zeros(len(values), np.int64)
            found = (values * np.repeat(scales[down], wide, axis=1)[:, :columns]).ravel().view(TYPES["float32"].piece)
            yield from (found[at : at + each] for at in range(0, found.size, each))


def _scales(piece: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Scales in float32; bytes are E8M0's exponents."""
    return as_numbers(piece, "float8_e8m0fnu" if dtype == "uint8" else dtype).astype(np.float32)
