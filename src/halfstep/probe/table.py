"""A probe's worst tensors, a row each."""

from __future__ import annotations

from halfstep.probe.ranges import Counts, Range
from halfstep.probe.report import ProbeReport


COLUMNS = ("largest", "bits left", "beyond", "subnormal", "vanish", "error", "tensor")


def rows(report: ProbeReport, count: int) -> list[tuple[str, ...]]:
    """The worst tensors, a row each, as `COLUMNS` says. One that several modules hand on is shown once."""
    distinct: dict[Counts, Range] = {}
    for found in report.worst():
        distinct.setdefault(found.counts, found)
    return [_row(found, report) for found in list(distinct.values())[:count]]


def _row(found: Range, report: ProbeReport) -> tuple[str, ...]:
    error = report.trial.errors.get(found.site.module) if found.site.role == "output" else None
    return (
        f"{found.counts.largest:.4g}",
        f"{found.headroom:.1f}",
        *map(_share, (found.share_beyond, found.share_subnormal, found.share_vanished)),
        "-" if error is None else f"{error:.2g}",
        str(found.site),
    )


def _share(value: float) -> str:
    return "-" if value == 0 else f"{value:.2g}" if value < 0.001 else f"{value:.1%}"
