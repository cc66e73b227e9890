"""Scales as tables: standard deviations by module, and what formats make of each kind of tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halfstep.probe.ranges import Counts
from halfstep.probe.spread import GRADIENT, KINDS, Scales, Spread


@dataclass(frozen=True)
class Row:
    """One tensor of a module, or of the like modules of repeated blocks, with its gradient."""

    module: str
    """The module's path, with a star where blocks are repeated."""
    kind: str
    """The class of the module."""
    tensor: str
    """Which of its tensors; empty for output and weight."""
    spreads: tuple[tuple[Spread, ...], ...]
    """By `KINDS`."""


_BEFORE = {"input": 0, "product": 1, "attention logits": 1, "": 2}
"""The order of a module's tensors; parameters other than its weight come last."""


def rows(found: Scales) -> list[Row]:
    """The modules in the order of execution."""
    places: dict[str, int] = {}
    for spread in found.spreads:  # activations come first
        places.setdefault(spread.folded, len(places))
    table: dict[tuple[int, int, str], list[list[Spread]]] = {}
    for spread in found.spreads:
        name = _tensor(spread)
        cells = table.setdefault((places[spread.folded], _BEFORE.get(name, 3), name), [[] for _ in KINDS])
        cells[KINDS.index(spread.kind)].append(spread)
    return [_row(name, tuple(map(tuple, cells))) for (_, _, name), cells in sorted(table.items())]


def _tensor(spread: Spread) -> str:
    role = spread.site.role.removeprefix(GRADIENT)
    return "" if role in ("output", "weight") else role


def _row(tensor: str, cells: tuple[tuple[Spread, ...], ...]) -> Row:
    first = next(cell[0] for cell in cells if cell)
    return Row(first.folded, first.site.kind, tensor, cells)


def deviations(found: Scales) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The headings and the rows of a table of standard deviations; of like modules, the smallest and the largest."""
    lines = []
    for row in rows(found):
        name = row.module or "the model"
        name = f"{name}: {row.tensor}" if row.tensor else name
        lines.append((name, row.kind, *(_ends([spread.std for spread in cell]) for cell in row.spreads)))
    return ("tensor", "module", "activation", "activation gradient", "weight", "weight gradient"), lines


def _ends(values: Sequence[float]) -> str:
    shown = [f"{value:.2g}" for value in (min(values), max(values))] if values else ["-"]
    return " to ".join(dict.fromkeys(shown))


def shares(found: Scales) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The headings and the rows of a table of what each format makes of the values of each kind of tensor."""
    heads = tuple(
        f"{name.removeprefix('float8_')}: {what}" for name in found.formats for what in ("zero", "subnormal", "beyond")
    )
    lines = []
    for kind in KINDS:
        cells: list[str] = []
        for place in range(len(found.formats)):
            total = sum((spread.ranges[place].counts for spread in found.of(kind)), Counts())
            cells += [
                _share(total.vanished, total.nonzero),
                _share(total.subnormal, total.nonzero),
                _share(total.beyond, total.values),
            ]
        lines.append((kind, *cells))
    return ("values of", *heads), lines


def _share(part: int, whole: int) -> str:
    value = part / whole if whole else 0.0
    return "-" if not part else f"{value:.1g}" if value < 0.001 else f"{value:.1%}"
