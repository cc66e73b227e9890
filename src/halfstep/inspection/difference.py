"""Compares two checkpoints tensor by tensor: which correspond, and how B's follow from A's, as their bits show."""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep.bits.origin import stored_format
from halfstep.bits.pair import RUN, Change, Pair, as_numbers, comparable, same_bytes
from halfstep.bits.relation import Relation, nearest, relation
from halfstep.bits.scan import Progress
from halfstep.bits.values import Values, even
from halfstep.formats import Float
from halfstep.inspection.difference_text import Single, TensorDifference, count, sentence, values
from halfstep.inspection.files import Checkpoint
from halfstep.inspection.gguf_blocks import UNREAD
from halfstep.inspection.inspector import open_checkpoint
from halfstep.inspection.layers import HELD, First, Held, Weight, weights
from halfstep.inspection.roles import role_of
from halfstep.text import grouped, percent, printable, shortened, some


SCHEMA = 1
"""The version of `to_dict`: fields are added under the same number, and renamed or dropped under the next."""

_FOUND = ("identical", "equal", "cast", "uncast", "near", "alike", "multiple", "average", "quantised", "merged")
_STRANGERS = 0.5  # the share of matrices' values in unrelated ones from which on these are different models
_APART = 0.5  # the cosine below which a square matrix is compared transposed too


@dataclass(frozen=True)
class Difference:
    """The result of `diff`."""

    a: Path
    b: Path
    kinds: tuple[str, str]
    """The kinds of the two checkpoints."""
    tensors: tuple[TensorDifference, ...]
    only_a: tuple[Single, ...] = ()
    only_b: tuple[Single, ...] = ()
    prefixes: tuple[str, str] = ("", "")
    """The prefixes of A's and B's names, where names are equal without them."""
    remarks: tuple[str, ...] = ()
    """Parts of the files that were not read."""

    @property
    def same(self) -> bool:
        """Whether both have the same names, types, shapes and bytes."""
        return not (self.only_a or self.only_b) and all(
            one.relation.kind == "identical" and not one.seen and one.name == one.name_b for one in self.tensors
        )

    @property
    def sentences(self) -> list[str]:
        """Sentences on the whole, then on groups of tensors (the most values first), then on tensors without a
        partner."""
        groups = grouped((f"{one.relation.key} {one.seen}", one) for one in self.tensors)
        total = values(self.tensors)
        said = [
            f"{count(group)} ({percent(values(group) / total) if total else 'none'} of the values): {sentence(group)}."
            for group in sorted(groups.values(), key=lambda group: -values(group))
        ]
        sides = zip(("A's", "B's"), self.prefixes, strict=True)
        names = " and ".join(f"{which} begin with {name!r}" for which, name in sides if name)
        renamed = [f"{one.name} is {one.name_b}" for one in self.tensors if one.how == "contents"]

        return [
            *([self._whole] if self._whole else []),
            *said,
            *([f"Names differ in what they begin with: {names}."] if names else []),
            *([f"Renamed, with the same bytes: {some(renamed)}."] if renamed else []),
            *(
                f"Only in {which}: {count(of)}, {some([one.name for one in of])}."
                for which, of in (("A", self.only_a), ("B", self.only_b))
                if of
            ),
        ]

    @property
    def _whole(self) -> str:
        """One sentence on the whole, if there is one."""
        if self.same:
            return "Both hold the same tensors, byte for byte." if self.tensors else "Neither holds a tensor."
        if not self.tensors:
            return (
                "No tensor of one has the name or the contents of one in the other: different models, or names and "
                "values were changed both."
            )
        matrices = [one for one in self.tensors if len(one.shapes[0]) > 1]
        strange = values(one for one in matrices if one.relation.kind in ("unrelated", "shape"))
        if matrices and strange >= _STRANGERS * values(matrices):
            return (
                "Different models: most matrices of the same name have other shapes, or values that have nothing in "
                "common."
            )
        if all(one.relation.kind in ("identical", "equal") for one in self.tensors):
            return "Every tensor that both have holds the same values."
        return ""

    def __str__(self) -> str:
        return shortened([printable(text) for text in (*self.files, *self.remarks, *self.sentences)])

    @property
    def files(self) -> tuple[str, str]:
        """The paths and kinds of A and B, as text."""
        a, b = self.kinds
        return f"A: {self.a}, {a}", f"B: {self.b}, {b}"

    def to_dict(self) -> dict[str, Any]:
        """Data for JSON."""
        return {
            "schema": SCHEMA,
            "a": str(self.a),
            "b": str(self.b),
            "kinds": list(self.kinds),
            "same": self.same,
            "prefixes": list(self.prefixes),
            "tensors": [_data(one) for one in self.tensors],
            "only_a": [asdict(one) for one in self.only_a],
            "only_b": [asdict(one) for one in self.only_b],
            "remarks": list(self.remarks),
            "sentences": self.sentences,
        }


