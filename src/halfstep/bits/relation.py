"""What two tensors' bits say of how one came from the other: which cast, which grid, which merge; or only how far."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeVar

import numpy as np

from halfstep import formats
from halfstep.bits.grids import CERTAIN
from halfstep.bits.origin import origin, stored_format
from halfstep.bits.pair import Change, Doubles, LowRank, Pair, change, comparable, low_rank, same_bytes
from halfstep.bits.rounded import STOCHASTIC, Requantised, Rounded, Rounding, nearest, requantised, steps
from halfstep.bits.scan import readable, scan
from halfstep.formats import Float


KINDS = (
    "identical", "equal", "cast", "uncast", "near", "alike", "multiple", "average", "quantised", "merged", "changed",
    "unrelated", "unread",
)  # fmt: skip
"""identical: the same bytes. equal: equal values, of two types or of signs of zero. cast: B is A rounded to a format.
uncast: A is B rounded to one. near: within one step of a format of A. alike: of two types, and no farther apart than
roundings of the same values. multiple: A times a factor. average: of A and a third tensor. quantised: B's values lie on
a quantiser's grid. merged: A and a matrix of low rank. changed: none of these. unrelated: changed, and at right angles.
unread: values that were not compared."""

_FORMATS = (
    "bf16", "fp16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "tf32", "fp32",
)  # fmt: skip
_CHAINS = (("bf16", "fp16"), ("fp16", "bf16"), ("bf16", "float8_e4m3fn"), ("fp16", "float8_e4m3fn"))
_FIRST = 1 << 10  # values that a guess is tried on before all are
_EVIDENT = 4  # values that must follow from a factor
_FOLLOWING = 0.5  # of A's values on a grid: GPTQ goes to others than the nearest, to mend the errors of others
_KEPT = 0.9  # equal values from which on a difference is of some places, and its rank is their number
_UNRELATED, _MANY = 0.05, 4096  # the cosine below which so many values have nothing in common; a number that tells
_HIDDEN = 100  # times the sum of squares of the other


@dataclass(frozen=True)
class Relation:
    """How B follows from A, and how far it is: what is not None says more of the `kind`."""

    kind: str
    change: Change | None = None
    rounded: Rounded | None = None
    grid: Requantised | None = None
    factor: float | None = None
    averaged: str | None = None
    """The format of A and of the third tensor."""
    low_rank: LowRank | None = None

    @property
    def key(self) -> str:
        """The conclusion in a few words, to group tensors by."""
        found = self.rounded
        if found is not None:
            return f"{self.kind} {f'{found.through}, then ' if found.through else ''}{found.format}"
        return self.kind if self.grid is None else f"{self.kind} {self.grid.grid}"


def relation(pair: Pair) -> Relation:
    """How B follows from A: the first of `KINDS` that all values bear out, read once for each guess that holds."""
    if same_bytes(pair):
        return Relation("identical")
    if not (comparable(pair.a.dtype) and comparable(pair.b.dtype)):
        return Relation("unread")
    far = change(pair)
    if far.unchanged == far.values:
        return Relation("equal", far)
    if not (readable(pair.a) and readable(pair.b)):  # whole numbers: of a few, any cast explains some
        return Relation(_apart(far), far)
    return _rounded(pair, far) or _derived(pair, far) or Relation(_apart(far), far)


def _apart(far: Change) -> str:
    # A few values that exploded hide what the others have in common.
    hidden = far.kept >= _KEPT or not far.squares_a <= _HIDDEN * far.squares_b <= _HIDDEN**2 * far.squares_a
    return "unrelated" if far.values >= _MANY and not hidden and abs(far.cosine) < _UNRELATED else "changed"


def _rounded(pair: Pair, far: Change) -> Relation | None:
    """B as A rounded to a format, or A as B; of a format that holds both the neighbours say nothing."""
    chance = near = None
    for kind, one in (("cast", pair), ("uncast", Pair(pair.b, pair.a))):
        for guess in _guesses(one):
            held = _held(guess, one)
            if held is not None and (found := held.found()).telling and held.evidence(_bits(one.b.dtype)) >= CERTAIN:
                # Of few values two casts to nearest, one after the other, may explain as much without chance.
                if found.roundings and (found.roundings != (STOCHASTIC,) or found.telling >= _MANY):
                    return Relation(kind, far, found)
                chance = chance or (Relation(kind, far, found) if found.roundings else None)
                near = near or (Relation("near", far, found) if kind == "cast" else None)
    return chance or near


G = TypeVar("G", bound="Rounding | Multiple | Alike | Average")


def _held(make: Callable[[], G], pair: Pair) -> G | None:
    """The guess, if no value refutes it: nearly all are refuted by the first few."""
    if not make().add(*next(pair.runs(_FIRST))):
        return None
    guess = make()
    return guess if all(guess.add(a, b) for a, b in pair.runs()) else None


def _guesses(pair: Pair) -> Iterator[Callable[[], Rounding]]:
    wide, narrow = _bits(pair.a.dtype), _bits(pair.b.dtype)
    for name in _FORMATS:
        if _format(name).significant_bits < wide and _format(name).significant_bits <= narrow:
            yield partial(Rounding, _format(name))
    for first, name in _CHAINS:
        if _format(first).significant_bits < wide and _format(name).significant_bits <= narrow:
            yield partial(Rounding, _format(name), _format(first))


def _derived(pair: Pair, far: Change) -> Relation | None:
    """What takes a look at B alone, or a guess at a factor or a third tensor."""
    stored = stored_format(pair.b.dtype)
    if stored is None:
        return None
    other = stored_format(pair.a.dtype)
    if other is not None and pair.a.dtype != pair.b.dtype and _held(partial(Alike, other, stored), pair) is not None:
        return Relation("alike", far)
    multiple = _held(partial(Multiple, stored), pair)
    if multiple is not None and multiple.telling >= _EVIDENT:
        return Relation("multiple", far, factor=multiple.factor)
    for name in ("bf16", "fp16"):
        average = _held(partial(Average, _format(name), stored), pair)
        if average is not None and average.evidence >= CERTAIN:
            return Relation("average", far, averaged=name)
    found = scan(pair.b)
    bits = min(found.table.significant_bits, stored.significant_bits)
    grid = requantised(pair, origin(found, pair.b.dtype), bits)
    if grid is not None and grid.nearest >= _FOLLOWING:
        return Relation("quantised", far, grid=grid)
    if far.kept < _KEPT and (merged := low_rank(pair, bits)):
        return Relation("merged", far, low_rank=merged)
    return None


def _bits(dtype: str) -> int:
    """The significant bits of a stored type."""
    format = stored_format(dtype)
    return format.significant_bits if format is not None else 53


@cache
def _format(name: str) -> Float:
    return formats.get(name, Float)


class Multiple:
    """The guess that B is A times one factor, rounded to `stored` (None: float64); a value of either may refute it.

    The factor is that of the least squares of the first values, and a product may be off by half a step and by what the
    factor is. A factor so close to 1 that an ordinary update would look the same is refuted.
    """

    def __init__(self, stored: Float | None) -> None:
        self._bits = stored.significant_bits if stored is not None else 53
        self._least = stored.min_subnormal if stored is not None else 0.0
        self.factor = 0.0
        self.telling = 0
        """Values of B beyond the first that are not zero."""

    def add(self, a: Doubles, b: Doubles) -> bool:
        """Take in the next values; False if one refutes the guess."""
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            return False
        tolerance = 1.1 * 2.0 ** -min(self._bits, 50)
        if not self.factor:
            squares = float(np.dot(a, a))
            self.factor = float(np.dot(a, b)) / squares if squares and math.isfinite(squares) else math.nan
            power = 2.0 ** round(math.log2(abs(self.factor))) if self.factor and math.isfinite(self.factor) else 0.0
            if abs(abs(self.factor) - power) <= tolerance * power:
                self.factor = math.copysign(power, self.factor)
        if not self.factor or not math.isfinite(self.factor) or abs(self.factor - 1) <= 8 * tolerance:
            return False
        product = self.factor * a
        self.telling += int(np.count_nonzero(b))
        return bool((np.abs(b - product) <= tolerance * np.abs(product) + self._least).all())


class Alike:
    """The guess that A and B are roundings of the same values to two formats: half a step of each apart, or less."""

    def __init__(self, one: Float, other: Float) -> None:
        self._one, self._other = one, other

    def add(self, a: Doubles, b: Doubles) -> bool:
        """Take in the next values; False if one refutes the guess."""
        if not np.array_equal(np.isfinite(a), np.isfinite(b)):
            return False
        finite = np.isfinite(a)
        a, b = a[finite], b[finite]
        return bool((2 * np.abs(b - a) <= steps(np.abs(a), self._one) + steps(np.abs(b), self._other)).all())


class Average:
    """The guess that B, stored as `stored`, is the average of A and of a third tensor, both in the format `narrow`.

    Then 2B - A is that third one. It lies on the narrow format's grid, within twice what B's own rounding moved it, for
    all values: random ones would by the chance that this width has between two values of the grid.
    """

    def __init__(self, narrow: Float, stored: Float) -> None:
        self._narrow, self._bits = narrow, stored.significant_bits
        self.evidence = 0.0

    def add(self, a: Doubles, b: Doubles) -> bool:
        """Take in the next values; False if one refutes the guess."""
        if not (np.isfinite(a).all() and np.isfinite(b).all() and np.array_equal(nearest(a, self._narrow), a)):
            return False
        third = 2 * b - a
        room = 2.0 ** (1 - self._bits) * np.abs(b)
        if not (np.abs(nearest(third, self._narrow) - third) <= room).all():
            return False
        # What the narrow format holds itself tells nothing: of two neighbours, 2B - A is the next one.
        able = (nearest(b, self._narrow) != b) & (room > 0)
        chance = np.minimum(2 * room[able] / steps(np.abs(third[able]), self._narrow), 1.0)
        self.evidence += float(-np.log2(chance).sum())
        return True
