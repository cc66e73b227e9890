"""Relations between tensors in sentences: one for all tensors for which the same is true."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from halfstep.bits.pair import Change
from halfstep.bits.relation import NEAREST, Relation
from halfstep.inspection.schemes import written
from halfstep.text import percent, some


@dataclass(frozen=True)
class TensorDifference:
    """A tensor of A and its partner in B: types as stored, shapes, and how B's follows from A's."""

    name: str
    name_b: str
    role: str
    stored: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    relation: Relation
    seen: str = ""
    """What was compared: "" for both as they are, "transposed", "reshaped", "rows in another order" (or columns, both,
    or a vector's values), or the "first rows", where B has more or fewer."""
    how: str = "name"
    """How they were matched: by name, prefix, or contents."""

    @property
    def numel(self) -> int:
        """The number of A's values."""
        return math.prod(self.shapes[0])


@dataclass(frozen=True)
class Single:
    """A tensor that only one of the checkpoints has."""

    name: str
    role: str
    stored: str
    shape: tuple[int, ...]


_SHORT = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def count(some: Sequence[object]) -> str:
    """The number of tensors, in words."""
    return f"{len(some)} tensor{'s' if len(some) != 1 else ''}"


def values(group: Iterable[TensorDifference]) -> int:
    """The number of values of A's tensors."""
    return sum(one.numel for one in group)


def sentence(group: Sequence[TensorDifference]) -> str:
    """A sentence on tensors with one key, compared in one way."""
    first = group[0]
    said = _SAID[first.relation.kind](group)
    if first.seen == "first rows":
        return (
            f"{first.shapes[0][0]} rows in A and {first.shapes[1][0]} in B"
            f"{' (the first of them)' if len(group) > 1 else ''}; of those that both have, {said}"
        )
    return f"{first.seen}; {said}" if first.seen else said


def _change(group: Sequence[TensorDifference]) -> Change:
    return sum((one.relation.change for one in group if one.relation.change is not None), Change())


def figures(group: Sequence[TensorDifference]) -> str:
    """How far B is from A, over all tensors of a group."""
    far = _change(group)
    bits = "" if far.bits_kept is None else f", {percent(far.bits_kept)} of the leading bits"
    broken = f"; {far.broken} values are finite in one only" if far.broken else ""
    return (
        f"{percent(far.kept)} of the values as they were{bits}; relative change {far.relative:.2g}, cosine "
        f"{cosine(far.cosine)}{broken}"
    )


def cosine(value: float) -> str:
    """A cosine with as many digits as distinguish it from 1.

    >>> cosine(0.99999987), cosine(0.25), cosine(1.0)
    ('1 - 1.3e-07', '0.250', '1')
    """
    return "1" if value >= 1 - 1e-15 else f"1 - {1 - value:.1e}" if value > 0.999 else f"{value:z.3f}"


def _types(group: Sequence[TensorDifference]) -> str:
    return ", ".join(f"{short(a)} in A and {short(b)} in B" for a, b in dict.fromkeys(one.stored for one in group))


def short(stored: str) -> str:
    """A type's short name."""
    return _SHORT.get(stored, stored)


def _roundings(group: Sequence[TensorDifference]) -> str:
    """The rounding modes that explain all tensors of a group; for few values several may, and not all have ties."""
    sets = [one.relation.rounded.roundings for one in group if one.relation.rounded is not None]
    plain = [[name.partition(",")[0] for name in some] for some in sets]
    common = [name for name in dict.fromkeys(plain[0]) if all(name in some for some in plain)]
    if not common:
        return " or ".join(dict.fromkeys(name for some in plain for name in some)) + ", not all in one way"
    ties = {name for some in sets for name in some if "," in name}
    return " or ".join(ties.pop() if name == NEAREST and len(ties) == 1 else name for name in common)


def _cast_to(group: Sequence[TensorDifference]) -> str:
    rounded = group[0].relation.rounded
    assert rounded is not None
    through = f"{rounded.through} and then to " if rounded.through else ""
    over = sum(one.relation.rounded.overflowing for one in group if one.relation.rounded is not None)
    beyond = f"; {over} value{'s' * (over != 1)} lay beyond its largest" if over else ""
    return f"rounded to {through}{rounded.format}, {_roundings(group)}{beyond}"


def _near(group: Sequence[TensorDifference]) -> str:
    rounded = group[0].relation.rounded
    assert rounded is not None
    telling = sum(one.relation.rounded.telling for one in group if one.relation.rounded)
    nearest = sum(one.relation.rounded.nearest * one.relation.rounded.telling for one in group if one.relation.rounded)
    return (
        f"every value of B is one of the two {rounded.format} neighbours of A's, {percent(nearest / telling)} the "
        "nearer one, by no rounding that is known: a cast of values near A's fits"
    )


def _multiple(group: Sequence[TensorDifference]) -> str:
    factors = [one.relation.factor or 0.0 for one in group]
    low, high = f"{min(factors):.5g}", f"{max(factors):.5g}"
    return f"B is A times {low}" if low == high else f"B is A times one factor each, from {low} to {high}"


def _average(group: Sequence[TensorDifference]) -> str:
    name = group[0].relation.averaged
    return f"B is the average of A and of another tensor in {name}: twice B less A is {name} throughout"


def _quantised(group: Sequence[TensorDifference]) -> str:
    grids = [one.relation.grid for one in group if one.relation.grid is not None]
    nearest = sum(grid.nearest * grid.looked_at for grid in grids) / sum(grid.looked_at for grid in grids)
    looked = "" if all(grid.all for grid in grids) else " looked at"
    where = f"B's values lie on the grid of {grids[0].grid}"
    if nearest == 1:
        return f"{where}, and all{looked} are the nearest there to A's: B is A rounded to it"
    return f"{where}; {percent(nearest)} of them{looked} are the nearest there to A's"


def _merged(group: Sequence[TensorDifference]) -> str:
    ranks = sorted(one.relation.low_rank.rank for one in group if one.relation.low_rank is not None)
    rank = f"rank {ranks[0]}" if ranks[0] == ranks[-1] else f"ranks from {ranks[0]} to {ranks[-1]}"
    return f"B less A has {rank}, up to rounding: a merged LoRA fits, or a few steps of plain SGD; {figures(group)}"


def _shape(group: Sequence[TensorDifference]) -> str:
    shapes = [f"{one.name} {written(one.shapes[0])} and {written(one.shapes[1])}" for one in group]
    return f"other shapes, so that no values belong together: {some(shapes)}"


_SAID: dict[str, Callable[[Sequence[TensorDifference]], str]] = {
    "identical": lambda group: "the same bytes",
    "equal": lambda group: f"equal values, stored as {_types(group)}",
    "cast": lambda group: f"B is A {_cast_to(group)}",
    "uncast": lambda group: f"A is B {_cast_to(group)}",
    "near": _near,
    "alike": lambda group: f"no farther apart than two roundings of the same values ({_types(group)})",
    "multiple": _multiple,
    "average": _average,
    "quantised": _quantised,
    "merged": _merged,
    "changed": lambda group: f"changed, {figures(group)}",
    "unrelated": lambda group: f"values that have nothing in common, cosine {cosine(_change(group).cosine)}",
    "unread": lambda group: f"not compared, for they are no plain numbers ({_types(group)}): decode them first",
    "shape": _shape,
}


def named(found: Relation) -> str:
    """A relation in a word or two, for a table."""
    if found.rounded is not None and len(found.rounded.roundings) == 1:
        return f"{found.key}, {found.rounded.roundings[0].partition(',')[0]}"
    if found.low_rank is not None:
        return f"merged, rank {found.low_rank.rank}"
    return "other shape" if found.kind == "shape" else found.key
