"""One pass over a tensor's bits: the table of exponents and significant bits, and what the table cannot say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep import formats
from halfstep.bits.dtypes import TYPES
from halfstep.bits.table import EMPTY, Table, from_kernel, from_values, tells
from halfstep.bits.values import Values
from halfstep.formats import Format
from halfstep.kernels.cpu import bits as kernel


CHUNK = 1 << 24
"""Bytes read at a time; the threads share them."""

SAMPLE = 1 << 14
"""Values of a wide tensor among which distinct ones are counted: its first ones."""

OUTLIER = 6.0
"""A channel is an outlier if its largest magnitude is this many times the median channel's, or more."""

LEVELS = 256
"""Distinct values that a format of 8 bits can have."""

BAND = 128
"""Rows of a matrix among which scales of blocks are looked for: its first ones."""

Progress = Callable[[int], None]
"""Told the bytes that were read."""

_CHANNELS = 32  # fewer columns than this are no channels: a convolution's window, scales beside rows
_LINES = 8  # rows that are looked at in all their length
_WIDE = 4 * BAND  # columns of the band
_LONGEST = 1 << 16  # columns of a matrix whose first rows are kept
_SMALL = 1 << 15  # below this, sorting 16-bit codes is faster than counting them in a table of all codes
_NARROW = (
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)


@dataclass(frozen=True)
class Channels:
    """The largest magnitudes of a matrix's columns (its last dimension): the input channels of a linear layer."""

    count: int
    median: float
    largest: float
    outliers: int
    """Columns whose largest magnitude is at least `OUTLIER` times the median of all columns."""


@dataclass(frozen=True)
class Corner:
    """Bits of a matrix's first rows, where values may share scales."""

    lines: NDArray[Any]
    """The first 8 rows in full length."""
    band: NDArray[Any]
    """The first 128 rows, 512 columns of each."""
    values: NDArray[np.float64] | None
    """The values of all codes; None where the bits are those of float32."""

    def magnitudes(self, bits: NDArray[Any]) -> NDArray[np.float64]:
        """Those of some of the bits which are finite and above zero."""
        values = bits.view(np.float32) if self.values is None else self.values[bits]
        found: NDArray[np.float64] = np.abs(values.astype(np.float64))
        return found[(found > 0) & (found < np.inf)]


@dataclass(frozen=True)
class Scan:
    """What one pass over a tensor found. `table` counts its values; magnitudes are of the finite ones, and exact."""

    table: Table
    amax: float = 0.0
    smallest: float = 0.0
    """The smallest magnitude above zero; 0 where there is none."""
    distinct: int = 0
    """Distinct values among those that tell (`Table.telling`); of a wide type among the first SAMPLE values."""
    magnitudes: int = 0
    """Their distinct magnitudes."""
    levels: NDArray[np.float64] | None = None
    """The distinct magnitudes (of a wide type those of the sample), where there are at most LEVELS / 2."""
    channels: Channels | None = None
    codes: NDArray[np.int64] | None = None
    """Of a type of 8 or 16 bits, how often each of its codes occurs."""
    corner: Corner | None = None
    """Of a matrix of 16 or 32 bits."""


def readable(tensor: Values) -> bool:
    """Whether the tensor's values are floating-point numbers that `scan` can read."""
    return tensor.dtype in (*_NARROW, "float32", "float64") or tensor.dtype not in TYPES


def scan(tensor: Values, progress: Progress | None = None) -> Scan:
    """Read a `readable` tensor once, CHUNK bytes at a time."""
    chunks = _told(tensor.chunks(CHUNK), progress)
    if tensor.dtype in _NARROW:
        return _scan_codes(chunks, tensor)
    return _scan_double(chunks) if tensor.dtype == "float64" else _scan_float32(chunks, tensor)


def _told(chunks: Iterator[NDArray[Any]], progress: Progress | None) -> Iterator[NDArray[Any]]:
    for chunk in chunks:
        yield chunk
        if progress is not None:
            progress(chunk.nbytes)


def _scan_float32(chunks: Iterator[NDArray[Any]], tensor: Values) -> Scan:
    found, ends = np.zeros((kernel.ROWS, kernel.COLUMNS), np.int64), np.full(1, 0xFFFFFFFF, np.uint32)
    columns, sample, corner = _Columns(tensor, np.dtype(np.uint32), 0x7F800000), np.zeros(0, np.float32), None
    for chunk in chunks:
        bits = chunk.view(np.uint32)
        if not sample.size:
            sample = bits[:SAMPLE].view(np.float32).copy()
            corner = _corner(tensor, bits)
        kernel.add_float32(bits, found, ends)
        columns.add(bits)
    table = from_kernel(found)
    smallest = float(ends.view(np.float32)[0]) if table.nonzero else 0.0
    as_floats = columns.largest.view(np.float32).astype(np.float64)
    return _finished(table, as_floats.max(), smallest, np.unique(sample).astype(np.float64), columns, as_floats, corner)


