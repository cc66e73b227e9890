"""The tables of `halfstep formats`, and a format as JSON."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer

from halfstep.cli.formats.number import value_text, width
from halfstep.cli.terminal import show_table
from halfstep.formats import BlockFormat, Codebook, Float, Format, Integer, Posit, PowerOfTwo


def show_scalar_table(members: Sequence[Format]) -> None:
    """Print a table of scalar formats."""
    columns = ["format", "bits", "kind", "fields", "max", "normal", "smallest", "eps", "beyond", "also"]
    rows = [
        (
            f.name,
            str(f.bits),
            kind(f),
            layout(f),
            f"{f.max:.6g}",
            value_text(f.min_normal) if isinstance(f, Float) else "-",
            value_text(f.smallest),
            value_text(f.eps),
            specials(f),
            ", ".join(f.aliases),
        )
        for f in members
    ]
    _show_what_fits(columns, rows, ("also", "beyond", "kind", "normal", "eps", "fields"), ("bits", "max"))


def show_block_table(members: Sequence[BlockFormat]) -> None:
    """Print a table of block formats."""
    columns = ["block format", "bits/value", "element", "tile", "scale rules", "also"]
    rows = [
        (b.name, bits_per_value(b), b.element.name, tile_text(b), ", ".join(b.rules), ", ".join(b.aliases))
        for b in members
    ]
    _show_what_fits(columns, rows, ("also", "scale rules"), ("bits/value",))


def _show_what_fits(
    columns: Sequence[str], rows: Sequence[Sequence[str]], optional: Sequence[str], right: Sequence[str]
) -> None:
    """Leave columns out, in the order of `optional`, until the table fits the terminal, and say so."""
    sizes = {c: max(len(c), *(len(row[i]) for row in rows)) + 2 for i, c in enumerate(columns)}
    dropped: list[str] = []
    while sum(sizes.values()) - 2 > width() and len(dropped) < len(optional):
        dropped.append(optional[len(dropped)])
        del sizes[dropped[-1]]
    kept = [i for i, c in enumerate(columns) if c in sizes]
    show_table([columns[i] for i in kept], [[row[i] for i in kept] for row in rows], right)
    if dropped:
        typer.echo(textwrap.fill(f"({', '.join(dropped)}: in a wider terminal, or with --json)", width()))


def kind(format: Format) -> str:
    """The format's kind in words."""
    return re.sub(r"(?<!^)(?=[A-Z])", " ", type(format).__name__).lower()


def layout(format: Format) -> str:
    """How the bits are split."""
    if isinstance(format, Float):
        return f"1-{format.exponent_bits}-{format.mantissa_bits}, bias {format.bias}"
    if isinstance(format, Posit):
        return f"es {format.es}"
    if isinstance(format, Integer):
        steps = f"/{1 << format.fraction_bits}" if format.fraction_bits else ""
        return f"{format.low}..{format.high}{steps}"
    if isinstance(format, PowerOfTwo):
        return "0-8-0, bias 127"
    return f"{1 << format.bits} entries"


def specials(format: Format) -> str:
    """Infinity and NaN, in two words."""
    return {(True, True): "inf, NaN", (True, False): "inf", (False, True): "NaN"}.get(
        (format.has_infinity, format.has_nan), "none"
    )


def parameters(format: Format) -> dict[str, Any]:
    """A format as JSON."""
    data: dict[str, Any] = {"name": format.name, "aliases": list(format.aliases), "kind": kind(format)}
    names = ["bits", "storage_bits", "bytes", "max", "min", "smallest", "eps", "signed", "has_infinity", "has_nan"]
    data |= {name: getattr(format, name) for name in [*names, "has_negative_zero", "ties", "source"]}
    own = {
        Float: ("exponent_bits", "mantissa_bits", "bias", "specials", "min_normal", "min_subnormal"),
        Posit: ("es",),
        Integer: ("low", "high", "fraction_bits"),
        Codebook: ("table",),
    }
    return data | {name: getattr(format, name) for name in own.get(type(format), ())}


def block_parameters(block: BlockFormat) -> dict[str, Any]:
    """A block format as JSON."""
    return {**asdict(block), "element": block.element.name, "bits_per_value": block.bits}


def tile_text(block: BlockFormat) -> str:
    """Which values share a scale."""
    rows, columns = block.tile
    if rows == columns == 0:
        return "the tensor"
    return "a row" if (rows, columns) == (1, 0) else f"{rows or 'all'} x {columns or 'all'}"


def bits_per_value(block: BlockFormat) -> str:
    """Bits per value; the scale of a whole row or tensor is beyond counting."""
    return f"{block.bits:.6g}" if all(block.tile) else f"{block.bits:g} + scale"