def _data(one: TensorDifference) -> dict[str, Any]:
    far, said = one.relation.change, {key: value for key, value in asdict(one.relation).items() if key != "change"}
    figures = far and {
        "kept": far.kept,
        "bits_kept": far.bits_kept,
        "relative": far.relative if math.isfinite(far.relative) else None,
        "cosine": far.cosine,
    }
    return {**asdict(one), "relation": {**said, "key": one.relation.key, "change": figures}}


def diff(a: str | Path | Checkpoint, b: str | Path | Checkpoint, progress: Progress | None = None) -> Difference:
    """Compare two checkpoints, one tensor at a time.

    Args:
        a: a file or a folder that `open_checkpoint` reads, or its result.
        b: the other one, possibly of another kind.
        progress: called with the bytes of each of A's tensors that has a partner, after it was compared.

    Raises:
        CheckpointError: there is no checkpoint at a path, it is broken, or it was changed meanwhile.
    """
    one, other = (x if isinstance(x, Checkpoint) else open_checkpoint(x) for x in (a, b))
    in_a, in_b = weights(one), weights(other)
    found = match(in_a, in_b)
    return Difference(
        one.path,
        other.path,
        (one.kind, other.kind),
        tuple(_compared(in_a, in_b, found.pairs, found.renamed, progress)),
        tuple(_single(in_a[name]) for name in found.only_a),
        tuple(_single(in_b[name]) for name in found.only_b),
        found.prefixes,
        tuple(dict.fromkeys((*one.remarks, *other.remarks))),
    )


def _single(weight: Weight) -> Single:
    return Single(weight.name, role_of(weight.name), weight.stored, weight.shape)


def _compared(
    a: dict[str, Weight],
    b: dict[str, Weight],
    pairs: tuple[tuple[str, str], ...],
    renamed: frozenset[str],
    progress: Progress | None,
) -> Iterator[TensorDifference]:
    for name, name_b in pairs:
        one, other = a[name], b[name_b]
        how = "contents" if name in renamed else "name" if name == name_b else "prefix"
        found, seen = (Relation("identical"), "") if how == "contents" else _relation(one, other)
        stored, shapes = (one.stored, other.stored), (one.shape, other.shape)
        yield TensorDifference(name, name_b, role_of(name), stored, shapes, found, seen, how)
        if progress is not None:
            progress(one.tensor.nbytes)


def _relation(one: Weight, other: Weight) -> tuple[Relation, str]:
    """The relation of two weights, and what was compared ("" for both as they are)."""
    a, b = one.values, other.values
    if {one.tensor.dtype, other.tensor.dtype} & UNREAD:
        return Relation("unread"), ""
    if a is None or b is None or not (comparable(a.dtype) and comparable(b.dtype)):
        alike = one.stored == other.stored and one.shape == other.shape
        return Relation("identical" if alike and same_bytes(Pair(one.tensor, other.tensor)) else "unread"), ""
    if one.shape == other.shape:
        found = relation(Pair(a, b))
        square = len(one.shape) == 2 and one.shape[0] == one.shape[1] > 1
        far = found.change
        if found.kind in _FOUND or far is None:
            return found, ""
        if square and abs(far.cosine) < _APART and (turned := _turned(a, b)) is not None:
            return turned, "transposed"
        ordered = permuted(a, b, far)
        if ordered is not None and (same := relation(Pair(ordered[0], b))).kind in _FOUND:
            return same, ordered[1]
        return found, ""
    if len(one.shape) == 2 and other.shape == one.shape[::-1] and (turned := _turned(a, b)) is not None:
        return turned, "transposed"
    if a.numel == b.numel and (found := relation(Pair(a, b))).kind in _FOUND:
        return found, "reshaped"
    if one.shape and other.shape and one.shape[1:] == other.shape[1:] and min(a.numel, b.numel):
        shape = (min(one.shape[0], other.shape[0]), *one.shape[1:])
        return relation(Pair(First(a, shape), First(b, shape))), "first rows"
    return Relation("shape"), ""


def _turned(a: Values, b: Values) -> Relation | None:
    """How B follows from A transposed; None where no relation but a low cosine is found."""
    if not 0 < a.nbytes <= HELD:
        return None
    found = relation(Pair(Held.turned(a), b))
    close = found.kind == "changed" and found.change is not None and found.change.cosine > _APART
    return found if found.kind in _FOUND or close else None


_TRIED = 16  # names from which prefixes are guessed


