"""What two tensors' bits say of how one came from the other: which cast, which grid, which merge; or only how far."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from halfstep.bits.grids import CERTAIN, CHOSEN
from halfstep.bits.origin import Origin, float_named, origin, stored_format
from halfstep.bits.pair import Change, LowRank, Pair, change, comparable, low_rank, same_bytes
from halfstep.bits.scan import readable, scan
from halfstep.bits.table import tells
from halfstep.bits.values import Doubles, matrix_of
from halfstep.formats import Float
from halfstep.quant import ROW, TENSOR, Tile
from halfstep.quant.tile import block, square


EVEN, AWAY, NEAREST = "to nearest, ties to even", "to nearest, ties away from zero", "to nearest"
ZERO, UP, DOWN, STOCHASTIC = "toward zero", "up", "down", "stochastically"

_SIGMAS = 5.0  # how far a count of stochastic rounding may be from the one expected

_TILES = {"row": ROW, "128x128": square(128), "2^k": block(32), **{f"1x{n}": block(n) for n in (16, 32, 64, 128)}}
"""By the names that an origin gives to what shares a scale."""

_LOOKED_AT = 256  # tiles, spread over the tensor
_LEVELS = 512  # distinct values of a tile, of 8 bits with signs
_ROOM = 2.0  # times half a step, by which values of a grid and the middles between them were rounded when stored


# ---- rounding to a format --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rounded:
    """How values were rounded to `format`: every one is one of the two neighbours of what it was."""

    format: str
    telling: int
    """Values that the format does not hold, so that they had to be rounded."""
    roundings: tuple[str, ...]
    """Those that made all of these choices; of few values several may. None where no rounding that is known did."""
    nearest: float
    """The share of the telling values that went to the nearer neighbour, or one of two as near."""
    overflowing: int
    """Values beyond the format's largest."""
    through: str | None = None
    """The format that they were rounded to before that, to nearest."""


def steps(magnitudes: Doubles, format: Float) -> Doubles:
    """The distance of the format's values around each magnitude (of values from a power of two on, above it)."""
    return np.ldexp(1.0, np.maximum(np.frexp(magnitudes)[1] - 1, format.min_exponent) - format.mantissa_bits)


def nearest(values: Doubles, format: Float) -> Doubles:
    """Each rounded to the nearest value of a format, ties to even; beyond the largest one infinite."""
    finite = np.where(np.isfinite(values), values, 0.0)
    step = steps(np.abs(finite), format)
    rounded = np.rint(finite / step) * step
    rounded = np.where(np.abs(rounded) > format.max, np.copysign(np.inf, finite), rounded)
    return np.where(np.isfinite(values), rounded, values)


class Rounding:
    """The guess that B is A rounded to a format, taken in piece by piece until a value refutes it.

    Where A has the value x between neighbours l and u of the format, |l| < |x| < |u|, B must have l or u. Which one,
    for all of them, tells the rounding. Stochastic rounding to u has the probability (|x| - |l|) / (|u| - |l|): so the
    values that go to the farther neighbour are as many as the smaller of both probabilities add up to.
    """

    def __init__(self, format: Float, through: Float | None = None) -> None:
        self._format, self._through = format, through
        self._counts = np.zeros((3, 2, 2), np.int64)
        """Values by the half in which they lie (inner, outer, tie), whether they went outward, and whether up."""
        self._odd = 0  # ties that went to the odd neighbour
        self._farther = self._variance = 0.0
        self._overflowing = self._evident = 0

    def evidence(self, significant_bits: int) -> float:
        """Bits of evidence that B, stored with so many significant bits, was rounded to the format: what it leaves of
        them unused, in values that tell, CHOSEN of them for free; infinite where it is stored in no more than the
        format has.
        """
        unused = significant_bits - self._format.significant_bits
        return float(max(self._evident - CHOSEN, 0) * unused) if unused > 0 else np.inf

    def add(self, a: Doubles, b: Doubles) -> bool:
        """Take in the next values; False if one refutes the guess."""
        format = self._format
        if self._through is not None:
            a = nearest(a, self._through)
        magnitudes, results = np.abs(a), np.abs(b)
        finite = np.isfinite(a)
        if not finite.all():
            if not (np.isnan(b[np.isnan(a)]).all() and self._beyond(a, b, np.isinf(a))):
                return False
            a, b, magnitudes, results = a[finite], b[finite], magnitudes[finite], results[finite]
        step = steps(magnitudes, format)
        scaled = magnitudes / step
        low = np.floor(scaled)
        share = scaled - low
        outward = results > low * step
        over = (low + outward) * step > format.max
        over |= magnitudes > format.max
        fits = ((low + outward) * step == results) & ((share > 0) | ~outward) & ((b == 0) | ((b < 0) == (a < 0)))
        if not (fits | over).all() or not self._beyond(a, b, over):
            return False
        self._overflowing += int(over.sum())
        telling = (share > 0) & ~over
        self._count(share, outward, low, a > 0, telling)
        self._evident += int(tells(results[telling]).sum())
        return True

    def _beyond(self, a: Doubles, b: Doubles, over: NDArray[np.bool_]) -> bool:
        """Whether values beyond the largest one became that, infinite or NaN."""
        if not over.any():
            return True
        results = b[over]
        full = (np.abs(results) == self._format.max) | np.isinf(results)
        return bool((np.isnan(results) | (full & ((results < 0) == (a[over] < 0)))).all())

    def _count(
        self,
        share: Doubles,
        outward: NDArray[np.bool_],
        low: Doubles,
        positive: NDArray[np.bool_],
        telling: NDArray[np.bool_],
    ) -> None:
        if not telling.any():
            return
        share, outward, low, positive = share[telling], outward[telling], low[telling], positive[telling]
        tie = share == 0.5
        half = np.where(tie, 2, share > 0.5)
        self._counts += np.bincount(half * 4 + outward * 2 + (outward == positive), minlength=12).reshape(3, 2, 2)
        self._odd += int((tie & ((low % 2 == 0) == outward)).sum())
        self._farther += float(np.minimum(share, 1 - share).sum())
        self._variance += float((share * (1 - share)).sum())

    def found(self) -> Rounded:
        """What all values that were taken in say."""
        telling = int(self._counts.sum())
        far = int(self._counts[0, 1].sum() + self._counts[1, 0].sum())
        return Rounded(
            self._format.name,
            telling,
            tuple(self._roundings(far)),
            1 - far / telling if telling else 1.0,
            self._overflowing,
            self._through.name if self._through else None,
        )

    def _roundings(self, far: int) -> Iterator[str]:
        _, outward = self._counts.sum((0, 2))
        down, up = self._counts.sum((0, 1))
        ties_inward = self._counts[2, 0].sum()
        if not far:
            even, away = not self._odd, not ties_inward
            yield NEAREST if even == away else EVEN if even else AWAY
        if not outward:
            yield ZERO
        if not down:
            yield UP
        if not up:
            yield DOWN
        # Each goes to the farther neighbour by a chance of its own. Of few values some do so for other reasons (another
        # rounding before this one, an update), but hardly half of those expected.
        expected = abs(far - self._farther) <= _SIGMAS * np.sqrt(self._variance)
        if far > max(1, self._farther / 2) and outward and expected:
            yield STOCHASTIC


