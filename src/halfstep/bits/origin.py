"""Which types a tensor's values went through before they were stored, as far as their bits say."""

from __future__ import annotations

from dataclasses import dataclass, replace

from halfstep import formats
from halfstep.bits.evidence import CERTAIN, ENOUGH, Fit, fit
from halfstep.bits.grids import fit_levels, fit_tiles
from halfstep.bits.scan import Scan
from halfstep.formats import Float
from halfstep.quant.tile import ROW


_CASTS = ("bf16", "fp16", "tf32")
_FEW = {"float4_e2m1fn": "e8m1", "float8_e5m2": "e8m2", "float8_e4m3fn": "e8m3"}
"""By the bits of their significands: what scaling by powers of two, block by block, makes of a format's exponents."""


@dataclass(frozen=True)
class Origin:
    """What the bits of one tensor say.

    `through` holds the types narrower than the stored one that every value fits (with a `share` below 1: that share);
    it is empty where the values use all the bits of the stored type (`full`) or tell nothing.
    """

    stored: str
    through: tuple[str, ...] = ()
    share: float = 1.0
    """The share of the telling values that fit."""
    full: bool = False
    """Values use all bits of the stored type."""
    scale: str | None = None
    """How values of 8 bits or less, or of fp16, were scaled: by one power of two ("2^-7"), several ("2^k"), a number
    of any size ("any"), or one for each tile ("row", "128x128", "1x32" ...), of which the first rows are evidence."""
    evidence: float = 0.0
    """Bits: random mantissas fit so by a chance of 2^-evidence. For `full`, 0: a counterexample needs no chance."""
    telling: int = 0
    """Values that could tell: neither powers of two nor whole numbers below 2^24."""
    distinct: int = 0
    """Different magnitudes among these, as far as they were looked for."""
    counted: bool = True
    """Whether values were counted; a quick look weighs nothing."""

    @property
    def key(self) -> str:
        """The conclusion in one word, to group tensors by: "bf16", "bf16+fp16", "scaled float8_e4m3fn",
        "scaled float8_e4m3fn 128x128", "full" ..."""
        if self.through:
            word = "+".join(self.through)
            tile = f" {self.scale}" if self.tiled else ""
            return f"{'partly ' if self.share < 1 else ''}{'scaled ' if self.scale else ''}{word}{tile}"
        return "full" if self.full else "unknown"

    @property
    def tiled(self) -> bool:
        """Whether there is a scale of any size for each tile."""
        return self.scale is not None and self.scale != "any" and not self.scale.startswith("2^")

    @property
    def confidence(self) -> str:
        """certain, likely, none, or not counted."""
        if self.full:
            return "certain"
        if not self.counted:
            return "not counted"
        if self.evidence < ENOUGH:
            return "none"
        return "certain" if self.evidence >= CERTAIN else "likely"


def origin(scan: Scan, stored: str) -> Origin:
    """What the bits of a scanned tensor say, which is stored as `stored` (a name of torch's)."""
    telling = int(scan.table.telling.sum())
    found = _found(scan, stored) if telling else Origin(stored)
    return replace(found, telling=telling, distinct=scan.magnitudes)


def _found(scan: Scan, stored: str) -> Origin:
    wide = stored_format(stored)
    if wide is not None and wide.bits <= 8:
        return Origin(stored, full=True)
    if found := _narrow(scan, stored, wide):
        return found
    found = _cast(scan, stored, wide)
    return _tiled(scan, found, wide) or found


def stored_format(stored: str) -> Float | None:
    """The stored type; float32 for what is decoded to it, None for float64."""
    if stored == "float64":
        return None
    if stored in ("bfloat16", "float16") or stored.startswith("float8"):
        found = formats.get(stored)
        return found if isinstance(found, Float) else formats.get("fp32", Float)
    return formats.get("fp32", Float)


def _narrow(scan: Scan, stored: str, wide: Float | None) -> Origin | None:
    """Values of 8 bits or less, scaled: by a power of two, or by any number where few distinct values are left."""
    for name, spread in _FEW.items():
        format = formats.get(spread, Float)
        if scan.table.significant_bits <= format.significant_bits and (found := fit(scan, format, wide)).accepted:
            best = scan.table.best_shift(formats.get(name, Float))
            one = best is not None and best[1] == scan.table.nonzero
            scale = f"2^{best[0]}" if best is not None and one else "2^k"
            return Origin(stored, (name,), scale=scale, evidence=found.bits)
    if scan.levels is not None and (match := fit_levels(scan.levels, wide)):
        return Origin(stored, (match.format,), scale="any", evidence=match.fit.bits)
    return None


def _tiled(scan: Scan, cast: Origin, wide: Float | None) -> Origin | None:
    """Values of 8 bits or less that have a scale for each tile, rounded to what they were cast to since."""
    if scan.corner is None:
        return None
    if cast.through and cast.share == 1:  # of a format of 16 bits or tf32
        casts = [formats.get(name, Float) for name in cast.through] + ([wide] if wide else [])
        wide = min(casts, key=lambda format: format.significant_bits)
    match = fit_tiles(scan.corner, wide)
    if match is None or match.tile is None:
        return None
    tile = "row" if match.tile == ROW else str(match.tile)
    return Origin(cast.stored, (match.format,), scale=tile, evidence=match.fit.bits)


def _cast(scan: Scan, stored: str, wide: Float | None) -> Origin:
    """bf16, fp16, both, or neither; from 64 bits float32 too."""
    casts = {name: formats.get(name, Float) for name in (*_CASTS, *(("fp32",) if wide is None else ()))}
    fits = {name: fit(scan, format, wide) for name, format in casts.items()}
    held = [name for name, found in fits.items() if found.accepted]
    # Of two that hold, one may follow from the other: beside the more evident one it must be evident itself.
    held.sort(key=lambda name: -fits[name].bits)
    held = [a for i, a in enumerate(held) if all(fit(scan, casts[a], casts[b]).accepted for b in held[:i])]
    if held == ["tf32"] and (best := scan.table.best_shift(casts["fp16"])) and best[1] == scan.table.nonzero:
        return Origin(stored, ("fp16",), scale=f"2^{best[0]}", evidence=fits["tf32"].bits)
    if held:
        return Origin(stored, tuple(held), evidence=min(fits[name].bits for name in held))
    partly = {name: found for name, found in fits.items() if _stands_out(found)}
    if partly:
        name, found = max(partly.items(), key=lambda item: item[1].bits)
        return Origin(stored, (name,), found.share, evidence=found.bits)
    most = wide.significant_bits if wide else 53
    return Origin(stored, full=scan.table.significant_bits >= most - 1)


def _stands_out(found: Fit) -> bool:
    """Whether clearly more values fit than random mantissas would: cast once, and partly written since."""
    return found.bits >= CERTAIN and found.share >= max(0.01, 3 * found.expected)
