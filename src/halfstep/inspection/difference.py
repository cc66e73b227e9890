"""Two checkpoints tensor by tensor: how each of B's follows from A's, as far as their bits show it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halfstep.bits.pair import Pair, comparable, same_bytes
from halfstep.bits.relation import Relation, relation
from halfstep.bits.scan import Progress
from halfstep.bits.sentences import percent
from halfstep.bits.values import Values
from halfstep.grouping import grouped
from halfstep.inspection.difference_text import Single, TensorDifference, count, sentence, values
from halfstep.inspection.gguf_blocks import UNREAD
from halfstep.inspection.matching import match, permuted
from halfstep.inspection.opening import open_checkpoint
from halfstep.inspection.roles import role_of
from halfstep.inspection.stored import Checkpoint
from halfstep.inspection.weights import HELD, First, Held, Weight, weights
from halfstep.printable import printable, shortened, some


SCHEMA = 1
"""The version of `to_dict`: fields are added under the same number, and renamed or dropped under the next."""

_FOUND = ("identical", "equal", "cast", "uncast", "near", "alike", "multiple", "average", "quantised", "merged")
_STRANGERS = 0.5  # of the values of matrices, from which on unrelated ones make two models of it
_APART = 0.5  # the cosine below which a square matrix may be a transposed one


@dataclass(frozen=True)
class Difference:
    """What `diff` found."""

    a: Path
    b: Path
    kinds: tuple[str, str]
    """Of the files."""
    tensors: tuple[TensorDifference, ...]
    only_a: tuple[Single, ...] = ()
    only_b: tuple[Single, ...] = ()
    prefixes: tuple[str, str] = ("", "")
    """What A's names, and B's, have in front of what is the same."""
    remarks: tuple[str, ...] = ()
    """What of the files was not read."""

    @property
    def same(self) -> bool:
        """Whether both have the same names, types, shapes and bytes."""
        pairs = all(
            one.relation.kind == "identical" and not one.seen and one.name == one.name_b for one in self.tensors
        )
        return pairs and not self.only_a and not self.only_b

    @property
    def sentences(self) -> list[str]:
        """What is true of the whole, then of groups of tensors, the most values first, then of what has no partner."""
        groups = grouped((f"{one.relation.key} {one.seen}", one) for one in self.tensors)
        order = sorted(groups.values(), key=lambda group: -values(group))
        texts = [self._whole] if self._whole else []
        total = values(self.tensors)
        for group in order:
            share = percent(values(group) / total) if total else "none"
            texts.append(f"{count(group)} ({share} of the values): {sentence(group)}.")
        prefixes = [name for name in self.prefixes if name]
        if prefixes:
            sides = zip(("A's", "B's"), self.prefixes, strict=True)
            names = " and ".join(f"{which} begin with {name!r}" for which, name in sides if name)
            texts.append(f"Names differ in what they begin with: {names}.")
        renamed = [one for one in self.tensors if one.how == "contents"]
        if renamed:
            shown = some([f"{one.name} is {one.name_b}" for one in renamed])
            texts.append(f"Renamed, with the same bytes: {shown}.")
        alone = [(which, singles) for which, singles in (("A", self.only_a), ("B", self.only_b)) if singles]
        return texts + [f"Only in {which}: {count(of)}, {some([one.name for one in of])}." for which, of in alone]

    @property
    def _whole(self) -> str:
        """The one sentence on all of it, where there is one."""
        if self.same:
            return "Both hold the same tensors, byte for byte."
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
        """Where A and B are, and of which kind."""
        a, b = self.kinds
        return f"A: {self.a}, {a}", f"B: {self.b}, {b}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
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
    far = one.relation.change
    figures = None
    if far is not None:
        relative = far.relative if math.isfinite(far.relative) else None
        figures = {"kept": far.kept, "bits_kept": far.bits_kept, "relative": relative, "cosine": far.cosine}
    said = asdict(one.relation)
    said.pop("change")
    return {**asdict(one), "relation": {**said, "key": one.relation.key, "change": figures}}


def diff(a: str | Path | Checkpoint, b: str | Path | Checkpoint, progress: Progress | None = None) -> Difference:
    """Compare two checkpoints, one tensor at a time.

    Args:
        a: a file or a folder that `open_checkpoint` knows, or what it returned.
        b: the other one, which may be of another kind.
        progress: told the bytes of each of A's tensors that has a partner, after it was compared.

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
        found, seen = Relation("identical"), ""
        if how != "contents":
            found, seen = _relation(one, other)
        shapes = (one.shape, other.shape)
        yield TensorDifference(name, name_b, role_of(name), (one.stored, other.stored), shapes, found, seen, how)
        if progress is not None:
            progress(one.tensor.nbytes)


def _relation(one: Weight, other: Weight) -> tuple[Relation, str]:
    """How they compare, and what was compared of them."""
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
    """How B follows from A transposed; None where nothing but numbers says that it does."""
    if not 0 < a.nbytes <= HELD:
        return None
    found = relation(Pair(Held.turned(a), b))
    close = found.kind == "changed" and found.change is not None and found.change.cosine > _APART
    return found if found.kind in _FOUND or close else None
