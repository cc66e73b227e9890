"""Values counted by exponent and significant bits: from this table follows how many any binary format holds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep.formats import Float
from halfstep.kernels.cpu import bits as counter, tables as kernel
from halfstep.kernels.cpu.tables import First


Counts = NDArray[np.int64]

WIDTH = counter.WIDTH
"""Columns of a table: significands of 0 (never) to 53 bits; float32 tables may have fewer."""

WHOLE = 24
"""Integers below 2^24 are taken for counters and tell nothing. Above, most types hold only integers, so their bits
tell."""


@dataclass(frozen=True)
class Table:
    """How many values have exponent floor(log2 |x|) = lowest + row, and need `column` significant bits.

    The significant bits of x are the fewest p for which |x| = m * 2^k with an integer m < 2^p: 1 for a power of two.
    `fifteens` counts per row the significands 15/8, which distinguish e4m3fn's largest value from its NaN. The first
    and the last row are not empty.
    """

    lowest: int
    counts: Counts
    fifteens: Counts
    zeros: int = 0
    infinities: int = 0
    nans: int = 0

    @cached_property
    def _sums(self) -> tuple[Counts, Counts, Counts, Counts, list[int]]:
        return next(_summed(_ragged([self]), self.counts))

    @property
    def sums(self) -> Counts:
        """Counts of values that need at most as many bits as the column."""
        return self._sums[0]

    @property
    def telling(self) -> Counts:
        """`counts` of the values whose bits tell something: without powers of two, which constants are, and without
        integers below 2^WHOLE, which counters and positions are: those fit any format."""
        return self._sums[1]

    @property
    def exponents(self) -> Counts:
        """Counts of finite nonzero values by row."""
        return self._sums[2]

    @property
    def by_bits(self) -> Counts:
        """Counts of finite nonzero values by significant bits."""
        return self._sums[3]

    @property
    def nonzero(self) -> int:
        """The number of finite nonzero values."""
        return self._sums[4][0]

    @property
    def significant_bits(self) -> int:
        """The fewest significant bits that hold every value; 0 for an empty table."""
        return self._sums[4][1]

    @property
    def last_bit(self) -> int:
        """The largest k for which all values are multiples of 2^k; 0 for an empty table."""
        return self._sums[4][2]

    @property
    def telling_count(self) -> int:
        """The number of `telling` values."""
        return self._sums[4][3]

    @property
    def nonfinite(self) -> int:
        """The number of infinities and NaNs."""
        return self.infinities + self.nans

    @property
    def size(self) -> int:
        """The number of all values."""
        return self.nonzero + self.zeros + self.nonfinite

    @cached_property
    def rows(self) -> Counts:
        """The exponents of the rows."""
        return self.lowest + np.arange(len(self.counts))

    def exact(self, format: Float, shift: int = 0) -> int:
        """The number of finite nonzero values that are exactly 2^shift times a value of `format`."""
        held, _ = held_by([self], [scaled(format, shift)])
        return held[0][0]

    def best_shift(self, format: Float) -> tuple[int, int] | None:
        """The smallest shift with which nothing overflows, and `exact` with it; None for an empty table. No larger
        shift holds more values, since they only move towards the subnormals."""
        (counts,), (shifts,) = held_by([self], [scaled(format)], [True])
        return (shifts[0], counts[0]) if self.nonzero else None

    def unmoved(self, format: Float, update: float) -> int:
        """How many values, stored in `format`, do not change when `update` is added or subtracted and the sum rounded
        to nearest.

        They are those with a spacing of more than twice the update; below a power of two the spacing is half of that
        above it.
        """
        lowest = format.min_exponent
        spacing = 2.0 ** (np.maximum(self.rows, lowest) + 1.0 - format.significant_bits)
        halved = np.where(self.rows > lowest, spacing / 2, spacing)
        powers = self.counts[:, 1]
        inside, at_powers = 2 * update < spacing, 2 * update < halved
        return int(((self.exponents - powers) * inside + powers * at_powers).sum())

    def __add__(self, other: "Table") -> "Table":
        return total([self, other])


Numbers = tuple[int, int, int, int]
"""A format in the form of `kernels.cpu.tables`."""


@lru_cache(1 << 10)
def scaled(format: Float, shift: int = 0) -> Numbers:
    """The format's values times 2^shift."""
    top, bottom = format.max_exponent + shift, format.min_exponent - format.mantissa_bits + shift
    return top, bottom, format.significant_bits, format.specials == "fn"


def held_by(
    tables: Sequence[Table], formats: Sequence[Numbers], free: Sequence[bool] = (False,)
) -> tuple[list[list[int]], list[list[int]]]:
    """For each table and format, the number of finite nonzero values that the format holds exactly, and the shift of
    its values: 0, or where `free` the smallest with which nothing overflows."""
    starts, lowest = _ragged(tables)
    running, fifteens = joined([one.sums for one in tables]), joined([one.fifteens for one in tables])
    found, shifts = kernel.held(running, fifteens, starts, lowest, np.array(formats), np.array(free))
    return found.tolist(), shifts.tolist()


def first_look(tables: Sequence[Table], formats: Sequence[Numbers], ends: tuple[int, int, float, float]) -> list[First]:
    """`kernels.cpu.tables.first_look` for each table."""
    counts, telling = joined([one.counts for one in tables]), joined([one.telling for one in tables])
    return kernel.first_look(counts, telling, *_ragged(tables), np.array(formats), ends)


