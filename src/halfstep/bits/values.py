"""The values of one tensor, wherever they lie, and the types they are stored in; some places of it, copied."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from halfstep.kernels.cpu import looks as kernel
from halfstep.kernels.cpu.looks import FIRST, Repeats
from halfstep.quant import ROW, Tile
from halfstep.quant.tile import block, square


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


Doubles = NDArray[np.float64]
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
    """A tensor of a known shape and type."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Their bytes, as its type has them."""
        return TYPES[self.dtype].nbytes(self.shape)


class Decoded(Shaped):
    """One whose values come in float32, in which it is not stored."""

    dtype = "float32"


@dataclass(frozen=True)
class InMemory(Shaped):
    """A plain tensor of one of `dtypes.TYPES`, on any device, as `Values`."""

    tensor: torch.Tensor

    @property
    def dtype(self) -> str:  # type: ignore[override]
        """torch's name without "torch."."""
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """The sizes of its dimensions."""
        return tuple(self.tensor.shape)

    def chunks(self, nbytes: int) -> Iterator[NDArray[Any]]:
        """The values in row-major order; copied only where they do not lie so in this machine's memory."""
        for run in runs(self.tensor, max(nbytes // self.tensor.element_size(), 1)):
            dense = run if run.stride(0) == 1 else run.clone(memory_format=torch.contiguous_format)
            bits = dense.cpu().view(torch.uint8).numpy().view(TYPES[self.dtype].piece)
            bits.flags.writeable = False  # as a file's are: kernels are compiled for those
            yield bits


def runs(tensor: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
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


SAMPLE = 1 << 14
"""Values of a wide tensor among which distinct ones are counted: runs of RUN, spread over it."""

RUN = 256

BAND = 128
"""Rows of a band of a matrix, in which scales of blocks are looked for."""
TILES = (square(BAND), ROW, block(128), block(64), block(32), block(16))
"""Which values may share a scale, the most first: whatever fits a large tile fits the small ones in it, too."""

COLUMN = Tile(0, 1)
"""Of columns only few levels, and factors, are looked for: 128 values of each."""

_LINES = (8, 64)  # the fewest and the most rows that are looked at in all their length
_LINED = 1 << 16  # values in these rows, where there are more than the fewest
_BANDS = 4
_WIDE = 4 * BAND  # columns of a band
_LONGEST = 1 << 16  # columns of a matrix whose rows are looked at
_BLOCKS = 64  # the first tiles of one kind, of which all are looked at, and as many of those beyond
_WINDOW = 32  # fewer values than this in the last of several dimensions are a window's, of a convolution


@dataclass(frozen=True)
class Places:
    """Bits of some of a matrix's rows, spread over all of it, where values may share scales."""

    lines: NDArray[Any]
    """Rows in full length, the first and the last among them."""
    bands: tuple[NDArray[Any], ...]
    """128 rows each, 512 columns of them; fewer where the matrix ends."""
    dtype: str = "float32"
    """The type that these are the bits of; float32's, where values were decoded."""

    @property
    def first(self) -> "Places":
        """Those at the beginning."""
        return Places(self.lines[:1], self.bands[:1], self.dtype)

    def doubles(self, bits: NDArray[Any]) -> NDArray[np.float64]:
        """The values of some of the bits."""
        return as_doubles(as_float32(bits, self.dtype))

    def used(self, bits: NDArray[Any]) -> NDArray[np.float64]:
        """Those which are finite and not zero."""
        values = self.doubles(bits)
        return values[np.isfinite(values) & (values != 0)]

    def has(self, tile: Tile) -> bool:
        """Whether there are tiles of a kind of which no larger one is the same."""
        return self.lines.shape[1] > tile.columns and (tile.rows == 1 or len(self.bands[0]) > 1)

    def tiles(self, tile: Tile) -> Iterator[NDArray[np.float64]]:
        """The values used in tiles of a kind, the first ones and others spread."""
        if not self.has(tile):
            return
        matrices = (self.lines,) if tile.rows == 1 else self.bands
        rows, columns = matrices[0].shape
        high, width = tile.rows or rows, tile.columns or columns
        counts = [-(-matrix.shape[0] // high) * -(-matrix.shape[1] // width) for matrix in matrices]
        total = sum(counts)
        step = max(-(-(total - _BLOCKS) // _BLOCKS), 1)
        for i in (*range(min(total, _BLOCKS)), *range(total - 1, _BLOCKS - 1, -step)):
            which = next(n for n in range(len(counts)) if i < sum(counts[: n + 1]))
            matrix, place = matrices[which], i - sum(counts[:which])
            down, across = divmod(place, -(-matrix.shape[1] // width))
            first, left = down * high, across * width
            values = self.used(matrix[first : first + high, left : left + width])
            if values.size:
                yield values


class Runs:
    """Some runs of a tensor's values, of `length` each from `starts` on (ascending), copied as its pieces pass."""

    def __init__(self, starts: Sequence[int], length: int, dtype: np.dtype[Any]) -> None:
        self.rows = np.empty((len(starts), length), dtype)
        self._starts, self._at = np.array(starts), 0

    def add(self, bits: NDArray[Any]) -> None:
        """Take in the next elements."""
        low, high, length = self._at, self._at + bits.size, self.rows.shape[1]
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
    """Copies SAMPLE values of a tensor that has more: runs of RUN."""
    return Runs(_spread(tensor.numel // RUN, SAMPLE // RUN, RUN), RUN, dtype)


def _spread(count: int, most: int, each: int = 1) -> list[int]:
    """Of `count` places at most so many, evenly spread, the first and the last among them; each times `each`."""
    if count <= most:
        return [place * each for place in range(count)]
    return [place * (count - 1) // (most - 1) * each for place in range(most)]


def matrix_of(shape: Sequence[int]) -> tuple[int, int]:
    """The rows and columns of each of a tensor's matrices, as scales go: a convolution has a row for each filter. No
    columns where it is no matrix.
    """
    if len(shape) > 2 and shape[-1] < _WINDOW and shape[0] > 1:
        return shape[0], math.prod(shape[1:])
    return (shape[-2], shape[-1]) if len(shape) > 1 else (1, 0)


def _is_whole(shape: Sequence[int], columns: int) -> bool:
    """Whether all of a matrix is looked at."""
    return len(shape) == 2 and shape[0] <= min(_lines(columns), BAND) and columns <= _WIDE


def _lines(columns: int) -> int:
    """How many rows of so many columns are looked at in all their length."""
    fewest, most = _LINES
    return min(max(_LINED // columns, fewest), most)


def small_places(tensor: Values, bits: NDArray[np.uint32]) -> Places | None:
    """Those of a tensor whose values are at hand, as bits of float32."""
    _, columns = matrix_of(tensor.shape)
    if columns and tensor.numel and _is_whole(tensor.shape, columns):
        whole = bits.reshape(-1, columns)
        return Places(whole, (whole,))
    spread = Spread(tensor, bits.dtype)
    spread.add(bits)
    return spread.found()


class Spread:
    """The rows and bands of `Places`, copied as a matrix's pieces pass; none where it is no matrix."""

    def __init__(self, tensor: Values, dtype: np.dtype[Any]) -> None:
        high, columns = matrix_of(tensor.shape)
        self._runs: list[Runs] = []
        if not 0 < columns <= _LONGEST or not tensor.numel:
            return
        self._runs.append(Runs(_spread(tensor.numel // columns, _lines(columns), columns), columns, dtype))
        blocks = -(-high // BAND)
        for i, band in enumerate(_spread(tensor.numel // columns // high * blocks, _BANDS)):
            top, width = band % blocks * BAND, min(columns, _WIDE)
            left = min(i * _WIDE, (columns - width) // BAND * BAND)
            first = (band // blocks * high + top) * columns + left
            self._runs.append(Runs(range(first, first + min(BAND, high - top) * columns, columns), width, dtype))

    def add(self, bits: NDArray[Any]) -> None:
        """Take in the next elements."""
        for run in self._runs:
            run.add(bits)

    def found(self, dtype: str = "float32") -> Places | None:
        """What was copied, of values of that type."""
        if not self._runs:
            return None
        lines, *bands = (run.rows for run in self._runs)
        return Places(lines, tuple(bands), dtype)


def repeats(places: Sequence[Places]) -> list[Repeats]:
    """What comes again in each, as far as a first look tells."""
    rows = [as_bits(one.lines[:: max(len(one.lines) - 1, 1), :FIRST], one.dtype) for one in places]
    bands = [as_bits(one.bands[0], one.dtype) for one in places]
    starts = np.array([np.cumsum([0, *(part.size for part in parts)]) for parts in (rows, bands)])
    columns = np.array([[part.shape[1] for part in parts] for parts in (rows, bands)])
    lines, band = (np.concatenate([part.ravel() for part in parts]) for parts in (rows, bands))
    return kernel.repeats(lines, band, starts, columns)


def as_bits(stored: NDArray[Any], dtype: str) -> NDArray[np.uint32]:
    """The bits of stored values as float32."""
    return stored if dtype == "float32" else as_float32(stored, dtype).view(np.uint32)


def as_doubles(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """float32 values as float64."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return values.astype(np.float64)


def as_float32(chunk: NDArray[np.generic], dtype: str) -> NDArray[np.float32]:
    """Stored bits as float32 values, in memory of their own."""
    if dtype == "float32":
        return chunk.view(np.float32).copy()
    if dtype == "bfloat16":
        return (chunk.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return chunk.view(np.float16).astype(np.float32)


def named(tile: Tile | None) -> str:
    """A tile in a word; "any" for the whole tensor, whose scale may have any size."""
    return {ROW: "row", COLUMN: "column"}.get(tile, str(tile)) if tile is not None else "any"
