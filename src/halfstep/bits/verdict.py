"""What the bits of many tensors say together, in words, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from halfstep.bits.evidence import CHOSEN
from halfstep.bits.layer import Layer, summed
from halfstep.bits.origin import Origin


@dataclass(frozen=True)
class Evidence:
    """One tensor's weight in a verdict: its values, its origin (None: not floating point), fp16's subnormals."""

    dtype: str
    numel: int
    origin: Origin | None
    nonzero: int = 0
    fp16_subnormal: int = 0
    layer: Layer | None = None
    """What a tensor of codes holds; then `numel` counts its weights."""
    nbytes: int = 0
    codes: bool = False
    """Whether these are integers such as quantisers pack, in no layout that is known."""

    @property
    def key(self) -> str:
        """What was found, in a word or two."""
        if self.layer is not None:
            return f"{self.layer.scheme}, {self.layer.tile}"
        if self.codes:
            return "codes"
        return self.origin.key if self.origin else "none"

    @property
    def confidence(self) -> str:
        """How sure that is: "named" where names, types and shapes say it."""
        if self.layer is not None:
            return "named"
        return self.origin.confidence if self.origin else "none"


@dataclass(frozen=True)
class PrecisionVerdict:
    """What a group of tensors is, in words, and how sure that is: certain, likely, none, not counted, or named, where
    names, types and shapes say it and no bits."""

    text: str
    confidence: str
    kinds: tuple[str, ...] = ()
    """What was found, the most values first: the stored type and `Evidence.key`, as "float32 bf16"."""


TOLD = 0.1
"""The share of a group's bytes in integers of no known layout from which on they are spoken of."""

_SHOWN = 3  # kinds that a verdict on several tensors spells out


