"""The tab of the number formats: each as the numbers that its values follow from."""

from __future__ import annotations

from math import isfinite
from typing import Any

from halfstep import formats
from halfstep.cli.formats.table import bits_per_value, kind, layout, tile_text
from halfstep.formats import Codebook, Float, Format, Integer, Posit
from halfstep.formats.exact import ROUNDINGS


def table() -> list[dict[str, Any]]:
    """Every scalar format for the page's script, widest first."""
    return [described(formats.get(name)) for name in formats.names()]


def described(format: Format) -> dict[str, Any]:
    """A format for the page's script: its limits, and what its codes are read by."""
    found: dict[str, Any] = {
        name: getattr(format, name) for name in ("name", "bits", "max", "min", "smallest", "eps", "ties")
    }
    found |= {"aliases": list(format.aliases), "source": format.source, "layout": f"{kind(format)}, {layout(format)}"}
    found |= {"bytes": f"{format.bytes:g}", "infinity": format.has_infinity, "nan": format.has_nan}
    found |= {"negativeZero": format.has_negative_zero, "least_normal": None, "specials": None}
    found["overflowFrom"] = format.overflow_from if isfinite(format.overflow_from) else None
    if isinstance(format, Float):
        own = {"exponent": format.exponent_bits, "mantissa": format.mantissa_bits, "bias": format.bias}
        return found | own | {"kind": "float", "specials": format.specials, "least_normal": format.min_normal}
    if isinstance(format, Posit):
        return found | {"kind": "posit", "es": format.es}
    if isinstance(format, Integer):
        return found | {"kind": "integer", "low": format.low, "fraction": format.fraction_bits}
    if isinstance(format, Codebook):
        return found | {"kind": "codebook", "table": list(format.table)}
    return found | {"kind": "exponent"}


def facts() -> dict[str, Any]:
    """What formats.html is written from."""
    blocks = [formats.get_block(name) for name in formats.block_names()]
    rows = [
        {"name": b.name, "element": b.element.name, "tile": tile_text(b), "bits": bits_per_value(b)} for b in blocks
    ]
    return {"formats": table(), "roundings": ROUNDINGS, "blocks": rows}
