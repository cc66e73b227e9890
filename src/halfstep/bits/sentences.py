"""Verdicts on many tensors, and on quantized weights, in sentences, with their confidence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from halfstep.bits.grids import CHOSEN
from halfstep.bits.origin import MOST, STEPS, Origin, bounded
from halfstep.text import grouped, percent


@dataclass(frozen=True)
class Layer:
    """One quantized weight: the tensor of its codes, and its other `parts`."""

    codes: str
    scheme: str
    format: str
    scale: str
    """The type of the scales; "" where codes have no separate scales."""
    tile: str
    """What shares a scale: "128x128 block", "row", "tensor", "64 codes" ..."""
    values: int
    code_bits: int
    nbytes: int
    """Bytes of codes and parts."""
    parts: tuple[str, ...] = ()
    also: str = ""
    powers: bool = False
    """Whether all scales are powers of two."""

    @property
    def text(self) -> str:
        """A description of codes and scales, in words."""
        powers = " (powers of two)" if self.powers else ""
        also = f" {self.also}" if self.also else ""
        if not self.scale:
            return f"{self.format} codes{also}"
        if self.tile == "tensor":
            return f"{self.format} codes with one {self.scale} scale{also}"
        return f"{self.format} codes with a {self.scale} scale{powers} for each {self.tile}{also}"


@dataclass(frozen=True)
class SchemeReport:
    """All layers of one scheme with the same description."""

    scheme: str
    text: str
    layers: int
    values: int
    nbytes: int

    @property
    def bits(self) -> float:
        """Bits per value, of codes and scales."""
        return 8 * self.nbytes / self.values

    @property
    def size(self) -> str:
        """The number of layers and the bits per weight, in words."""
        return f"{self.layers} {self.scheme} layer{'s' if self.layers > 1 else ''} of {self.bits:.4g} bits a weight"


def summed(layers: Sequence[Layer]) -> tuple[SchemeReport, ...]:
    """A report per scheme and description, the most values first."""
    order = sorted(layers, key=lambda layer: (layer.scheme, layer.text))
    found = []
    for (scheme, text), group in groupby(order, key=lambda layer: (layer.scheme, layer.text)):
        same = list(group)
        found.append(SchemeReport(scheme, text, len(same), sum(x.values for x in same), sum(x.nbytes for x in same)))
    return tuple(sorted(found, key=lambda one: -one.values))


@dataclass(frozen=True)
class Evidence:
    """The evidence of one tensor for a verdict: its values, its origin (None: not floating point), fp16's
    subnormals."""

    dtype: str
    numel: int
    origin: Origin | None
    nonzero: int = 0
    fp16_subnormal: int = 0
    layer: Layer | None = None
    """The quantized weight of a tensor of codes; then `numel` counts its weights."""
    nbytes: int = 0
    codes: bool = False
    """Whether these are integers as quantizers pack them, in no known layout."""

    @cached_property
    def key(self) -> str:
        """The finding in a word or two."""
        if self.layer is not None:
            return f"{self.layer.scheme}, {self.layer.tile}"
        return "codes" if self.codes else self.origin.key if self.origin else "none"

    @property
    def confidence(self) -> str:
        """The confidence of the finding: "named" where it follows from names, types and shapes."""
        return "named" if self.layer is not None else self.origin.confidence if self.origin else "none"


def sentence(same: Sequence[Evidence]) -> str:
    """A description of tensors with one stored type and one kind of origin."""
    stored, origin = same[0].dtype, same[0].origin
    if same[0].layer is not None:
        return _quantised([one.layer for one in same if one.layer is not None])
    if origin is None:
        return f"{stored}: no floating-point values to read"
    if origin.key != "unknown":
        return f"{_known(same, origin)}{_spoke(same)}"
    if not any(one.origin.telling for one in same if one.origin):
        return f"stored {stored}, only zeros, powers of two and small integers, which fit any format"
    if all(one.origin.counted and one.origin.distinct <= CHOSEN for one in same if one.origin):
        return f"stored {stored}, too few different values to tell"
    return f"stored {stored}, too few bits in use for a full {stored} and no format that explains it"


def _known(same: Sequence[Evidence], origin: Origin) -> str:
    if origin.through:
        return _factored(same, origin) if origin.factored else _went_through(same, origin)
    if origin.levels is not None:
        return _levels(same, origin)
    return _bits(same, origin) if origin.bits is not None else f"stored {origin.stored}, {_full(same)}"


def _spoke(same: Sequence[Evidence]) -> str:
    """A clause on few telling values, or copies."""
    origins = [one.origin for one in same if one.origin]
    told = sum(one.told for one in origins) / len(origins)
    copied = "; rows, columns or blocks repeat others" if any(one.copied for one in origins) else ""
    if told >= MOST:
        return copied
    rest = "the others are zeros, powers of two or small integers"
    return f"{copied}; only {percent(told)} of the values are evidence, {rest}"


def _quantised(layers: Sequence[Layer]) -> str:
    one, *others = summed(layers)
    more = f" (and {len(others)} variant{'s' * (len(others) > 1)})" if others else ""
    return f"{one.scheme}: {one.text}{more}"


def _factored(same: Sequence[Evidence], origin: Origin) -> str:
    factor = "one factor" if origin.scale == "any" else f"a factor for each {origin.scale}"
    return (
        f"stored {origin.stored}, every value looked at has {origin.through[0]}'s significant bits times {factor}: "
        f"{_either(same)} values that were scaled since, by a number or by a norm folded into them"
    )


def _either(same: Sequence[Evidence]) -> str:
    """The types that values went through, and the alternatives that none of the tensors rules out."""
    origins = [one.origin for one in same if one.origin]
    also = set.intersection(*(set(one.also) for one in origins)) - {STEPS}
    return " or ".join((" and ".join(origins[0].through), *sorted(also)))


def _counted(same: Sequence[Evidence]) -> str:
    counted = all(STEPS in one.origin.also for one in same if one.origin)
    return ", or counted in equal steps (updates by signs, frequencies)" if counted else ""


def _went_through(same: Sequence[Evidence], origin: Origin) -> str:
    stored = same[0].dtype
    names = " and ".join(origin.through)
    if origin.tiled and origin.share < 1:
        shares = [one.origin.share for one in same if one.origin]
        return (
            f"stored {stored}, {percent(sum(shares) / len(shares))} of {_pieces(origin)} looked at exactly {names} "
            f"times a scale for each: quantised to {_either(same)} in part, or partly written since"
        )
    if origin.share < 1:
        shares = [one.origin.share * one.numel for one in same if one.origin]
        share = sum(shares) / values_of(same)
        return (
            f"stored {stored}, {percent(share)} of values exactly {names}, the others in full: {names} values, partly "
            "written since (trained on, merged or averaged)"
        )
    if origin.tiled:
        tile = "row" if origin.scale == "row" else f"{origin.scale} block"
        return (
            f"stored {stored}, every value looked at exactly {names} times a scale for each {tile}: "
            f"quantised to {_either(same)} {'by rows' if tile == 'row' else 'in blocks'} before it was stored"
            f"{_counted(same)}"
        )
    if names == "fp16" and origin.scale is not None:
        return (
            f"stored {stored}, every value exactly fp16 times a power of two: weights kept in scaled fp16 (FP8-LM), "
            "or tf32 (bits cannot tell which)"
        )
    if origin.scale is not None:
        scales = {one.origin.scale for one in same if one.origin}
        word = "scales of any size" if "any" in scales else "powers of two" if len(scales) > 1 else f"{scales.pop()}"
        past = f"quantised to {_either(same)} before it was stored{_counted(same)}"
        return f"stored {stored}, every value exactly {names} times {word}: {past}"
    if stored == "float16" and "bf16" in origin.through:
        return f"stored float16{_subnormals(same)}, every value exactly bf16: cast from bf16"
    if len(origin.through) > 1:
        return f"stored {stored}, every value exactly {names}: a chain of casts, bf16 to fp16 or back, before {stored}"
    if stored == "float32" and names in ("bf16", "fp16"):
        return f"stored float32, every value exactly {names}: saved from {_either(same)} weights, without a master copy"
    if stored == "bfloat16" and names == "fp16":
        return f"stored bfloat16, every value also exactly fp16 (multiples of 2^-24): cast from {_either(same)}"
    return f"stored {stored}, every value exactly {names}: cast from {_either(same)}"


def _pieces(origin: Origin) -> str:
    """The tiles that have a scale, or a palette, of their own, in words."""
    return f"{origin.scale}s" if origin.scale in ("row", "column") else f"{origin.scale} blocks"


def _levels(same: Sequence[Evidence], origin: Origin) -> str:
    most = max(one.origin.levels or 0 for one in same if one.origin)
    where = f" in each of the {_pieces(origin)} looked at" if origin.tiled else " in each" if len(same) > 1 else ""
    return (
        f"stored {origin.stored}, no more than {most} different magnitude{'s' * (most > 1)}{where}: codes of few bits "
        "(a palette, signs, a zero point, scales along another dimension, partly written or averaged since), numbers "
        "counted in equal steps, or a symmetric table (a Fourier basis)"
    )


def _bits(same: Sequence[Evidence], origin: Origin) -> str:
    if origin.half:
        return (
            f"stored {origin.stored}, half of the values fit {origin.bits} significant bits, and the others use more: "
            "an average, a merge or a sum of values of a narrower type, or some of them written since"
        )
    if origin.step is not None:
        return (
            f"stored {origin.stored}, every value is an integer of at most {origin.bits} bits times "
            f"2^{origin.step}: fixed-point numbers, such as uniform draws, or codes under one power of two"
        )
    return (
        f"stored {origin.stored}, every value fits {origin.bits} significant bits, of no format that is known: rounded "
        "or truncated to so many, or products or sums of values of a narrower type"
    )


def _full(same: Sequence[Evidence]) -> str:
    stored = same[0].dtype
    if stored == "float32":
        return (
            "full mantissas: from no narrower type that was looked for (float32 training, a master copy, a merge or an "
            "average fit; codes under scales of other places or several, or partly written since, would look so, too)"
        )
    if stored in ("float16", "bfloat16"):
        what = f"all 11 bits in use{_subnormals(same)}: fp16" if stored == "float16" else "all 8 bits in use: bf16"
        return (
            f"{what} weights, or a cast from a wider type (bits cannot tell "
            "which, nor whether they were codes under scales that were not looked for)"
        )
    return "full mantissas" if stored == "float64" else "as it is stored: bits say no more"


def _subnormals(same: Sequence[Evidence]) -> str:
    share = sum(one.fp16_subnormal for one in same) / (sum(one.nonzero for one in same) or 1)
    return f", {percent(share)} of values fp16 subnormals" if share else ""


def values_of(same: Sequence[Evidence]) -> int:
    return sum(one.numel for one in same)


@dataclass(frozen=True)
class PrecisionVerdict:
    """A description of a group of tensors, and its confidence: certain, likely, none, not counted, or named, where it
    follows from names, types and shapes instead of bits."""

    text: str
    confidence: str
    kinds: tuple[str, ...] = ()
    """The findings, the most values first: the stored type and `Evidence.key`, as "float32 bf16"."""


TOLD = 0.1
"""The share of a group's bytes in integers of no known layout from which on they are mentioned."""