# ---- values on a quantization grid -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Requantised:
    """B's values lie on a grid; how many of A's values went to the nearest of the grid's values in use there."""

    grid: str
    """The format, and what shares a scale."""
    nearest: float
    """The share of the values looked at."""
    looked_at: int
    all: bool
    """Whether these are all values."""


def requantised(pair: Pair, origin: Origin, significant_bits: int) -> Requantised | None:
    """How B's values follow from A's, where B's bits say that they lie on a grid; None where they do not say so.

    Of each tile the values in use are the grid. A value counts as the nearest one if no other value in use is nearer by
    more than the rounding of both, which have so many significant bits as they are stored.
    """
    if not origin.through or origin.scale is None or origin.share < 1 or origin.through[0] in ("bf16", "fp16"):
        return None
    tile = _TILES.get(origin.scale, TENSOR)
    nearest = count = 0
    for a, b in _tiles(pair, tile):
        levels = np.unique(b)
        if levels.size > _LEVELS or not (np.isfinite(a).all() and np.isfinite(b).all()):
            return None
        best = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, a)]
        room = _ROOM * 2.0**-significant_bits * np.maximum(np.abs(best), np.abs(b))
        nearest += int((np.abs(a - b) <= np.abs(a - best) + room).sum())
        count += a.size
    named = f"{origin.through[0]}, {_words(origin.scale)}"
    return Requantised(named, nearest / count, count, count == pair.a.numel) if count else None


def _words(scale: str) -> str:
    if scale == "any":
        return "one scale"
    if scale == "row":
        return "a scale a row"
    return f"scales of {scale}" if scale.startswith("2^") else f"a scale for each {scale} block"


def _tiles(pair: Pair, tile: Tile) -> Iterator[tuple[Doubles, Doubles]]:
    """Values of some tiles, spread over the tensor; where all of it shares its scales, runs of it."""
    columns = matrix_of(pair.a.shape)[1] or pair.a.numel
    if tile == TENSOR:
        yield from pair.runs()
        return
    high, width = tile.rows or 1, tile.columns or columns
    bands = -(-(pair.a.numel // columns) // high)
    across = -(-columns // width)
    step = max(bands * across // _LOOKED_AT, 1)
    for i, (a, b) in enumerate(pair.runs(high * columns)):
        one, other = a.reshape(-1, columns), b.reshape(-1, columns)
        for j in range(-i * across % step, across, step):
            place = slice(j * width, (j + 1) * width)
            yield one[:, place].ravel(), other[:, place].ravel()


# ---- the relation of two tensors -------------------------------------------------------------------------------------

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
        if float_named(name).significant_bits < wide and float_named(name).significant_bits <= narrow:
            yield partial(Rounding, float_named(name))
    for first, name in _CHAINS:
        if float_named(first).significant_bits < wide and float_named(name).significant_bits <= narrow:
            yield partial(Rounding, float_named(name), float_named(first))


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
        average = _held(partial(Average, float_named(name), stored), pair)
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


# ---- multiples, common sources and averages --------------------------------------------------------------------------


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