def total(tables: Sequence[Table]) -> Table:
    """The table of the values of several tables together."""
    used = [one for one in tables if len(one.counts)]
    lowest = min((one.lowest for one in used), default=0)
    high = max((one.lowest + len(one.counts) for one in used), default=0)
    counts, fifteens = np.zeros((high - lowest, WIDTH), np.int64), np.zeros((high - lowest, 1), np.int64)
    for width in {one.counts.shape[1] for one in used}:
        same = [one for one in used if one.counts.shape[1] == width]
        rows = np.concatenate([one.rows for one in same]) - lowest
        kernel.added(joined([one.counts for one in same]), rows, counts)
        kernel.added(joined([one.fifteens for one in same])[:, None], rows, fifteens)
    others = (sum(one.zeros for one in tables), sum(one.infinities for one in tables), sum(one.nans for one in tables))
    return Table(lowest, counts, fifteens[:, 0], *others)


def tables(
    starts: Counts, counts: Counts, fifteens: Counts, numbers: Sequence[tuple[int, int, int, int]]
) -> list[Table]:
    """Tables whose rows are concatenated in one array, with their sums computed at once. `numbers` are each one's
    zeros, infinities, NaNs and lowest exponent."""
    ends = starts.tolist()
    found = [
        Table(lowest, counts[a:b], fifteens[a:b], *others)
        for a, b, (*others, lowest) in zip(ends, ends[1:], numbers, strict=False)
    ]
    for one, sums in zip(found, _summed((starts, np.array([n[-1] for n in numbers])), counts), strict=True):
        vars(one)["_sums"] = sums  # the cached property
    return found


def joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Arrays concatenated; a single one is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _ragged(tables: Sequence[Table]) -> tuple[Counts, Counts]:
    """Where each table's rows begin in the concatenation, then the end; and their lowest exponents."""
    return np.cumsum([0, *(len(one.counts) for one in tables)]), np.array([one.lowest for one in tables])


def _summed(
    places: tuple[Counts, Counts], counts: Counts
) -> Iterator[tuple[Counts, Counts, Counts, Counts, list[int]]]:
    running, telling, by_row, by_column, ends = kernel.sums(counts, *places, WHOLE)
    starts = places[0].tolist()
    for i, (a, b, last) in enumerate(zip(starts, starts[1:], ends.tolist(), strict=False)):
        yield running[a:b], telling[a:b], by_row[a:b], by_column[i], last


def tells(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which finite values are among `Table.telling`."""
    magnitudes = np.abs(values)
    whole = (np.floor(magnitudes) == magnitudes) & (magnitudes < 2.0**WHOLE)
    return ~whole & (np.frexp(magnitudes)[0] != 0.5)


@lru_cache(1 << 10)
def held_bits(format: Float, lowest: int, count: int) -> Counts:
    """The significant bits that `format` has for values of `count` exponents, from the lowest on: fewer below its
    smallest normal value, none beyond its range. Read-only, since it is cached."""
    exponents = lowest + np.arange(count)
    steps = exponents - (format.min_exponent - format.mantissa_bits) + 1
    allowed = np.where(exponents > format.max_exponent, 0, np.minimum(format.significant_bits, steps))
    found: Counts = np.minimum(np.maximum(allowed, 0), WIDTH - 1)
    found.flags.writeable = False
    return found


EMPTY = Table(0, np.zeros((0, WIDTH), np.int64), np.zeros(0, np.int64))


def from_kernel(found: Counts) -> Table:
    """The table that `kernels.cpu.bits.add_float32` filled."""
    by_row = found.sum(1)
    last, used = counter.ROWS - 1, 1 + np.flatnonzero(by_row[1:-1])
    infinities = int(found[last, 1])
    others = int(by_row[0]), infinities, int(by_row[last]) - infinities
    if not used.size:
        return Table(0, EMPTY.counts, EMPTY.fifteens, *others)
    rows = found[used[0] : used[-1] + 1]
    counts = np.zeros((len(rows), WIDTH), np.int64)
    counts[:, :25] = rows[:, :25]
    counts[:, 4] += rows[:, counter.FIFTEEN]
    return Table(counter.LOWEST + int(used[0]), counts, rows[:, counter.FIFTEEN].copy(), *others)


def from_values(values: NDArray[np.float64], times: Counts | None = None) -> Table:
    """The table of float64 values, each counted `times` (None: once)."""
    times = np.ones(values.shape, np.int64) if times is None else times
    used = np.isfinite(values) & (values != 0)
    mantissa, exponent = np.frexp(np.abs(values[used]))
    whole = (mantissa * 2.0**53).astype(np.int64)  # in [2^52, 2^53)
    _, last = np.frexp((whole & -whole).astype(np.float64))
    width, weights = 54 - last, times[used]
    lowest = int(exponent.min(initial=1)) - 1
    shape = (int(exponent.max(initial=lowest + 1)) - lowest, WIDTH)
    places = np.ravel_multi_index((exponent - 1 - lowest, width), shape)
    counts = np.bincount(places, weights, minlength=shape[0] * WIDTH).astype(np.int64).reshape(shape)
    fifteen = whole == 15 << 49
    fifteens = np.bincount(exponent[fifteen] - 1 - lowest, weights[fifteen], minlength=shape[0]).astype(np.int64)
    zeros, nans = int(times[values == 0].sum()), int(times[np.isnan(values)].sum())
    return _trimmed(lowest, counts, fifteens, zeros, int(times[np.isinf(values)].sum()), nans)


def _trimmed(lowest: int, counts: Counts, fifteens: Counts, zeros: int, infinities: int, nans: int) -> Table:
    used = np.flatnonzero(counts.any(1))
    if not used.size:
        return replace(EMPTY, zeros=zeros, infinities=infinities, nans=nans)
    first, stop = int(used[0]), int(used[-1]) + 1
    return Table(lowest + first, counts[first:stop], fifteens[first:stop], zeros, infinities, nans)
