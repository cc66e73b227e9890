"""Which tensors of two checkpoints belong together: by name, by name but for a prefix, by contents."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from halfstep.inspection.gguf_blocks import UNREAD
from halfstep.inspection.weights import Weight


_TRIED = 16  # names from which a prefix is read off


@dataclass(frozen=True)
class Matching:
    """Pairs of names, A's first, in A's order; and the names that have no partner."""

    pairs: tuple[tuple[str, str], ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    prefixes: tuple[str, str] = ("", "")
    """What A's names, and B's, have in front where that alone tells them apart."""
    renamed: frozenset[str] = frozenset()
    """A's names of the pairs that were found by their contents."""


def match(a: Mapping[str, Weight], b: Mapping[str, Weight]) -> Matching:
    """The tensors that belong together. Contents are read of those alone whose names say nothing, and are the same."""
    partner = {name: name for name in a if name in b}
    left_a, left_b = [name for name in a if name not in b], [name for name in b if name not in a]
    prefixes = _prefixes(left_a, left_b)
    if prefixes != ("", ""):
        here, there = prefixes
        stems = {name.removeprefix(there): name for name in left_b if name.startswith(there)}
        for name in left_a:
            if name.startswith(here) and name.removeprefix(here) in stems:
                partner[name] = stems[name.removeprefix(here)]
    taken = set(partner.values())
    left_a, left_b = [name for name in left_a if name not in partner], [name for name in left_b if name not in taken]
    renamed = _by_contents(left_a, left_b, a, b)
    partner |= renamed
    taken |= set(renamed.values())
    return Matching(
        tuple((name, partner[name]) for name in a if name in partner),
        tuple(name for name in left_a if name not in renamed),
        tuple(name for name in left_b if name not in taken),
        prefixes,
        frozenset(renamed),
    )


def _prefixes(left_a: list[str], left_b: list[str]) -> tuple[str, str]:
    """What stands before the dots of most names, where the rest of them is the same; ("", "") where nothing does."""
    among_a, among_b = set(left_a), set(left_b)
    best, most = ("", ""), 0
    for here, there in dict.fromkeys(_candidates(left_a[:: max(len(left_a) // _TRIED, 1)], left_b)):
        stems = [name.removeprefix(here) for name in among_a if name.startswith(here)]
        found = sum(f"{there}{stem}" in among_b for stem in stems)
        if found > most:
            best, most = (here, there), found
    return best if 2 * most >= min(len(left_a), len(left_b)) and most > 1 else ("", "")


def _candidates(some: list[str], others: list[str]) -> Iterable[tuple[str, str]]:
    ends: dict[str, list[str]] = {}
    for other in others:
        ends.setdefault(other.rpartition(".")[2], []).append(other)
    for name in some[:_TRIED]:
        for other in ends.get(name.rpartition(".")[2], ())[: _TRIED * _TRIED]:
            one, two = name.split("."), other.split(".")
            while one and two and one[-1] == two[-1]:
                one.pop(), two.pop()
            yield "".join(f"{part}." for part in one), "".join(f"{part}." for part in two)


def _by_contents(
    left_a: list[str], left_b: list[str], a: Mapping[str, Weight], b: Mapping[str, Weight]
) -> dict[str, str]:
    """Pairs of the same type, shape and bytes, of which there is one on each side: constants are alike too often."""
    kinds = {_kind(a[name]) for name in left_a} & {_kind(b[name]) for name in left_b}
    found: list[dict[bytes, list[str]]] = []
    for left, held in ((left_a, a), (left_b, b)):
        by_hash: dict[bytes, list[str]] = {}
        for name in left:
            if _kind(held[name]) in kinds and held[name].tensor.dtype not in UNREAD:
                by_hash.setdefault(_hash(held[name]), []).append(name)
        found.append(by_hash)
    one, other = found
    alike = {key: names for key, names in one.items() if len(names) == 1 and len(other.get(key, ())) == 1}
    return {names[0]: other[key][0] for key, names in alike.items()}


def _kind(weight: Weight) -> tuple[object, ...]:
    return weight.stored, weight.shape, weight.tensor.nbytes


def _hash(weight: Weight) -> bytes:
    found = hashlib.sha256(repr(_kind(weight)).encode())
    for piece in weight.tensor.chunks():
        found.update(piece.tobytes())
    return found.digest()
