"""What the bits of many tensors say together, in words, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from halfstep.bits.origin import bounded
from halfstep.bits.sentences import Evidence, percent, sentence, values_of
from halfstep.grouping import grouped


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

_SILENT = ("unknown", "none")  # keys of tensors that tell nothing
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
    kinds = grouped(((one.dtype, one.key), one) for one in group if one.numel)
    if not kinds:
        return PrecisionVerdict("no values", "none")
    telling = [key for key in kinds if key[1] not in _SILENT]
    order = sorted(telling or kinds, key=lambda key: -values_of(kinds[key]))
    silent = sum(len(found) for key, found in kinds.items() if key not in order)
    total = values_of([one for found in kinds.values() for one in found])
    texts = [sentence(kinds[key]) + _part(kinds[key], total, len(order)) for key in order[:_SHOWN]]
    if len(order) > _SHOWN:
        rest = [one for key in order[_SHOWN:] for one in kinds[key]]
        texts.append(f"{len(order) - _SHOWN} other kinds{_part(rest, total, len(order))}")
    if silent:
        texts.append(f"{_tensors(silent)} with too little to tell{_hushed(group)}")
    sure = bounded(max(kinds[order[0]], key=lambda one: one.numel).confidence, _told(group))
    return PrecisionVerdict("; ".join(texts), sure, tuple(" ".join(key) for key in order))


def _told(group: Sequence[Evidence]) -> float:
    """The share of the values that are in tensors which tell something; zeros elsewhere do not count."""
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
    """The verdict on several roles together: one sentence where all agree, else one for each that some share."""
    if 2 * unread(everything) >= 1:
        return verdict(everything)
    told = {role: found for role, found in by_role.items() if found.confidence != "none"}
    if len({found.kinds for found in told.values()}) <= 1:
        return verdict(everything)
    groups = grouped((found.text, role) for role, found in told.items())
    text = ". ".join(f"{', '.join(roles)}: {words}" for words, roles in groups.items())
    worst = min((found.confidence for found in told.values()), key=_ORDER.index)
    kinds = tuple(dict.fromkeys(kind for found in told.values() for kind in found.kinds))
    if hushed := _hushed(everything):
        text = f"{text}. Others have too little to tell{hushed}"
    return PrecisionVerdict(f"mixed by role. {text}", bounded(worst, _told(everything)), kinds)


_ORDER = ("none", "not counted", "named", "likely", "certain")
