"""The values of one tensor, in a file or in memory, and their stored types; and copies of some of its rows."""

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
    """A stored type: `bits` per value in the file, and the numpy type of the pieces."""

    name: str
    bits: int
    piece: np.dtype

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """The bytes of a tensor of this shape; packed types are rounded up to whole bytes."""
        return -(-math.prod(shape) * self.bits // 8)


def _types(code: str, bits: int, *names: str) -> dict[str, StoredType]:
    return {name: StoredType(name, bits, np.dtype(code)) for name in names}


Doubles = NDArray[np.float64]
FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
"""torch's 8-bit float types."""

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
"""Every type, by torch's name."""


class Values(Protocol):
    """A tensor whose values can be read repeatedly, in pieces of bounded size."""

    @property
    def dtype(self) -> str:
        """torch's name without "torch."; types with other names (GGUF's blocks) are decoded to float32."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""

    @property
    def numel(self) -> int:
        """The number of values."""

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""

    def chunks(self, nbytes: int) -> Iterator[NDArray[Any]]:
        """The values in row-major order, as 1-D read-only arrays of at most `nbytes` each.

        Floats are given as their bits (bfloat16 and float16 as uint16, float32 as uint32, float64 as uint64, 8-bit ones
        as uint8), bool as uint8, integers and complex values as they are. Errors are the source's: a file may be
        broken, or may have been changed meanwhile.
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
        """Bytes in its type."""
        return TYPES[self.dtype].nbytes(self.shape)


class Decoded(Shaped):
    """A tensor whose values are decoded to float32."""

    dtype = "float32"


@dataclass(frozen=True)
class InMemory(Shaped):
    """A plain tensor of one of `TYPES`, on any device, as `Values`."""

    tensor: torch.Tensor

    @property
    def dtype(self) -> str:  # type: ignore[override]
        """torch's name without "torch."."""
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """The shape."""
        return tuple(self.tensor.shape)

    def chunks(self, nbytes: int) -> Iterator[NDArray[Any]]:
        """The values in row-major order; copied only where they are not contiguous in CPU memory."""
        for run in runs(self.tensor, max(nbytes // self.tensor.element_size(), 1)):
            dense = run if run.stride(0) == 1 else run.clone(memory_format=torch.contiguous_format)
            bits = dense.cpu().view(torch.uint8).numpy().view(TYPES[self.dtype].piece)
            bits.flags.writeable = False  # as a file's are: kernels are compiled for read-only arrays
            yield bits


def runs(tensor: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    """The values in row-major order, flat, at most `count` at a time; copied only where they are not contiguous."""
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
    """The values in runs of `count` (the last one shorter), whatever the sizes of the source's chunks.

    A run is copied only where a chunk ends within it, as at the end of a file's map.
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
    joined.flags.writeable = False  # as a file's pieces are: kernels are compiled for read-only arrays
    return joined


SAMPLE = 1 << 14
"""Values of a wide tensor among which distinct ones are counted: runs of RUN, spread over it."""

RUN = 256

BAND = 128
"""Rows of a band of a matrix, in which scales of blocks are looked for."""
TILES = (square(BAND), ROW, block(128), block(64), block(32), block(16))
"""Kinds of tiles that may share a scale, the largest first: what fits a large tile fits the small ones in it too."""

COLUMN = Tile(0, 1)
"""Columns are only examined for few levels, and for factors: 128 values of each."""

_LINES = (8, 64)  # the fewest and the most rows that are copied in full
_LINED = 1 << 16  # the most values in these rows, if they are more than the fewest
_BANDS = 4
_WIDE = 4 * BAND  # columns of a band
_LONGEST = 1 << 16  # the most columns of a matrix whose rows are copied
_BLOCKS = 64  # all of the first tiles of one kind that are examined, and as many of the others
_WINDOW = 32  # a last dimension smaller than this, of more than two, is a convolution's window


@dataclass(frozen=True)
class Places:
    """The bits of some rows of a matrix, spread over it, in which scales per tile are looked for."""

    lines: NDArray[Any]
    """Full rows, the first and the last among them."""
    bands: tuple[NDArray[Any], ...]
    """128 rows each, of 512 columns; fewer at the matrix's edges."""
    dtype: str = "float32"
    """The type of these bits; float32 where values were decoded."""

    @property
    def first(self) -> "Places":
        """The first line and the first band."""
        return Places(self.lines[:1], self.bands[:1], self.dtype)

    def doubles(self, bits: NDArray[Any]) -> NDArray[np.float64]:
        """Bits as float64 values."""
        return as_doubles(as_float32(bits, self.dtype))

    def used(self, bits: NDArray[Any]) -> NDArray[np.float64]:
        """The finite nonzero values of some bits."""
        values = self.doubles(bits)
        return values[np.isfinite(values) & (values != 0)]

    def has(self, tile: Tile) -> bool:
        """Whether the matrix has tiles of this kind that differ from all larger kinds."""
        return self.lines.shape[1] > tile.columns and (tile.rows == 1 or len(self.bands[0]) > 1)

    def tiles(self, tile: Tile) -> Iterator[NDArray[np.float64]]:
        """The finite nonzero values of tiles of a kind: the first tiles, and others spread over the matrix."""
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
    """Some runs of a tensor's values, of `length` each from `starts` on (ascending), copied as its chunks pass."""

    def __init__(self, starts: Sequence[int], length: int, dtype: np.dtype[Any]) -> None:
        self.rows = np.empty((len(starts), length), dtype)
        self._starts, self._at = np.array(starts), 0

    def add(self, bits: NDArray[Any]) -> None:
        """Add the next elements."""
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
    """Copies SAMPLE values of a larger tensor: runs of RUN."""
    return Runs(_spread(tensor.numel // RUN, SAMPLE // RUN, RUN), RUN, dtype)


def _spread(count: int, most: int, each: int = 1) -> list[int]:
    """At most `most` of the indices below `count`, evenly spread, the first and the last among them; times `each`."""
    if count <= most:
        return [place * each for place in range(count)]
    return [place * (count - 1) // (most - 1) * each for place in range(most)]


def matrix_of(shape: Sequence[int]) -> tuple[int, int]:
    """The rows and columns of each of a tensor's matrices, as scales are laid out: a convolution has one row per
    filter. 0 columns where it is no matrix."""
    if len(shape) > 2 and shape[-1] < _WINDOW and shape[0] > 1:
        return shape[0], math.prod(shape[1:])
    return (shape[-2], shape[-1]) if len(shape) > 1 else (1, 0)


def _is_whole(shape: Sequence[int], columns: int) -> bool:
    """Whether all of a matrix is examined."""
    return len(shape) == 2 and shape[0] <= min(_lines(columns), BAND) and columns <= _WIDE


def _lines(columns: int) -> int:
    """How many rows of `columns` values are copied in full."""
    fewest, most = _LINES
    return min(max(_LINED // columns, fewest), most)


def small_places(tensor: Values, bits: NDArray[np.uint32]) -> Places | None:
    """The `Places` of a tensor whose values are in memory, as float32 bits."""
    _, columns = matrix_of(tensor.shape)
    if columns and tensor.numel and _is_whole(tensor.shape, columns):
        whole = bits.reshape(-1, columns)
        return Places(whole, (whole,))
    spread = Spread(tensor, bits.dtype)
    spread.add(bits)
    return spread.found()


class Spread:
    """Copies the rows and bands of `Places` as a matrix's chunks pass; nothing where the tensor is no matrix."""

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
        """Add the next elements."""
        for run in self._runs:
            run.add(bits)

    def found(self, dtype: str = "float32") -> Places | None:
        """The copies, of values of that type."""
        if not self._runs:
            return None
        lines, *bands = (run.rows for run in self._runs)
        return Places(lines, tuple(bands), dtype)


def repeats(places: Sequence[Places]) -> list[Repeats]:
    """What repeats in each, as far as a first look shows."""
    rows = [as_bits(one.lines[:: max(len(one.lines) - 1, 1), :FIRST], one.dtype) for one in places]
    bands = [as_bits(one.bands[0], one.dtype) for one in places]
    starts = np.array([np.cumsum([0, *(part.size for part in parts)]) for parts in (rows, bands)])
    columns = np.array([[part.shape[1] for part in parts] for parts in (rows, bands)])
    lines, band = (np.concatenate([part.ravel() for part in parts]) for parts in (rows, bands))
    return kernel.repeats(lines, band, starts, columns)


def as_bits(stored: NDArray[Any], dtype: str) -> NDArray[np.uint32]:
    """Stored values converted to float32 bits."""
    return stored if dtype == "float32" else as_float32(stored, dtype).view(np.uint32)


def as_doubles(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """float32 values as float64."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return values.astype(np.float64)


def as_float32(chunk: NDArray[np.generic], dtype: str) -> NDArray[np.float32]:
    """Stored bits as float32 values, copied."""
    if dtype == "float32":
        return chunk.view(np.float32).copy()
    if dtype == "bfloat16":
        return (chunk.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return chunk.view(np.float16).astype(np.float32)


def named(tile: Tile | None) -> str:
    """A tile in a word; "any" for the whole tensor, whose scale may be any float."""
    return {ROW: "row", COLUMN: "column"}.get(tile, str(tile)) if tile is not None else "any"
