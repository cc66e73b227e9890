"""Scans a tensor's bits in one pass: the table of exponents and significant bits, and facts that the table lacks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep import formats
from halfstep.bits.table import EMPTY, Numbers, Table, from_kernel, from_values, held_by, scaled, tables, tells
from halfstep.bits.values import SAMPLE, TYPES, Places, Spread, Values, as_bits, as_doubles, sample, small_places
from halfstep.formats import Float, Format
from halfstep.kernels.cpu import bits as kernel


# ---- distinct values -------------------------------------------------------------------------------------------------

LEVELS = 256
"""The most distinct values of an 8-bit format."""

_AGAIN = 1 << 18  # bytes per piece, where a tensor of few levels is read a second time


@dataclass(frozen=True)
class Levels:
    """Few distinct magnitudes, ascending, and how often each occurs."""

    magnitudes: NDArray[np.float64]
    times: NDArray[np.int64]
    low: float = 0.0
    """The smallest value, or zero if all are positive; for a wide type, among the sampled values."""
    high: float = 0.0
    """The largest value, or zero."""


def may_be_few(table: Table, values: NDArray[Any]) -> bool:
    """Whether the values of a table may have few levels, as the sampled `values` do."""
    if not table.nonzero > LEVELS or values.size > 2 * LEVELS + 4:  # with signs, zero and what is not finite
        return False
    return np.unique(np.abs(values)).size <= LEVELS and bool(table.telling.any())


def levels_of(tensor: Values, known: NDArray[np.float32]) -> Levels | None:
    """The distinct magnitudes of a float32 tensor and their counts; None where there are more than LEVELS.

    It reads the tensor a second time: only for tensors whose sampled values, `known`, have few levels.
    """
    codes = np.unique(np.abs(known)).view(np.uint32)
    times = np.zeros(codes.size, np.int64)
    for piece in tensor.chunks(_AGAIN):
        magnitudes = piece.view(np.uint32) & np.uint32(0x7FFFFFFF)
        place = np.minimum(np.searchsorted(codes, magnitudes), codes.size - 1)
        held = codes[place] == magnitudes
        new, counts = np.unique(magnitudes[~held], return_counts=True)
        if codes.size + new.size > LEVELS + 2:  # zero and infinity
            return None
        times = times + np.bincount(place[held], minlength=codes.size)
        where = np.searchsorted(codes, new)
        codes, times = np.insert(codes, where, new), np.insert(times, where, counts)
    return counted(as_doubles(codes.view(np.float32)), times, as_doubles(known))


def counted(
    values: NDArray[np.float64], times: NDArray[np.int64], known: NDArray[np.float64] | None = None
) -> Levels | None:
    """The levels of these values; the range is that of the values `known` (None: of all)."""
    used = np.isfinite(values) & (values != 0)
    magnitudes, which = np.unique(np.abs(values[used]), return_inverse=True)
    if not 0 < magnitudes.size <= LEVELS:
        return None
    times = np.bincount(which, times[used], minlength=magnitudes.size).astype(np.int64)
    known = values if known is None else known
    known = known[np.isfinite(known)]
    return Levels(magnitudes, times, float(known.min(initial=0.0)), float(known.max(initial=0.0)))


def telling(distinct: NDArray[np.float64]) -> tuple[int, int]:
    """The number of distinct values that tell something, and of their distinct magnitudes."""
    used = distinct[np.isfinite(distinct) & (distinct != 0)]
    found = np.abs(used[tells(used)])
    return found.size, np.unique(found).size


# ---- scans -----------------------------------------------------------------------------------------------------------

CHUNK = 1 << 24
"""Bytes read at a time, split among the threads."""

OUTLIER = 6.0
"""A channel is an outlier if its amax is at least this many times the median channel's."""

Progress = Callable[[int], None]
"""Called with the number of bytes read."""

_CHANNELS = 32  # fewer columns than this are no channels, but a convolution's window, or scales per row
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
    """The amaxes of a matrix's columns (its last dimension): the input channels of a linear layer."""

    count: int
    median: float
    largest: float
    outliers: int
    """The number of columns whose amax is at least `OUTLIER` times the median of all columns."""


@dataclass(frozen=True)
class Scan:
    """The result of one pass over a tensor. `table` counts its values; magnitudes are of the finite ones, and exact."""

    table: Table
    amax: float = 0.0
    smallest: float = 0.0
    """The smallest magnitude above zero; 0 if there is none."""
    distinct: int = 0
    """The number of distinct telling values (`Table.telling`); for a wide type among SAMPLE values."""
    magnitudes: int = 0
    """The number of their distinct magnitudes."""
    levels: Levels | None = None
    """The distinct magnitudes of all values, if there are at most LEVELS, and more values than that."""
    channels: Channels | None = None
    codes: NDArray[np.int64] | None = None
    """How often each code occurs, for 8-bit types, and 16-bit tensors of more than SAMPLE values."""
    places: Places | None = None
    """For a matrix of 16- or 32-bit values."""
    again: int | None = None
    """The number of values whose magnitude occurred before, if all were examined."""


