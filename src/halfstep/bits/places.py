"""Some places of a tensor, spread over it, copied as its pieces pass: where values may share scales, and a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from halfstep.bits.values import Values


SAMPLE = 1 << 14
"""Values of a wide tensor among which distinct ones are counted: runs of RUN, spread over it."""

RUN = 256

BAND = 128
"""Rows of a band of a matrix, in which scales of blocks are looked for."""

_LINES = (8, 64)  # the fewest and the most rows that are looked at in all their length
_LINED = 1 << 16  # values in these rows, where there are more than the fewest
_BANDS = 4
_WIDE = 4 * BAND  # columns of a band
_LONGEST = 1 << 16  # columns of a matrix whose rows are looked at


@dataclass(frozen=True)
class Places:
    """Bits of some of a matrix's rows, spread over all of it, where values may share scales."""

    lines: NDArray[Any]
    """Rows in full length, the first and the last among them."""
    bands: tuple[NDArray[Any], ...]
    """128 rows each, 512 columns of them; fewer where the matrix ends."""
    values: NDArray[np.float64] | None
    """The values of all codes; None where the bits are those of float32."""

    @property
    def first(self) -> Places:
        """Those at the beginning."""
        return Places(self.lines[:1], self.bands[:1], self.values)

    def magnitudes(self, bits: NDArray[Any]) -> NDArray[np.float64]:
        """Those of some of the bits which are finite and above zero."""
        values = as_doubles(bits.view(np.float32)) if self.values is None else self.values[bits]
        found: NDArray[np.float64] = np.abs(values)
        return found[(found > 0) & (found < np.inf)]


class Runs:
    """Some runs of a tensor's values, of `length` each from `starts` on (ascending), copied as its pieces pass."""

    def __init__(self, starts: Sequence[int], length: int, dtype: np.dtype[Any]) -> None:
        self.rows = np.empty((len(starts), length), dtype)
        self._starts, self._at = np.array(starts), 0

    def add(self, bits: NDArray[Any]) -> None:
        """Take in the next elements."""
        low, high, length = self._at, self._at + bits.size, self.rows.shape[1]
        if low == 0 and length == high and len(self.rows) == 1:  # all of a small tensor at once
            self.rows[0], self._at = bits, high
            return
        first, whole, left = np.searchsorted(self._starts, [low, high - length + 1, high]).tolist()
        if first < whole:
            size = bits.itemsize
            every = as_strided(bits, (bits.size - length + 1, length), (size, size), writeable=False)
            self.rows[first:whole] = every[self._starts[first:whole] - low]
        before = int(np.searchsorted(self._starts, low - length, side="right"))
        for i in (*range(before, first), *range(max(first, whole), left)):  # runs that begin or end in other pieces
            start = int(self._starts[i])
            a, b = max(start, low), min(start + length, high)
            self.rows[i, a - start : b - start] = bits[a - low : b - low]
        self._at = high


def sample(tensor: Values, dtype: np.dtype[Any]) -> Runs:
    """Copies SAMPLE values of a tensor, or all of them: runs of RUN."""
    if tensor.numel <= SAMPLE:
        return Runs([0], tensor.numel, dtype)
    return Runs(_spread(tensor.numel // RUN, SAMPLE // RUN, RUN), RUN, dtype)


def _spread(count: int, most: int, each: int = 1) -> list[int]:
    """Of `count` places at most so many, evenly spread, the first and the last among them; each times `each`."""
    if count <= most:
        return [place * each for place in range(count)]
    return [place * (count - 1) // (most - 1) * each for place in range(most)]


class Spread:
    """The rows and bands of `Places`, copied as a matrix's pieces pass; none where it is no matrix."""

    def __init__(self, tensor: Values, dtype: np.dtype[Any]) -> None:
        columns = tensor.shape[-1] if len(tensor.shape) > 1 else 0
        self._runs: list[Runs] = []
        self._small = 0  # columns of a matrix that is copied whole, once
        if not 0 < columns <= _LONGEST or not tensor.numel:
            return
        fewest, most = _LINES
        most = min(max(_LINED // columns, fewest), most)
        if len(tensor.shape) == 2 and tensor.shape[0] <= min(most, BAND) and columns <= _WIDE:
            self._runs, self._small = [Runs([0], tensor.numel, dtype)], columns
            return
        self._runs.append(Runs(_spread(tensor.numel // columns, most, columns), columns, dtype))
        high = tensor.shape[-2]  # of one matrix of several
        blocks = -(-high // BAND)
        for i, block in enumerate(_spread(tensor.numel // columns // high * blocks, _BANDS)):
            top, width = block % blocks * BAND, min(columns, _WIDE)
            left = min(i * _WIDE, (columns - width) // BAND * BAND)
            first = (block // blocks * high + top) * columns + left
            rows = range(first, first + min(BAND, high - top) * columns, columns)
            self._runs.append(Runs(rows, width, dtype))

    def add(self, bits: NDArray[Any]) -> None:
        """Take in the next elements."""
        for run in self._runs:
            run.add(bits)

    def found(self, values: NDArray[np.float64] | None = None) -> Places | None:
        """What was copied."""
        if not self._runs:
            return None
        if self._small:
            whole = self._runs[0].rows.reshape(-1, self._small)
            return Places(whole, (whole,), values)
        lines, *bands = (run.rows for run in self._runs)
        return Places(lines, tuple(bands), values)


def as_doubles(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """float32 values as float64."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return values.astype(np.float64)
