"""Which tensors of two checkpoints belong together: by name, but for a prefix, by contents, or permuted."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halfstep.bits.origin import stored_format
from halfstep.bits.pair import RUN, Change, as_numbers
from halfstep.bits.pieces import even
from halfstep.bits.rounded import nearest
from halfstep.bits.values import Values
from halfstep.formats import Float
from halfstep.grouping import grouped
from halfstep.inspection.gguf_blocks import UNREAD
from halfstep.inspection.weights import HELD, Held, Weight


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
        begun = {name: name.removeprefix(here) for name in left_a if name.startswith(here)}
        partner |= {name: stems[stem] for name, stem in begun.items() if stem in stems}
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
    ends = grouped((other.rpartition(".")[2], other) for other in others)
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
    sides = ([a[name] for name in left_a], [b[name] for name in left_b])
    plain_a, plain_b = ([weight for weight in side if weight.tensor.dtype not in UNREAD] for side in sides)
    kinds = {*map(_kind, plain_a)} & {*map(_kind, plain_b)}
    one, other = (
        grouped((_hash(weight), weight.name) for weight in side if _kind(weight) in kinds)
        for side in (plain_a, plain_b)
    )
    alike = {key: names for key, names in one.items() if len(names) == 1 and len(other.get(key, ())) == 1}
    return {names[0]: other[key][0] for key, names in alike.items()}


def _kind(weight: Weight) -> tuple[object, ...]:
    return weight.stored, weight.shape, weight.tensor.nbytes


def _hash(weight: Weight) -> bytes:
    found = hashlib.sha256(repr(_kind(weight)).encode())
    for piece in weight.tensor.chunks():
        found.update(piece.tobytes())
    return found.digest()


Sums = NDArray[np.uint64]

_SAME, _NEAR = 1e-9, 1e-2  # how far the sums of squares may be apart: of one type, and of two
_LONGEST = 1 << 20  # values of a row
_ODD = np.uint64(0x9E3779B97F4A7C15)
_TOLD = 8  # different values that must have moved: fewer are in another order by chance


def permuted(a: Values, b: Values, far: Change) -> tuple[Held, str] | None:
    """A in the order that B has, and what was put in order; None where B holds other values, or is too large.

    A sum over a row that does not depend on the order of its columns tells which rows belong together, and a sum over a
    column which columns do (64-bit sums of scrambled values): one pass over each tensor, and one over A to read it. It
    is for the caller to see whether the whole then follows. Of two types, both are rounded to the narrower one first.
    """
    shape = (*a.shape[:2], math.prod(a.shape[2:]))
    shape = shape if len(a.shape) > 1 else (a.numel, 1, 1)
    room = _SAME if a.dtype == b.dtype else _NEAR
    if not 0 < a.nbytes <= HELD or shape[1] * shape[2] > _LONGEST:
        return None
    if not abs(far.squares_a - far.squares_b) <= room * far.squares_a:
        return None
    formats = [format for one in (a, b) if a.dtype != b.dtype and (format := stored_format(one.dtype)) is not None]
    narrow = min(formats, key=lambda format: format.significant_bits, default=None)
    one, other = _sums(a, shape, narrow), _sums(b, shape, narrow)
    rows, columns = (_order(x, y) for x, y in zip(one, other, strict=True))
    if rows is None or columns is None:
        return None
    moved = {name: order != np.arange(order.size) for name, order in (("rows", rows), ("columns", columns))}
    told = max(
        np.unique(sums[there]).size * (a.numel // sums.size) for sums, there in zip(one, moved.values(), strict=True)
    )
    if told < _TOLD:
        return None
    what = " and ".join(name for name, there in moved.items() if there.any()) if len(a.shape) > 1 else "values"
    return Held.ordered(a, rows, columns), f"{what} in another order"


def _sums(tensor: Values, shape: tuple[int, ...], narrow: Float | None) -> tuple[Sums, Sums]:
    """A number for each row, whatever the order of its columns, and one for each column, whatever that of its rows."""
    _, wide, inner = shape
    rows, columns = list[Sums](), np.zeros(wide, np.uint64)
    places = np.arange(inner, dtype=np.uint64) * _ODD
    for piece in even(tensor, max(RUN // (wide * inner), 1) * wide * inner):
        with np.errstate(invalid="ignore"):  # a signalling NaN
            values = as_numbers(piece, tensor.dtype) + 0.0  # of one zero
        values = values if narrow is None else nearest(values, narrow)
        bits = _scrambled(values.view(np.uint64).reshape(-1, wide, inner) + places).sum(2, dtype=np.uint64)
        rows.append(bits.sum(1, dtype=np.uint64))
        columns += bits.sum(0, dtype=np.uint64)
    return np.concatenate(rows), columns


def _scrambled(bits: Sums) -> Sums:
    """Each number as another one, of which no bit is left as it was (the end of splitmix64)."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _order(a: Sums, b: Sums) -> NDArray[np.intp] | None:
    """For each of B's places A's with the same sum; None where they have other sums."""
    if np.array_equal(a, b):
        return np.arange(a.size)
    in_a, in_b = np.argsort(a, kind="stable"), np.argsort(b, kind="stable")
    found = np.empty_like(in_a)
    found[in_b] = in_a
    return found if np.array_equal(a[found], b) else None