def readable(tensor: Values) -> bool:
    """Whether the tensor's values are floats that `scan` can read."""
    return tensor.dtype in (*_NARROW, "float32", "float64") or tensor.dtype not in TYPES


def scan(tensor: Values, progress: Progress | None = None) -> Scan:
    """Scan a `readable` tensor, reading it once, CHUNK bytes at a time."""
    chunks = with_progress(tensor.chunks(CHUNK), progress)
    if tensor.dtype == "float64":
        return _scan_double(chunks)
    if is_small(tensor):
        return scan_small([tensor], [*chunks])[0]
    return _scan_codes(chunks, tensor) if tensor.dtype in _NARROW else _scan_float32(chunks, tensor)


def with_progress(chunks: Iterator[NDArray[Any]], progress: Progress | None) -> Iterator[NDArray[Any]]:
    """The chunks, with `progress` called after each was used."""
    for chunk in chunks:
        yield chunk
        if progress is not None:
            progress(chunk.nbytes)


def is_small(tensor: Values) -> bool:
    """Whether `scan_small` supports the tensor: at most SAMPLE values of 16 or 32 bits."""
    return tensor.numel <= SAMPLE and tensor.dtype != "float64" and not tensor.dtype.startswith("float8")


def scan_small(tensors: Sequence[Values], stored: Sequence[NDArray[Any]]) -> list[Scan]:
    """The scans of small `readable` tensors of one type, whose pieces are `stored`; one kernel sorts and counts them
    all."""
    narrow = tensors[0].dtype in _NARROW
    dtype, word = tensors[0].dtype if narrow else "float32", np.dtype(np.uint16 if narrow else np.uint32)
    bits = as_bits(np.concatenate([np.zeros(0, word), *(piece.view(word) for piece in stored)]), dtype)
    starts = np.cumsum([0, *(tensor.numel for tensor in tensors)])
    rows, counts, fifteens, seen = kernel.sorted_float32(bits, starts)
    found = tables(rows, counts, fifteens, [(s.zeros, s.infinities, s.nans, s.lowest) for s in seen])
    ends = np.array([(s.smallest, s.largest) for s in seen], np.uint32).view(np.float32).tolist()
    channels = _small_channels(tensors, bits, starts)
    return [
        Scan(
            table,
            largest,
            smallest,
            one.telling,
            one.telling_magnitudes,
            _small_levels(values, table, one, narrow),
            amax,
            places=small_places(tensor, values),
            again=table.nonzero - one.magnitudes,
        )
        for tensor, table, one, (smallest, largest), amax, values in zip(
            tensors, found, seen, ends, channels, np.split(bits, starts[1:-1]), strict=True
        )
    ]


def _small_levels(bits: NDArray[np.uint32], table: Table, seen: kernel.Seen, narrow: bool) -> Levels | None:
    kinds = 0 if narrow else sum(1 for count in (seen.zeros, seen.infinities, seen.nans) if count)
    if not table.nonzero > LEVELS >= seen.magnitudes + kinds or not seen.telling:
        return None
    distinct, times = np.unique(bits.view(np.float32), return_counts=True)
    return counted(as_doubles(distinct), times)


def _small_channels(
    tensors: Sequence[Values], bits: NDArray[np.uint32], starts: NDArray[np.int64]
) -> list[Channels | None]:
    columns = np.array([tensor.shape[-1] if _are_channels(tensor) else 0 for tensor in tensors])
    amax = kernel.column_amax(bits, starts, columns).view(np.float32).astype(np.float64)
    return [_channels(part) if part.size else None for part in np.split(amax, np.cumsum(columns)[:-1])]


def _are_channels(tensor: Values) -> bool:
    """Whether the columns of a tensor's last dimension are channels, whose amaxes are computed."""
    return len(tensor.shape) > 1 and tensor.shape[-1] >= _CHANNELS and tensor.shape[-1] < tensor.numel


# ---- scans by dtype --------------------------------------------------------------------------------------------------