_SILENT = ("unknown", "none")  # keys of tensors that tell nothing
_SHOWN = 3  # kinds that a verdict on several tensors spells out


def verdict(group: Sequence[Evidence]) -> PrecisionVerdict:
    """The verdict on a group of tensors: one sentence for each kind in it, the most values first.

    Where integers of no known layout have half of the bytes or more, there is no confidence in the rest.
    """
    codes = [one for one in group if one.codes]
    share = unread(group)
    if share < TOLD:
        return _read(group)
    rest = _read([one for one in group if not one.codes])
    types = ", ".join(dict.fromkeys(one.dtype for one in codes))
    text = (
        f"{percent(share)} of the bytes are integers ({types}) of no known layout: codes of a quantiser, whose values "
        "cannot be told"
    )
    kinds = tuple(dict.fromkeys((*(f"{one.dtype} codes" for one in codes), *rest.kinds)))
    if rest.kinds:
        text = f"{text}. The rest: {rest.text}"
    return PrecisionVerdict(text, "none" if 2 * share >= 1 else rest.confidence, kinds)


def unread(group: Sequence[Evidence]) -> float:
    """The share of the bytes in integers of no known layout."""
    total = sum(one.nbytes for one in group)
    return sum(one.nbytes for one in group if one.codes) / total if total else 0.0


