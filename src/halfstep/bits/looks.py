"""What first looks say of scans, of many at once: where they say no, nothing else is asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from halfstep.bits.evidence import first_looks
from halfstep.bits.grids import suspects
from halfstep.bits.places import repeats
from halfstep.bits.scan import Scan
from halfstep.formats import Float
from halfstep.kernels.cpu.looks import Repeats
from halfstep.kernels.cpu.tables import First


@dataclass(frozen=True)
class Looks:
    """Those at one scan."""

    table: First
    repeats: Repeats | None = None
    """None where there are no places."""
    grids: Sequence[str] = ()
    """The `grids.suspects`."""


def looks(scans: Sequence[Scan], wide: Float | None, formats: Sequence[Float]) -> Iterator[Looks]:
    """Those at scans of values that `wide` holds (None: 53 bits), of which casts from some formats are looked for."""
    if not scans:
        return
    places = [scan.places for scan in scans if scan.places is not None]
    comes = iter(zip(repeats(places), suspects(places, wide), strict=True) if places else ())
    for scan, table in zip(scans, first_looks([scan.table for scan in scans], wide, formats), strict=True):
        yield Looks(table, *next(comes)) if scan.places is not None else Looks(table)
