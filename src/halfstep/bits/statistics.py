"""What is reported of a tensor's, or a role's, values: figures read off the table of one pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from halfstep import formats
from halfstep.bits.scan import Channels, Scan
from halfstep.bits.table import Numbers, Table, held_by, scaled
from halfstep.formats import Float


EXACT = ("bf16", "fp16", "float8_e4m3fn", "float8_e5m2")
"""Formats for which it is counted what they hold exactly."""

_SCALED = EXACT[2:]


@dataclass(frozen=True)
class Statistics:
    """Counts of a tensor's values. Shares are of the finite values that are not zero."""

    values: int
    zeros: int
    infinities: int
    nans: int
    significant_bits: int
    """The fewest significant bits that hold every value."""
    by_bits: tuple[int, ...]
    """Values by the significant bits that they need, from 1 bit on."""
    lowest_exponent: int
    exponents: tuple[int, ...]
    """Values by floor(log2 |x|), from `lowest_exponent` on."""
    amax: float
    smallest: float
    subnormal: int
    """Below the smallest normal value of the stored type."""
    fp16_subnormal: int
    """2^-24 <= |x| < 2^-14."""
    fp16_below: int
    """Below fp16's smallest value, 2^-24."""
    fp16_above: int
    """2^16 and more, where fp16 has only infinity."""
    exact: Mapping[str, float]
    """The share that each format holds exactly."""
    exact_scaled: Mapping[str, tuple[int, float]]
    """For formats of 8 bits: the shift k of the best scale 2^k under which nothing overflows, and the share."""
    channels: Channels | None = None

    @property
    def highest_exponent(self) -> int:
        """The largest exponent in use."""
        return self.lowest_exponent + len(self.exponents) - 1

    @property
    def nonzero(self) -> int:
        """Finite values that are not zero."""
        return sum(self.exponents)

    @property
    def nonfinite(self) -> int:
        """Infinities and NaN."""
        return self.infinities + self.nans


def of_scans(scans: Sequence[Scan], stored: Float | None) -> list[Statistics]:
    """Those of each of several tensors, all stored as `stored` (None: no binary format of ours)."""
    held, shifts = held_by([scan.table for scan in scans], *_looked_for())
    return [
        _of_table(scan.table, stored, (scan.amax, scan.smallest), (counts, shift), scan.channels)
        for scan, counts, shift in zip(scans, held, shifts, strict=True)
    ]


def of_table(table: Table, amax: float, smallest: float) -> Statistics:
    """The figures of counted values of several tensors, whose stored types may differ."""
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
        # Under the shift that leaves none above the largest value.
        exact_scaled={name: (shift, count / total) for name, shift, count in scaled},
        channels=channels,
    )


@cache
def _looked_for() -> tuple[list[Numbers], list[bool]]:
    """The formats of EXACT, then those whose scale is looked for."""
    names = (*EXACT, *_SCALED)
    return [scaled(formats.get(name, Float)) for name in names], [i >= len(EXACT) for i in range(len(names))]