def verdict(group: Sequence[Evidence]) -> PrecisionVerdict:
    """What a group of tensors is: one sentence for each kind in it, the most values first.

    Where integers of no known layout have half of the bytes or more, the others say nothing of the whole.
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
    kinds: dict[tuple[str, str], list[Evidence]] = {}
    for one in group:
        if one.numel:
            kinds.setdefault((one.dtype, one.key), []).append(one)
    if not kinds:
        return PrecisionVerdict("no values", "none")
    telling = {key: found for key, found in kinds.items() if key[1] not in ("unknown", "none")}
    order = sorted(telling or kinds, key=lambda key: -_values(kinds[key]))
    silent = sum(len(found) for key, found in kinds.items() if key not in telling) if telling else 0
    total = _values([one for found in kinds.values() for one in found])
    texts = [sentence(kinds[key]) + _part(kinds[key], total, len(order)) for key in order[:_SHOWN]]
    if len(order) > _SHOWN:
        rest = [one for key in order[_SHOWN:] for one in kinds[key]]
        texts.append(f"{len(order) - _SHOWN} other kinds{_part(rest, total, len(order))}")
    if silent:
        texts.append(f"{_tensors(silent)} with too little to tell")
    return PrecisionVerdict("; ".join(texts), _least(kinds[order[0]]), tuple(" ".join(key) for key in order))


def sentence(same: Sequence[Evidence]) -> str:
    """What tensors of one stored type and one kind of origin are."""
    stored, origin = same[0].dtype, same[0].origin
    if same[0].layer is not None:
        return _quantised([one.layer for one in same if one.layer is not None])
    if origin is None:
        return f"{stored}: no floating-point values to read"
    if origin.through:
        return _went_through(same, origin)
    if origin.levels is not None:
        return _levels(same, origin)
    if origin.bits is not None:
        return _bits(same, origin)
    if origin.full:
        return f"stored {stored}, {_full(same)}"
    if not any(one.origin.telling for one in same if one.origin):
        return f"stored {stored}, only zeros, powers of two and small whole numbers: nothing that could tell"
    if all(one.origin.counted and one.origin.distinct <= CHOSEN for one in same if one.origin):
        return f"stored {stored}, too few different values to tell"
    return f"stored {stored}, too few bits in use for a full {stored} and no format that explains it"


def _quantised(layers: Sequence[Layer]) -> str:
    one, *others = summed(layers)
    more = f" (and {len(others)} variant{'s' * (len(others) > 1)})" if others else ""
    return f"{one.scheme}: {one.text}{more}"


def _went_through(same: Sequence[Evidence], origin: Origin) -> str:
    stored = same[0].dtype
    names = " and ".join(origin.through)
    if origin.tiled and origin.share < 1:
        shares = [one.origin.share for one in same if one.origin]
        return (
            f"stored {stored}, {percent(sum(shares) / len(shares))} of {_pieces(origin)} looked at exactly {names} "
            f"times a scale for each: quantised to {names} in part, or partly written since"
        )
    if origin.share < 1:
        shares = [one.origin.share * one.numel for one in same if one.origin]
        share = sum(shares) / _values(same)
        return (
            f"stored {stored}, {percent(share)} of values exactly {names}, the others in full: {names} values, partly "
            "written since (trained on, merged or averaged)"
        )
    if origin.tiled:
        tile = "row" if origin.scale == "row" else f"{origin.scale} block"
        return (
            f"stored {stored}, every value looked at exactly {names} times a scale for each {tile}: "
            f"quantised to {names} {'by rows' if tile == 'row' else 'in blocks'} before it was stored"
        )
    if names == "fp16" and origin.scale is not None:
        return (
            f"stored {stored}, every value exactly fp16 times a power of two: weights kept in scaled fp16 (FP8-LM), "
            "or tf32 (bits cannot tell which)"
        )
    if origin.scale is not None:
        scales = {one.origin.scale for one in same if one.origin}
        word = "scales of any size" if "any" in scales else "powers of two" if len(scales) > 1 else f"{scales.pop()}"
        return f"stored {stored}, every value exactly {names} times {word}: quantised to {names} before it was stored"
    if stored == "float16" and "bf16" in origin.through:
        return f"stored float16{_subnormals(same)}, every value exactly bf16: cast from bf16"
    if len(origin.through) > 1:
        return f"stored {stored}, every value exactly {names}: a chain of casts, bf16 to fp16 or back, before {stored}"
    if stored == "float32" and names in ("bf16", "fp16"):
        return f"stored float32, every value exactly {names}: saved from {names} weights, without a master copy"
    if stored == "bfloat16" and names == "fp16":
        return "stored bfloat16, every value also exactly fp16 (multiples of 2^-24): cast from fp16"
    return f"stored {stored}, every value exactly {names}: cast from {names}"


def _pieces(origin: Origin) -> str:
    """What has a scale, or a palette, of its own."""
    return f"{origin.scale}s" if origin.scale in ("row", "column") else f"{origin.scale} blocks"


def _levels(same: Sequence[Evidence], origin: Origin) -> str:
    most = max(one.origin.levels or 0 for one in same if one.origin)
    where = f" in each of the {_pieces(origin)} looked at" if origin.tiled else " in each" if len(same) > 1 else ""
    return (
        f"stored {origin.stored}, no more than {most} different magnitudes{where}, on no grid that is known: codes of "
        "a palette, with a zero point or with scales along another dimension, or a symmetric table (a Fourier basis)"
    )


def _bits(same: Sequence[Evidence], origin: Origin) -> str:
    if origin.half:
        return (
            f"stored {origin.stored}, half of the values fit {origin.bits} significant bits, and the others use more: "
            "an average, a merge or a sum of values of a narrower type, or some of them written since"
        )
    if origin.step is not None:
        return (
            f"stored {origin.stored}, every value is a whole number of at most {origin.bits} bits times "
            f"2^{origin.step}: fixed-point numbers, or codes under one power of two"
        )
    return (
        f"stored {origin.stored}, every value fits {origin.bits} significant bits, of no format that is known: rounded "
        "or truncated to so many, or products of values of a narrower type"
    )


def _full(same: Sequence[Evidence]) -> str:
    stored = same[0].dtype
    if stored == "float32":
        return "full mantissas: from no narrower type (float32 training, a master copy, a merge or an average fit)"
    if stored == "float16":
        return (
            f"all 11 bits in use{_subnormals(same)}: fp16 weights, or a cast from a wider type (bits cannot tell which)"
        )
    if stored == "bfloat16":
        return "all 8 bits in use: bf16 weights, or a cast from a wider type (bits cannot tell which)"
    if stored == "float64":
        return "full mantissas"
    return "as it is stored: bits say no more"


def _subnormals(same: Sequence[Evidence]) -> str:
    share = sum(one.fp16_subnormal for one in same) / (sum(one.nonzero for one in same) or 1)
    return f", {percent(share)} of values fp16 subnormals" if share else ""


def _part(same: Sequence[Evidence], total: int, kinds: int) -> str:
    return f" ({_tensors(len(same))}, {percent(_values(same) / total)} of values)" if kinds > 1 else ""


def _tensors(count: int) -> str:
    return f"{count} tensor{'s' if count != 1 else ''}"


def _values(same: Sequence[Evidence]) -> int:
    return sum(one.numel for one in same)


def _least(same: Sequence[Evidence]) -> str:
    """The confidence of most values of one kind: that of its largest tensor."""
    return max(same, key=lambda one: one.numel).confidence


def percent(share: float) -> str:
    """A share in percent, never rounded to none or all.

    >>> percent(0.9999999), percent(0.00001), percent(0.5)
    ('>99.99%', '<0.01%', '50%')
    """
    if share in (0, 1):
        return f"{share:.0%}"
    if share < 0.0001:
        return "<0.01%"
    return ">99.99%" if share > 0.9999 else f"{100 * share:.3g}%"


def whole(by_role: Mapping[str, PrecisionVerdict], everything: Sequence[Evidence]) -> PrecisionVerdict:
    """The verdict on several roles together: one sentence where all agree, else one for each that some share."""
    if 2 * unread(everything) >= 1:
        return verdict(everything)
    told = {role: found for role, found in by_role.items() if found.confidence != "none"}
    if len({found.kinds for found in told.values()}) <= 1:
        return verdict(everything)
    groups: dict[str, list[str]] = {}
    for role, found in told.items():
        groups.setdefault(found.text, []).append(role)
    text = ". ".join(f"{', '.join(roles)}: {words}" for words, roles in groups.items())
    worst = min((found.confidence for found in told.values()), key=_ORDER.index)
    kinds = tuple(dict.fromkeys(kind for found in told.values() for kind in found.kinds))
    return PrecisionVerdict(f"mixed by role. {text}", worst, kinds)


_ORDER = ("none", "not counted", "named", "likely", "certain")
