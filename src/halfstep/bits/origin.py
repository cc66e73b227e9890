"""Which types a tensor's values went through before they were stored, as far as their bits show."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from halfstep import formats
from halfstep.bits.factors import CODE_BITS, Looks, come_again, copied, factored, few_levels, looks, powers, repetition
from halfstep.bits.grids import CERTAIN, CHOSEN, ENOUGH, first_looks, fit, fit_bits, fit_levels, fit_tiles, halved
from halfstep.bits.scan import Scan
from halfstep.bits.values import named
from halfstep.formats import Float
from halfstep.kernels.cpu.looks import Repeats
from halfstep.kernels.cpu.tables import First
from halfstep.quant import TENSOR


_FEW = {2: "e8m1", 3: "e8m2", 4: "e8m3"}
"""By significant bits: the format of many exponents that power-of-two scales per tile make of a code format."""

STEPS = "equal steps"
"""The alternative to quantized integers under one scale: values counted in equal steps."""

MOST, LEAST = 0.5, 0.01
"""The least shares of values that must tell something for a verdict that is certain (MOST) or likely (LEAST)."""


@dataclass(frozen=True)
class Origin:
    """What the bits of one tensor show.

    `through` holds the types narrower than the stored one that every value fits (with a `share` below 1: that share of
    them); it is empty where the values use all the bits of the stored type (`full`) or tell nothing.
    """

    stored: str
    through: tuple[str, ...] = ()
    share: float = 1.0
    """The share of the telling values that fit."""
    full: bool = False
    """Whether values use all bits of the stored type."""
    bits: int | None = None
    """The significant bits that all values fit, if fewer than the formats looked for have; or that half of the values
    fit, if the others use more (`half`)."""
    half: bool = False
    step: int | None = None
    """The exponent of the power of two of which all values are multiples, if that is what they have in common."""
    levels: int | None = None
    """Where values are few and on no known grid: the distinct magnitudes of the tensor, or the most of one tile."""
    scale: str | None = None
    """How values of 8 bits or less, or of fp16, were scaled: by one power of two ("2^-7"), several ("2^k"), a float
    ("any"), or a float per tile ("row", "128x128", "1x32" ...), for which the first rows are the evidence."""
    also: tuple[str, ...] = ()
    """Other types that the values could have gone through: the bits do not distinguish them."""
    copied: bool = False
    """Whether rows, columns or blocks are copies of others."""
    evidence: float = 0.0
    """In bits: random mantissas fit with a probability of 2^-evidence. For `full`, 0: a counterexample is proof."""
    telling: int = 0
    """The number of values that tell something: neither powers of two nor integers below 2^24."""
    told: float = 1.0
    """Their share of the nonzero values (of all, where nearly all are zero), which bounds the confidence; 1 where codes
    were found, since powers of two are codes too."""
    distinct: int = 0
    """The number of distinct magnitudes among them, as far as they were counted."""
    counted: bool = True
    """Whether values were counted; a quick look has no evidence."""

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
        """Whether there is a float scale per tile."""
        return self.scale is not None and self.scale != "any" and not self.scale.startswith("2^")

    @property
    def factored(self) -> bool:
        """Whether these are values of a 16-bit type times float factors."""
        return self.scale in ("any", "row", "column") and self.through[:1] in (("bf16",), ("fp16",))

    @property
    def confidence(self) -> str:
        """ "certain", "likely", "none", or "not counted"."""
        if not self.full and not self.counted:
            return "not counted"
        if not self.full and self.evidence < ENOUGH:
            return "none"
        return bounded("certain" if self.full or self.evidence >= CERTAIN else "likely", self.told)


def bounded(confidence: str, share: float) -> str:
    """A confidence, lowered where few values tell something: certain needs at least half of them, likely a
    hundredth."""
    if confidence not in ("certain", "likely") or share >= MOST:
        return confidence
    return "likely" if share >= LEAST else "none"


def origin(scan: Scan, stored: str) -> Origin:
    """The origin of a scanned tensor, stored as `stored` (torch's name of the dtype)."""
    return origins([scan], stored)[0]


def origins(scans: Sequence[Scan], stored: str) -> list[Origin]:
    """The origins of several tensors, all stored in that dtype."""
    telling = [scan for scan in scans if scan.table.telling_count]
    looked = looks(telling, stored_format(stored), list(_casts(stored_format(stored)).values()))
    return [_origin(scan, stored, next(looked)) if scan.table.telling_count else Origin(stored) for scan in scans]


def _origin(scan: Scan, stored: str, look: Looks) -> Origin:
    found, telling = _found(scan, stored, look), scan.table.telling_count
    share = 1.0 if found.scale is not None or found.levels is not None else _telling_share(scan, telling)
    return Origin(**(vars(found) | {"telling": telling, "told": share, "distinct": scan.magnitudes}))


def _telling_share(scan: Scan, telling: int) -> float:
    """The share of telling values: of the nonzero ones, unless nearly all are zero."""
    used, size = scan.table.nonzero, scan.table.size
    return telling / (used if used >= LEAST * size else size)


def _found(scan: Scan, stored: str, look: Looks) -> Origin:
    wide = stored_format(stored)
    if wide is not None and wide.bits <= 8:
        return Origin(stored, full=True)
    half = halved(scan, look.table)
    cast = _cast(scan, stored, wide, look.table, half)
    # The type to which values of 8 bits or less were rounded after scaling.
    casts = [float_named(name) for name in cast.through if cast.share == 1 and cast.scale is None]
    narrow = min((*casts, *((wide,) if wide else ())), key=lambda one: one.significant_bits, default=wide)
    half = half if narrow is wide else halved(scan, first_looks([scan.table], narrow, ())[0])
    used = min(half[0] + 1, scan.table.significant_bits)  # half of random values leave one bit unused
    places = None if scan.again == 0 else scan.places
    looked = look.repeats
    again = places is not None and looked is not None and come_again(places, looked.parts, narrow, used)
    different = copied(places) if places is not None and looked is not None and looked.alike else None
    if different is not None:  # the values of copies count once
        once = replace(scan, distinct=int(scan.distinct * different))
        cast = replace(_cast(once, stored, wide, look.table, halved(once, look.table)), copied=True)
    found = _exact(scan, stored, wide) or _scaled(scan, stored, wide, narrow, look.grids if narrow is wide else None)
    found = found or _factored(scan, stored, wide, cast, looked)
    if found is None and different is None:
        found = _few(scan, stored, narrow, used, again)
    return found or cast


@cache
def float_named(name: str) -> Float:
    """The binary format of that name."""
    return formats.get(name, Float)


@cache
def stored_format(stored: str) -> Float | None:
    """The format of the stored type; float32 for types that are decoded to it, None for float64."""
    if stored == "float64":
        return None
    found = formats.get(stored) if stored in ("bfloat16", "float16") or stored.startswith("float8") else None
    return found if isinstance(found, Float) else float_named("fp32")


def _exact(scan: Scan, stored: str, wide: Float | None) -> Origin | None:
    """The origin as codes times powers of two: values of 7 significant bits or less."""
    used, most = scan.table.significant_bits, wide.significant_bits if wide else 53
    if used > min(CODE_BITS, most - 1):
        return None
    spread = _FEW.get(max(used, 2))
    evidence = fit(scan, float_named(spread), wide).bits if spread else fit_bits(scan, [wide])
    found = powers(scan) if evidence >= ENOUGH else None
    if found is None:
        return None
    one = found.tile == TENSOR and int(scan.table.rows[-1]) - scan.table.last_bit < used
    scale = f"2^{scan.table.last_bit}" if one else "2^k"
    if not found.format.startswith("int"):
        best = scan.table.best_shift(float_named(found.format))
        scale = f"2^{best[0]}" if best is not None and best[1] == scan.table.nonzero else "2^k"
    also = found.also or ((STEPS,) if found.format.startswith("int") and one else ())
    return Origin(stored, (found.format,), scale=scale, also=also, evidence=evidence)


def _scaled(
    scan: Scan, stored: str, wide: Float | None, narrow: Float | None, grids: Sequence[str] | None
) -> Origin | None:
    """The origin as values of 8 bits or less with one float scale, or one per tile, rounded to `narrow` afterwards."""
    subnormal = narrow is not None and scan.amax < 2.0**narrow.min_exponent  # multiples of its smallest value
    match = fit_levels(scan.levels, narrow if subnormal else wide) if scan.levels is not None else None
    exact = scan.table.significant_bits <= CODE_BITS  # `powers` has examined integers of these bits
    if match is not None and not (match.even and exact):
        also = (STEPS,) if match.even else match.also
        return Origin(stored, (match.format,), scale="any", also=also, evidence=match.fit.bits)
    match = fit_tiles(scan.places, narrow, grids) if scan.places is not None else None
    if match is None or (match.even and (exact or match.fit.beyond)):
        return None
    share, also = match.fit.share if match.fit.beyond else 1.0, (STEPS,) if match.even else match.also
    return Origin(stored, (match.format,), share, scale=named(match.tile), also=also, evidence=match.fit.bits)


def _few(scan: Scan, stored: str, narrow: Float | None, used: int, again: bool) -> Origin | None:
    """The origin as few distinct values, in all or per tile, on no known grid."""
    if scan.levels is not None and (evidence := repetition(scan.levels, narrow, used)) >= CERTAIN:
        return Origin(stored, levels=scan.levels.magnitudes.size, evidence=evidence)
    if scan.places is not None and again and (found := few_levels(scan.places, narrow, used)):
        tile, most, evidence = found
        return Origin(stored, levels=most, scale=named(tile), evidence=evidence)
    return None


def _factored(scan: Scan, stored: str, wide: Float | None, cast: Origin, looked: Repeats | None) -> Origin | None:
    """The origin as a narrower type's values times factors, if they are not that type's values themselves."""
    if scan.places is None or looked is None or not (cast.full or cast.half or cast.share < 1):
        return None
    found = factored(scan.places, looked, wide)
    if found is None:
        return None
    name, tile, evidence = found
    also = (STEPS,) if name.startswith("int") else ()
    return Origin(stored, (name,), scale=named(tile), also=also, evidence=evidence)


@cache
def _casts(wide: Float | None) -> dict[str, Float]:
    """The casts that are looked for; for float64 also from float32."""
    return {name: float_named(name) for name in ("bf16", "fp16", "tf32", *(("fp32",) if wide is None else ()))}


def _cast(scan: Scan, stored: str, wide: Float | None, look: First, half: tuple[int, float]) -> Origin:
    """The origin as a cast from bf16, fp16, both, or neither; for float64 also from float32."""
    casts = _casts(wide)
    used, most = scan.table.significant_bits, wide.significant_bits if wide else 53
    likely = [name for i, name in enumerate(casts) if look.fits >> i & 1 and casts[name].significant_bits >= used]
    fits = {name: fit(scan, casts[name], wide) for name in likely}
    held = [name for name, found in fits.items() if found.accepted]
    # If two types hold the values, one may imply the other: the less evident one needs evidence beyond the other.
    held.sort(key=lambda name: -fits[name].bits)
    held = [a for i, a in enumerate(held) if all(fit(scan, casts[a], casts[b]).accepted for b in held[:i])]
    # Sign codes use all bits of their scale, so more than CHOSEN magnitudes are required.
    full = used >= most - 1 and (scan.magnitudes > CHOSEN or scan.table.nonzero <= 2 * CHOSEN)
    averaged = Origin(stored, bits=half[0], half=True, evidence=half[1]) if half[1] >= CERTAIN else None
    if averaged and not held and not full:
        return averaged
    steps = () if full else (None, scan.table.last_bit)
    fewer = {step: fit_bits(scan, [wide, *(casts[name] for name in held)], step) for step in steps}
    if max(fewer.values(), default=0.0) >= CERTAIN:
        step = scan.table.last_bit if fewer[scan.table.last_bit] >= fewer[None] + CERTAIN else None
        whole = used if step is None else int(scan.table.rows[-1]) - step + 1
        return Origin(stored, bits=whole, step=step, evidence=fewer[step])
    if held == ["tf32"] and (best := scan.table.best_shift(casts["fp16"])) and best[1] == scan.table.nonzero:
        return Origin(stored, ("fp16",), scale=f"2^{best[0]}", evidence=fits["tf32"].bits)
    if held:
        same = [b for b in fits if fits[b].accepted and not all(fit(scan, casts[a], casts[b]).accepted for a in held)]
        also = tuple(name for name in same if name not in held) or (
            ("a uniform draw",) if _uniform(scan, stored) else ()
        )
        return Origin(stored, tuple(held), also=also, evidence=min(fits[name].bits for name in held))
    partly = {}
    if look.mixes:
        fits = {name: fit(scan, casts[name], wide, used) for i, name in enumerate(casts) if look.mixes >> i & 1}
        partly = {name: found for name, found in fits.items() if found.mixed}
    if partly:
        name, found = max(partly.items(), key=lambda item: item[1].bits)
        return Origin(stored, (name,), found.share, evidence=found.bits)
    return averaged or Origin(stored, full=full)


def _uniform(scan: Scan, stored: str) -> bool:
    """Whether bf16 values that are multiples of fp16's smallest value could be uniform random numbers on such a grid:
    most of those are in the two highest octaves, but few of trained weights."""
    return stored == "bfloat16" and 2 * int(scan.table.exponents[-2:].sum()) > scan.table.nonzero


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_MULTIPLES = 16
"""The smallest value of a table with a fixed step is at most this many steps; rounded values use all bits."""


def narrowed(scan: Scan, stored: str) -> str | None:
    """The 16-bit type to which a tensor's values were rounded: its own, or, for float32, the one that every value fits.
    None where the values may have been exact in it: counters, powers of two, the bounds of a mask, few values, values
    of fewer bits, and multiples of one step (k / 128, slopes of powers of two times positions)."""
    name = {"bfloat16": "bf16", "float16": "fp16"}.get(stored)
    if stored == "float32":
        said = origin(scan, stored)
        name = said.through[0] if said.key in ("bf16", "fp16", "bf16+fp16", "fp16+bf16") else None
    if name is None or scan.magnitudes <= CHOSEN:
        return None
    format, step = formats.get(name, Float), 2.0**scan.table.last_bit
    all_bits = scan.table.significant_bits == format.significant_bits
    subnormal = scan.smallest < 2.0**format.min_exponent  # subnormals have the format's steps, not a table's
    stepped = scan.amax <= step * 2**format.significant_bits or (not subnormal and scan.smallest < _MULTIPLES * step)
    return name if all_bits and not stepped else None


def progression(tensor: torch.Tensor) -> str | None:
    """The 16-bit type to which positions, or other values at equal steps along one of the last two dimensions, were
    rounded: the tensor is in that type or in float32, and rounding equal steps gives it, while the steps themselves do
    not. Its bits do not show it, since integers have few.

    >>> progression(torch.arange(1024, dtype=torch.float32, device="cpu").bfloat16()), progression(torch.ones(9, 9))
    ('bf16', None)
    """
    names = [n for n, dtype in _DTYPES.items() if tensor.dtype in (dtype, torch.float32)]
    for values in (tensor, tensor.mT) if tensor.dim() > 1 else (tensor,) if tensor.dim() else ():
        if values.shape[-1] <= CHOSEN:
            continue
        found = values.detach().double()
        count = torch.arange(found.shape[-1], dtype=torch.float64, device=found.device)
        steps = found[..., :1] + (found[..., 1:2] - found[..., :1]) * count
        if not torch.equal(steps, found):
            return next((n for n in names if torch.equal(steps.to(_DTYPES[n]).double(), found)), None)
    return None