def _read(group: Sequence[Evidence]) -> PrecisionVerdict:
    kinds = grouped(((one.dtype, one.key), one) for one in group if one.numel)
    if not kinds:
        return PrecisionVerdict("no values", "none")
    order = sorted([key for key in kinds if key[1] not in _SILENT] or kinds, key=lambda key: -values_of(kinds[key]))
    silent = sum(len(found) for key, found in kinds.items() if key not in order)
    total = values_of([one for found in kinds.values() for one in found])
    texts = [sentence(kinds[key]) + _part(kinds[key], total, len(order)) for key in order[:_SHOWN]]
    if len(order) > _SHOWN:
        rest = [one for key in order[_SHOWN:] for one in kinds[key]]
        texts.append(f"{len(order) - _SHOWN} other kinds{_part(rest, total, len(order))}")
    if silent:
        texts.append(f"{_tensors(silent)} with too little to tell{_hushed(group)}")
    return PrecisionVerdict(
        "; ".join(texts),
        bounded(max(kinds[order[0]], key=lambda one: one.numel).confidence, _told(group)),
        tuple(" ".join(key) for key in order),
    )


def _told(group: Sequence[Evidence]) -> float:
    """The share of the values in tensors that tell something; zeros in other tensors do not count."""
    silent = sum(one.nonzero for one in group if one.key in _SILENT)
    told = values_of([one for one in group if one.key not in _SILENT])
    return told / (told + silent) if told else 1.0


