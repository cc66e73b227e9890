"""Which types a tensor's values went through before they were stored, as far as their bits say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from halfstep import formats
from halfstep.bits.evidence import CERTAIN, ENOUGH, could_mix, fit, fit_bits, halved
from halfstep.bits.grids import COLUMN, few_levels, fit_levels, fit_tiles, repetition
from halfstep.bits.scan import Scan
from halfstep.formats import Float
from halfstep.quant.tile import ROW, Tile, block


_CASTS = ("bf16", "fp16", "tf32")
_FEW = {"float4_e2m1fn": "e8m1", "float8_e5m2": "e8m2", "float8_e4m3fn": "e8m3"}
"""By the bits of their significands: what scaling by powers of two, block by block, makes of a format's exponents."""

_SAME = {"float8_e5m2": ("float6_e3m2fn",), "float8_e4m3fn": ("float6_e2m3fn",)}
"""Formats of as many significant bits and fewer exponents, which only show within the blocks of MX formats."""

_BLOCKS = (block(32), block(16))


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
    bits: int | None = None
    """The significant bits that all values fit, if there are fewer than any format looked for has; or half of the
    values, where these use more (`half`)."""
    half: bool = False
    step: int | None = None
    """The exponent of the power of two that all values are multiples of, where that is what they have in common."""
    levels: int | None = None
    """Where values are few, and no grid looked for: the distinct magnitudes of the tensor, or at most of each tile."""
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
        "scaled float8_e4m3fn 128x128", "17 bits", "half 9 bits", "levels row", "full" ..."""
        tile = f" {self.scale}" if self.tiled else ""
        if self.through:
            word = "+".join(self.through)
            return f"{'partly ' if self.share < 1 else ''}{'scaled ' if self.scale else ''}{word}{tile}"
        if self.levels is not None:
            return f"levels{tile}"
        if self.bits is not None:
            fixed = "" if self.step is None else f" times 2^{self.step}"
            return f"{'half ' if self.half else ''}{self.bits} bits{fixed}"
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
    cast = _cast(scan, stored, wide)
    # What values of 8 bits or less were rounded to after they were scaled.
    casts = [_format(name) for name in cast.through if cast.share == 1 and cast.scale is None]
    narrow = min((*casts, *((wide,) if wide else ())), key=lambda one: one.significant_bits, default=wide)
    return _narrow(scan, stored, wide) or _scaled(scan, stored, wide, narrow) or _few(scan, stored, narrow) or cast


@cache
def _format(name: str) -> Float:
    return formats.get(name, Float)


@cache
def stored_format(stored: str) -> Float | None:
    """The stored type; float32 for what is decoded to it, None for float64."""
    if stored == "float64":
        return None
    if stored in ("bfloat16", "float16") or stored.startswith("float8"):
        found = formats.get(stored)
        return found if isinstance(found, Float) else _format("fp32")
    return _format("fp32")


def _narrow(scan: Scan, stored: str, wide: Float | None) -> Origin | None:
    """Values of 4 significant bits or less, scaled by powers of two."""
    for name, spread in _FEW.items():
        format = _format(spread)
        if scan.table.significant_bits <= format.significant_bits and (found := fit(scan, format, wide)).accepted:
            best = scan.table.best_shift(_format(name))
            one = best is not None and best[1] == scan.table.nonzero
            scale = f"2^{best[0]}" if best is not None and one else "2^k"
            return Origin(stored, (_narrower(scan, name, wide),), scale=scale, evidence=found.bits)
    return None


def _narrower(scan: Scan, name: str, wide: Float | None) -> str:
    """Of the formats with as many significant bits the one that tiles fit: FP6 has fewer exponents than FP8."""
    match = fit_tiles(scan.places, wide, _BLOCKS) if scan.places is not None else None
    known = match is not None and not match.fit.beyond and match.format in _SAME.get(name, ())
    return match.format if match is not None and known else name


def _scaled(scan: Scan, stored: str, wide: Float | None, narrow: Float | None) -> Origin | None:
    """Values of 8 bits or less under one scale of any size, or one for each tile, rounded to `narrow` since."""
    subnormal = narrow is not None and scan.amax < 2.0**narrow.min_exponent  # whole numbers of its smallest value
    levels = scan.levels.magnitudes if scan.levels is not None else None
    if levels is not None and (match := fit_levels(levels, narrow if subnormal else wide)):
        return Origin(stored, (match.format,), scale="any", evidence=match.fit.bits)
    match = fit_tiles(scan.places, narrow) if scan.places is not None else None
    if match is None:
        return None
    share = match.fit.share if match.fit.beyond else 1.0
    return Origin(stored, (match.format,), share, scale=_named(match.tile), evidence=match.fit.bits)


def _few(scan: Scan, stored: str, narrow: Float | None) -> Origin | None:
    """Few distinct values, in all or in each tile, of no grid that is looked for."""
    if scan.levels is None and scan.places is None:
        return None
    used = min(halved(scan, narrow)[0] + 1, scan.table.significant_bits)  # half of random values leave one unused
    if scan.levels is not None and (evidence := repetition(scan.levels, narrow, used)) >= CERTAIN:
        return Origin(stored, levels=scan.levels.magnitudes.size, evidence=evidence)
    if scan.places is not None and (found := few_levels(scan.places, narrow, used)):
        tile, most, evidence = found
        return Origin(stored, levels=most, scale=_named(tile), evidence=evidence)
    return None


def _named(tile: Tile | None) -> str:
    return {ROW: "row", COLUMN: "column"}.get(tile, str(tile)) if tile is not None else "any"


def _cast(scan: Scan, stored: str, wide: Float | None) -> Origin:
    """bf16, fp16, both, or neither; from 64 bits float32 too."""
    casts = {name: _format(name) for name in (*_CASTS, *(("fp32",) if wide is None else ()))}
    used, most = scan.table.significant_bits, wide.significant_bits if wide else 53
    narrow = {name: format for name, format in casts.items() if format.significant_bits >= used}
    fits = {name: fit(scan, format, wide) for name, format in narrow.items()}
    held = [name for name, found in fits.items() if found.accepted]
    # Of two that hold, one may follow from the other: beside the more evident one it must be evident itself.
    held.sort(key=lambda name: -fits[name].bits)
    held = [a for i, a in enumerate(held) if all(fit(scan, casts[a], casts[b]).accepted for b in held[:i])]
    full = used >= most - 1
    half, evidence = halved(scan, wide)
    if evidence >= CERTAIN and not held and not full:
        return Origin(stored, bits=half, half=True, evidence=evidence)
    steps = (None, scan.table.last_bit)
    fewer = {step: fit_bits(scan, [wide, *(casts[name] for name in held)], step) for step in steps if not full}
    if max(fewer.values(), default=0.0) >= CERTAIN:
        step = scan.table.last_bit if fewer[scan.table.last_bit] >= fewer[None] + CERTAIN else None
        whole = used if step is None else int(scan.table.rows[-1]) - step + 1
        return Origin(stored, bits=whole, step=step, evidence=fewer[step])
    if held == ["tf32"] and (best := scan.table.best_shift(casts["fp16"])) and best[1] == scan.table.nonzero:
        return Origin(stored, ("fp16",), scale=f"2^{best[0]}", evidence=fits["tf32"].bits)
    if held:
        return Origin(stored, tuple(held), evidence=min(fits[name].bits for name in held))
    partly = {}
    if could_mix(scan, max(format.significant_bits for format in casts.values())):
        fits = {name: fit(scan, format, wide, used) for name, format in casts.items()}
        partly = {name: found for name, found in fits.items() if found.mixed}
    if partly:
        name, found = max(partly.items(), key=lambda item: item[1].bits)
        return Origin(stored, (name,), found.share, evidence=found.bits)
    if evidence >= CERTAIN:
        return Origin(stored, bits=half, half=True, evidence=evidence)
    return Origin(stored, full=full)