def _scan_float32(chunks: Iterator[NDArray[Any]], tensor: Values) -> Scan:
    word = np.dtype(np.uint32)
    columns, places, drawn = _Columns(tensor, word, 0x7F800000), Spread(tensor, word), sample(tensor, word)
    found = np.zeros((kernel.ROWS, kernel.COLUMNS), np.int64)
    ends = np.full(1, 0xFFFFFFFF, word)
    for chunk in chunks:
        bits = chunk.view(word)
        drawn.add(bits)
        places.add(bits)
        columns.add(bits)
        kernel.add_float32(bits, found, ends)
    *_, (seen,) = kernel.sorted_float32(drawn.rows.ravel(), np.array([0, drawn.rows.size]))
    table = from_kernel(found)
    levels, smallest, amax = None, float(ends.view(np.float32)[0]), as_doubles(columns.largest.view(np.float32))
    if table.nonzero > LEVELS >= seen.magnitudes:
        distinct = np.unique(drawn.rows.view(np.float32))
        levels = levels_of(tensor, distinct) if may_be_few(table, distinct) else None
    tell = seen.telling, seen.telling_magnitudes
    return _finished(table, amax.max(), smallest, tell, levels, columns, amax, places.found())


def _scan_codes(chunks: Iterator[NDArray[Any]], tensor: Values) -> Scan:
    values = decoded(tensor.dtype)
    times = np.zeros(values.size, np.int64)
    dtype = np.dtype(np.uint16 if values.size > LEVELS else np.uint8)
    columns = _Columns(tensor, dtype, _infinity(tensor.dtype))
    places = Spread(tensor, dtype) if values.size > LEVELS else None
    for chunk in chunks:
        if places is not None:
            places.add(chunk)
        kernel.add_codes(chunk, times)
        columns.add(chunk)
    seen = np.flatnonzero(times)
    used, counts = values[seen], times[seen]
    magnitudes = np.abs(used[np.isfinite(used) & (used != 0)])
    table = from_values(used, counts)
    amax, smallest = magnitudes.max(initial=0.0), magnitudes.min(initial=np.inf)
    where = places.found(tensor.dtype) if places is not None else None
    levels = counted(used, counts) if may_be_few(table, magnitudes) else None
    found = _finished(table, amax, smallest, telling(used), levels, columns, values[columns.largest], where)
    return replace(found, codes=times)


def _scan_double(chunks: Iterator[NDArray[Any]]) -> Scan:
    """Scan float64 with numpy, without a kernel: checkpoints hold few such values."""
    table, smallest, amax, sample = EMPTY, np.inf, 0.0, np.zeros(0)
    for chunk in chunks:
        values = chunk.view(np.float64)
        if not sample.size:
            sample = values[:SAMPLE].copy()
        magnitudes = np.abs(values[np.isfinite(values) & (values != 0)])
        smallest, amax = min(smallest, magnitudes.min(initial=np.inf)), max(amax, magnitudes.max(initial=0.0))
        table = table + from_values(values)
    distinct, times = np.unique(sample, return_counts=True)
    levels = counted(distinct, times) if table.size <= SAMPLE and may_be_few(table, distinct) else None
    return _finished(table, amax, smallest, telling(distinct), levels)


@cache
def decoded(dtype: str) -> NDArray[np.float64]:
    """The value of every code of an 8- or 16-bit type."""
    codes = np.arange(1 << 16, dtype=np.uint32)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        if dtype == "bfloat16":
            return (codes << 16).view(np.float32).astype(np.float64)
        if dtype == "float16":
            return codes.astype(np.uint16).view(np.float16).astype(np.float64)
    format: Format = formats.get(dtype)
    return np.array([format.decode(code) for code in range(256)])