def _hushed(group: Sequence[Evidence]) -> str:
    share = 1 - _told(group)
    return f" ({percent(share)} of values that are not zero)" if share >= TOLD else ""


def _part(same: Sequence[Evidence], total: int, kinds: int) -> str:
    return f" ({_tensors(len(same))}, {percent(values_of(same) / total)} of values)" if kinds > 1 else ""


def _tensors(count: int) -> str:
    return f"{count} tensor{'s' if count != 1 else ''}"


def whole(by_role: Mapping[str, PrecisionVerdict], everything: Sequence[Evidence]) -> PrecisionVerdict:
    """The verdict on several roles together: one sentence if all agree, else one for each set of roles that agree."""
    if 2 * unread(everything) >= 1:
        return verdict(everything)
    told = {role: found for role, found in by_role.items() if found.confidence != "none"}
    if len({found.kinds for found in told.values()}) <= 1:
        return verdict(everything)
    text = ". ".join(
        f"{', '.join(roles)}: {words}"
        for words, roles in grouped((found.text, role) for role, found in told.items()).items()
    )
    worst = min(
        (found.confidence for found in told.values()), key=("none", "not counted", "named", "likely", "certain").index
    )
    kinds = tuple(dict.fromkeys(kind for found in told.values() for kind in found.kinds))
    if hushed := _hushed(everything):
        text = f"{text}. Others have too little to tell{hushed}"
    return PrecisionVerdict(f"mixed by role. {text}", bounded(worst, _told(everything)), kinds)