@dataclass(frozen=True)
class Matching:
    """Pairs of names, A's first, in A's order; and the names that have no partner."""

    pairs: tuple[tuple[str, str], ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    prefixes: tuple[str, str] = ("", "")
    """The prefixes of A's and B's names, where names differ in these alone."""
    renamed: frozenset[str] = frozenset()
    """A's names in the pairs found by contents."""


def match(a: Mapping[str, Weight], b: Mapping[str, Weight]) -> Matching:
    """The tensors that correspond, by name, by name without a prefix, else by contents. Contents are read only of
    tensors without a partner by name, and with the same type, shape and size as another."""
    partner = {name: name for name in a if name in b}
    left_a, left_b = [name for name in a if name not in b], [name for name in b if name not in a]
    here, there = prefixes = _prefixes(left_a, left_b)
    stems = {name.removeprefix(there): name for name in left_b if name.startswith(there)}
    partner |= {
        name: stems[stem] for name in left_a if name.startswith(here) and (stem := name.removeprefix(here)) in stems
    }
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
    """The prefixes that most names have, where the rest of the names is equal; ("", "") if there are none."""
    among_a, among_b = set(left_a), set(left_b)
    best, most = ("", ""), 0
    for here, there in dict.fromkeys(_candidates(left_a[:: max(len(left_a) // _TRIED, 1)], left_b)):
        found = sum(f"{there}{name.removeprefix(here)}" in among_b for name in among_a if name.startswith(here))
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
    """Pairs with the same type, shape and bytes, where each side has one such tensor: constants are equal too often."""
    plain_a, plain_b = (
        [side[name] for name in left if side[name].tensor.dtype not in UNREAD]
        for left, side in ((left_a, a), (left_b, b))
    )
    kinds = {*map(_kind, plain_a)} & {*map(_kind, plain_b)}
    one, other = (
        grouped((_hash(weight), weight.name) for weight in side if _kind(weight) in kinds)
        for side in (plain_a, plain_b)
    )
    return {names[0]: other[key][0] for key, names in one.items() if len(names) == 1 and len(other.get(key, ())) == 1}


def _kind(weight: Weight) -> tuple[object, ...]:
    return weight.stored, weight.shape, weight.tensor.nbytes


def _hash(weight: Weight) -> bytes:
    found = hashlib.sha256(repr(_kind(weight)).encode())
    for piece in weight.tensor.chunks():
        found.update(piece.tobytes())
    return found.digest()


Sums = NDArray[np.uint64]

_SAME, _NEAR = 1e-9, 1e-2  # the relative difference allowed between sums of squares: of one type, and of two
_LONGEST = 1 << 20  # values of a row
_ODD = np.uint64(0x9E3779B97F4A7C15)
_TOLD = 8  # the fewest distinct values that must have moved: fewer may match by chance


def permuted(a: Values, b: Values, far: Change) -> tuple[Held, str] | None:
    """A in the order of B, and what was reordered, as text; None where B has other values, or is too large.

    Rows are matched by a sum over each row that does not depend on the order of its columns, and columns by a sum over
    each column (64-bit sums of hashed values): one pass over each tensor, and one over A to read it. The caller has to
    check whether the result equals B. For two types, both are rounded to the narrower one first.
    """
    shape = (*a.shape[:2], math.prod(a.shape[2:])) if len(a.shape) > 1 else (a.numel, 1, 1)
    room = _SAME if a.dtype == b.dtype else _NEAR
    too_large = not 0 < a.nbytes <= HELD or shape[1] * shape[2] > _LONGEST
    if too_large or not abs(far.squares_a - far.squares_b) <= room * far.squares_a:
        return None
    narrow = min(
        (format for one in (a, b) if a.dtype != b.dtype and (format := stored_format(one.dtype)) is not None),
        key=lambda format: format.significant_bits,
        default=None,
    )
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
    """A hash of each row that does not depend on the order of its columns, and one of each column that does not depend
    on the order of its rows."""
    _, wide, inner = shape
    rows, columns = list[Sums](), np.zeros(wide, np.uint64)
    places = np.arange(inner, dtype=np.uint64) * _ODD
    for piece in even(tensor, max(RUN // (wide * inner), 1) * wide * inner):
        with np.errstate(invalid="ignore"):  # a signalling NaN
            values = as_numbers(piece, tensor.dtype) + 0.0  # -0 becomes 0
        values = values if narrow is None else nearest(values, narrow)
        bits = _scrambled(values.view(np.uint64).reshape(-1, wide, inner) + places).sum(2, dtype=np.uint64)
        rows.append(bits.sum(1, dtype=np.uint64))
        columns += bits.sum(0, dtype=np.uint64)
    return np.concatenate(rows), columns


def _scrambled(bits: Sums) -> Sums:
    """A hash of each integer (the end of splitmix64)."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _order(a: Sums, b: Sums) -> NDArray[np.intp] | None:
    """For each index of B, the index of A with the same sum; None where the sums differ."""
    if np.array_equal(a, b):
        return np.arange(a.size)
    in_a, in_b = np.argsort(a, kind="stable"), np.argsort(b, kind="stable")
    found = np.empty_like(in_a)
    found[in_b] = in_a
    return found if np.array_equal(a[found], b) else None