@cache
def _infinity(dtype: str) -> int:
    """The first magnitude, as a code, that is not finite."""
    values = decoded(dtype)
    return int(np.flatnonzero(np.isfinite(values[: values.size // 2]))[-1]) + 1


class _Columns:
    """The amax of each column, as bits; where there are no channels, of arbitrary columns, for the tensor's amax."""

    def __init__(self, tensor: Values, dtype: np.dtype[Any], infinity: int) -> None:
        matrix = _are_channels(tensor)
        self.are_channels = matrix and tensor.dtype != "float8_e8m0fnu"
        # Without channels any number of columns will do: the largest is the tensor's.
        self.largest = np.zeros(tensor.shape[-1] if matrix else 1 << 10, dtype)
        self._infinity, self._next = infinity, 0

    def add(self, bits: NDArray[Any]) -> None:
        """Add the next elements."""
        kernel.raise_amax(bits, self._next, self.largest, self._infinity)
        self._next = (self._next + bits.size) % self.largest.size


def _finished(
    table: Table,
    amax: float,
    smallest: float,
    telling: tuple[int, int],
    levels: Levels | None,
    columns: _Columns | None = None,
    by_column: NDArray[np.float64] | None = None,
    places: Places | None = None,
) -> Scan:
    channels = _channels(by_column) if columns is not None and columns.are_channels and by_column is not None else None
    smallest = float(smallest) if table.nonzero else 0.0
    return Scan(table, float(amax), smallest, *telling, levels, channels, places=places)


def _channels(amax: NDArray[np.float64]) -> Channels:
    ordered = np.sort(amax)
    median = float(ordered[(amax.size - 1) // 2] + ordered[amax.size // 2]) / 2
    outliers = amax.size - int(ordered.searchsorted(OUTLIER * median)) if median else 0
    return Channels(amax.size, median, float(ordered[-1]), outliers)


# ---- statistics ------------------------------------------------------------------------------------------------------

EXACT = ("bf16", "fp16", "float8_e4m3fn", "float8_e5m2")
"""The formats for which exactly representable values are counted."""

_SCALED = EXACT[2:]


@dataclass(frozen=True)
class Statistics:
    """Counts of a tensor's values. Shares are of the finite nonzero values."""

    values: int
    zeros: int
    infinities: int
    nans: int
    significant_bits: int
    """The fewest significant bits that hold every value."""
    by_bits: tuple[int, ...]
    """Counts of values by the significant bits that they need, from 1 bit on."""
    lowest_exponent: int
    exponents: tuple[int, ...]
    """Counts of values by floor(log2 |x|), from `lowest_exponent` on."""
    amax: float
    smallest: float
    subnormal: int
    """Values below the smallest normal value of the stored type."""
    fp16_subnormal: int
    """Values with 2^-24 <= |x| < 2^-14."""
    fp16_below: int
    """Values below fp16's smallest value, 2^-24."""
    fp16_above: int
    """Values of 2^16 and more, which are infinite in fp16."""
    exact: Mapping[str, float]
    """The share that each format holds exactly."""
    exact_scaled: Mapping[str, tuple[int, float]]
    """For 8-bit formats: the shift k of the best scale 2^k with which nothing overflows, and the share."""
    channels: Channels | None = None

    @property
    def highest_exponent(self) -> int:
        """The largest exponent in use."""
        return self.lowest_exponent + len(self.exponents) - 1

    @property
    def nonzero(self) -> int:
        """The number of finite nonzero values."""
        return sum(self.exponents)

    @property
    def nonfinite(self) -> int:
        """The number of infinities and NaNs."""
        return self.infinities + self.nans


def of_scans(scans: Sequence[Scan], stored: Float | None) -> list[Statistics]:
    """The statistics of several tensors, all stored as `stored` (None: no binary format of halfstep's)."""
    held, shifts = held_by([scan.table for scan in scans], *_looked_for())
    return [
        _of_table(scan.table, stored, (scan.amax, scan.smallest), (counts, shift), scan.channels)
        for scan, counts, shift in zip(scans, held, shifts, strict=True)
    ]


def of_table(table: Table, amax: float, smallest: float) -> Statistics:
    """The statistics of several tensors together, whose stored types may differ."""
    (held,), (shifts,) = held_by([table], *_looked_for())
    return _of_table(table, None, (amax, smallest), (held, shifts), None)


def _of_table(
    table: Table,
    stored: Float | None,
    ends: tuple[float, float],
    held: tuple[list[int], list[int]],
    channels: Channels | None,
) -> Statistics:
    counts, shifts = held
    total, used = table.nonzero or 1, table.significant_bits
    exponents = table.exponents.tolist()
    ends_of = (stored.min_exponent if stored else -9999, -24, -14, 16)
    subnormal, below, normal, above = [sum(exponents[: max(end - table.lowest, 0)]) for end in ends_of]
    scaled = zip(_SCALED, shifts[len(EXACT) :], counts[len(EXACT) :], strict=True) if table.nonzero else ()
    return Statistics(
        values=table.size,
        zeros=table.zeros,
        infinities=table.infinities,
        nans=table.nans,
        significant_bits=used,
        by_bits=tuple(table.by_bits[1 : used + 1].tolist()),
        lowest_exponent=table.lowest,
        exponents=tuple(exponents),
        amax=ends[0],
        smallest=ends[1],
        subnormal=subnormal,
        fp16_subnormal=normal - below,
        fp16_below=below,
        fp16_above=table.nonzero - above,
        exact={name: count / total for name, count in zip(EXACT, counts, strict=False)},
        # With the shift with which no value exceeds the largest one.
        exact_scaled={name: (shift, count / total) for name, shift, count in scaled},
        channels=channels,
    )


@cache
def _looked_for() -> tuple[list[Numbers], list[bool]]:
    """The formats of EXACT, then those with a scale; and which of them are scaled."""
    names = (*EXACT, *_SCALED)
    return [scaled(formats.get(name, Float)) for name in names], [i >= len(EXACT) for i in range(len(names))]