def _scan_codes(chunks: Iterator[NDArray[Any]], tensor: Values) -> Scan:
    values = decoded(tensor.dtype)
    times = np.zeros(values.size, np.int64)
    dtype = np.dtype(np.uint16 if values.size > LEVELS else np.uint8)
    finite = np.flatnonzero(np.isfinite(values[: values.size // 2]))
    columns, corner = _Columns(tensor, dtype, int(finite[-1]) + 1), None
    for chunk in chunks:
        if corner is None and values.size > LEVELS:
            corner = _corner(tensor, chunk, values)
        if tensor.numel < _SMALL:
            codes, counts = np.unique(chunk, return_counts=True)
            times[codes] += counts
        else:
            kernel.add_codes(chunk, times)
        columns.add(chunk)
    used = values[times > 0]
    magnitudes = np.abs(used[np.isfinite(used) & (used != 0)])
    table = from_values(values[times > 0], times[times > 0])
    amax, smallest = magnitudes.max(initial=0.0), magnitudes.min(initial=np.inf)
    found = _finished(table, amax, smallest, used, columns, values[columns.largest], corner)
    return replace(found, codes=times)


def _scan_double(chunks: Iterator[NDArray[Any]]) -> Scan:
    """numpy at its own pace: checkpoints hold few numbers of 64 bits."""
    table, smallest, amax, sample = EMPTY, np.inf, 0.0, np.zeros(0)
    for chunk in chunks:
        values = chunk.view(np.float64)
        if not sample.size:
            sample = np.unique(values[:SAMPLE])
        magnitudes = np.abs(values[np.isfinite(values) & (values != 0)])
        smallest, amax = min(smallest, magnitudes.min(initial=np.inf)), max(amax, magnitudes.max(initial=0.0))
        table = table + from_values(values)
    return _finished(table, amax, smallest, sample)


@cache
def decoded(dtype: str) -> NDArray[np.float64]:
    """The value of every code of a type of 8 or 16 bits."""
    codes = np.arange(1 << 16, dtype=np.uint32)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        if dtype == "bfloat16":
            return (codes << 16).view(np.float32).astype(np.float64)
        if dtype == "float16":
            return codes.astype(np.uint16).view(np.float16).astype(np.float64)
    format: Format = formats.get(dtype)
    return np.array([format.decode(code) for code in range(256)])


class _Columns:
    """The largest magnitude of each column, as bits; of one column that is the whole tensor where there are none."""

    def __init__(self, tensor: Values, dtype: np.dtype[Any], infinity: int) -> None:
        matrix = len(tensor.shape) > 1 and tensor.shape[-1] >= _CHANNELS and tensor.shape[-1] < tensor.numel
        self.are_channels = matrix and tensor.dtype != "float8_e8m0fnu"
        # Without channels, columns of any number do: their largest is the tensor's.
        self.largest = np.zeros(tensor.shape[-1] if matrix else 1 << 10, dtype)
        self._infinity, self._next = infinity, 0

    def add(self, bits: NDArray[Any]) -> None:
        """Take in the next elements."""
        kernel.raise_amax(bits, self._next, self.largest, self._infinity)
        self._next = (self._next + bits.size) % self.largest.size


def _corner(tensor: Values, first: NDArray[Any], values: NDArray[np.float64] | None = None) -> Corner | None:
    """The rows at the beginning of a matrix; None where the bits do not fill one."""
    columns = tensor.shape[-1] if len(tensor.shape) > 1 else 0
    if not 0 < columns <= min(_LONGEST, first.size):
        return None
    rows = min(BAND, tensor.shape[-2], first.size // columns)
    matrix = first[: rows * columns].reshape(rows, columns)
    return Corner(matrix[:_LINES].copy(), matrix[:, :_WIDE].copy(), values)


def _finished(
    table: Table,
    amax: float,
    smallest: float,
    distinct: NDArray[np.float64],
    columns: _Columns | None = None,
    by_column: NDArray[np.float64] | None = None,
    corner: Corner | None = None,
) -> Scan:
    used = distinct[np.isfinite(distinct) & (distinct != 0)]
    levels = np.unique(np.abs(used))
    values, magnitudes = (int(tells(some).sum()) for some in (used, levels))
    few = table.nonzero > LEVELS and levels.size <= LEVELS // 2
    channels = _channels(by_column) if columns is not None and columns.are_channels and by_column is not None else None
    smallest = float(smallest) if table.nonzero else 0.0
    kept = levels if few else None
    return Scan(table, float(amax), smallest, values, magnitudes, kept, channels, corner=corner)


def _channels(amax: NDArray[np.float64]) -> Channels:
    median = float(np.median(amax))
    outliers = int((amax >= OUTLIER * median).sum()) if median else 0
    return Channels(amax.size, median, float(amax.max()), outliers)
