"""How one tensor follows from another, as their bits show: by which cast, grid or merge; or how far it is."""

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

_SIGMAS = 5.0  # standard deviations that a count of values stochastically rounded up may be from its expectation

_TILES = {"row": ROW, "128x128": square(128), "2^k": block(32), **{f"1x{n}": block(n) for n in (16, 32, 64, 128)}}
"""Tiles by the names that an origin has for them."""

_LOOKED_AT = 256  # tiles examined, spread over the tensor
_LEVELS = 512  # most distinct values of a tile: 8 bits with signs
_ROOM = 2.0  # allowed error in half steps: values of a grid and midpoints were rounded when stored


# ---- rounding to a format --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rounded:
    """How values were rounded to `format`: each one to one of its two neighbours."""

    format: str
    telling: int
    """The number of values that are not exact in the format, so that they had to be rounded."""
    roundings: tuple[str, ...]
    """The rounding modes that explain all values; for few values several may. Empty if none does."""
    nearest: float
    """The share of the telling values that were rounded to the nearer neighbour, or on a tie."""
    overflowing: int
    """The number of values beyond the format's largest."""
    through: str | None = None
    """The format to which they were rounded before, to nearest."""


def steps(magnitudes: Doubles, format: Float) -> Doubles:
    """The spacing of the format's values at each magnitude (for a power of two, above it)."""
    return np.ldexp(1.0, np.maximum(np.frexp(magnitudes)[1] - 1, format.min_exponent) - format.mantissa_bits)


def nearest(values: Doubles, format: Float) -> Doubles:
    """Values rounded to the nearest value of a format, ties to even; infinite beyond the largest one."""
    finite = np.where(np.isfinite(values), values, 0.0)
    step = steps(np.abs(finite), format)
    rounded = np.rint(finite / step) * step
    rounded = np.where(np.abs(rounded) > format.max, np.copysign(np.inf, finite), rounded)
    return np.where(np.isfinite(values), rounded, values)


class Rounding:
    """Tests the hypothesis that B is A rounded to a format, piece by piece, until a value refutes it.

    Where A's value x is between neighbours l and u of the format, |l| < |x| < |u|, B must have l or u. The choices for
    all values determine the rounding mode. Stochastic rounding gives u with probability (|x| - |l|) / (|u| - |l|): so
    the expected number of values rounded to the farther neighbour is the sum of the smaller of both probabilities.
    """

    def __init__(self, format: Float, through: Float | None = None) -> None:
        self._format, self._through = format, through
        self._counts = np.zeros((3, 2, 2), np.int64)
        """Counts of values by position (inner half, outer half, tie), whether rounded outward, and whether up."""
        self._odd = 0  # ties rounded to the odd neighbour
        self._farther = self._variance = 0.0
        self._overflowing = self._evident = 0

    def evidence(self, significant_bits: int) -> float:
        """Bits of evidence that B, stored with that many significant bits, was rounded to the format: the bits that
        telling values leave unused, without the first CHOSEN of them; infinite where B's type has no more bits than the
        format."""
        unused = significant_bits - self._format.significant_bits
        return float(max(self._evident - CHOSEN, 0) * unused) if unused > 0 else np.inf

    def add(self, a: Doubles, b: Doubles) -> bool:
        """Add the next values; False if one refutes the hypothesis."""
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
        """Whether values beyond the largest one became the largest, infinite or NaN."""
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
        """The result for all values added."""
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
        # Each value is rounded to the farther neighbour with its own probability. A few values may be for other reasons
        # (another rounding before, an update), but hardly half of the expected number.
        expected = abs(far - self._farther) <= _SIGMAS * np.sqrt(self._variance)
        if far > max(1, self._farther / 2) and outward and expected:
            yield STOCHASTIC


# ---- values on a quantization grid -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Requantised:
    """B's values lie on a grid; how many of A's values were rounded to the nearest grid value in use."""

    grid: str
    """The format and the granularity of scales, as text."""
    nearest: float
    """The share among the values examined."""
    looked_at: int
    all: bool
    """Whether all values were examined."""


def requantised(pair: Pair, origin: Origin, significant_bits: int) -> Requantised | None:
    """How B's values follow from A's, if B's origin is a grid; None if it is not.

    The values in use in each tile are the grid. A value counts as the nearest one if no other value in use is nearer by
    more than the rounding errors of both, at that many significant bits.
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
    """The values of some tiles, spread over the tensor; with one scale for the tensor, all values in runs."""
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
"""identical: the same bytes. equal: equal values, in two types or with other signs of zero. cast: B is A rounded to a
format. uncast: A is B rounded to one. near: within one step of a format of A. alike: in two types, and no farther apart
than two roundings of the same values. multiple: A times a factor. average: of A and a third tensor. quantised: B's
values are on a quantizer's grid. merged: A plus a matrix of low rank. changed: none of these. unrelated: changed, and
nearly orthogonal. unread: not compared."""

_FORMATS = (
    "bf16", "fp16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "tf32", "fp32",
)  # fmt: skip
_CHAINS = (("bf16", "fp16"), ("fp16", "bf16"), ("bf16", "float8_e4m3fn"), ("fp16", "float8_e4m3fn"))
_FIRST = 1 << 10  # values on which a hypothesis is tested before all are
_EVIDENT = 4  # the fewest values that must follow from a factor
_FOLLOWING = 0.5  # the least share of nearest grid values: GPTQ takes others to compensate earlier errors
_KEPT = 0.9  # the share of equal values from which on a difference is sparse, with a rank that means nothing
_UNRELATED, _MANY = 0.05, 4096  # the cosine below which this many values are unrelated
_HIDDEN = 100  # the ratio of sums of squares beyond which a cosine is not used


@dataclass(frozen=True)
class Relation:
    """How B follows from A, and how far it is: the fields that are not None are details of the `kind`."""

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
    """How B follows from A: the first of `KINDS` that all values confirm. Both are read once for each hypothesis that
    holds."""
    if same_bytes(pair):
        return Relation("identical")
    if not (comparable(pair.a.dtype) and comparable(pair.b.dtype)):
        return Relation("unread")
    far = change(pair)
    if far.unchanged == far.values:
        return Relation("equal", far)
    if not (readable(pair.a) and readable(pair.b)):  # integers: any cast would explain a few of them
        return Relation(_apart(far), far)
    return _rounded(pair, far) or _derived(pair, far) or Relation(_apart(far), far)


def _apart(far: Change) -> str:
    # A few huge values would hide what the others have in common.
    hidden = far.kept >= _KEPT or not far.squares_a <= _HIDDEN * far.squares_b <= _HIDDEN**2 * far.squares_a
    return "unrelated" if far.values >= _MANY and not hidden and abs(far.cosine) < _UNRELATED else "changed"


def _rounded(pair: Pair, far: Change) -> Relation | None:
    """B as A rounded to a format, or A as B; only formats in which values are not exact are evidence."""
    chance = near = None
    for kind, one in (("cast", pair), ("uncast", Pair(pair.b, pair.a))):
        for guess in _guesses(one):
            held = _held(guess, one)
            if held is not None and (found := held.found()).telling and held.evidence(_bits(one.b.dtype)) >= CERTAIN:
                # For few values two casts to nearest in a row may explain what stochastic rounding does.
                if found.roundings and (found.roundings != (STOCHASTIC,) or found.telling >= _MANY):
                    return Relation(kind, far, found)
                chance = chance or (Relation(kind, far, found) if found.roundings else None)
                near = near or (Relation("near", far, found) if kind == "cast" else None)
    return chance or near


G = TypeVar("G", bound="Rounding | Multiple | Alike | Average")


def _held(make: Callable[[], G], pair: Pair) -> G | None:
    """The hypothesis after all values, or None if one refutes it: nearly all are refuted by the first few."""
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
    """Relations that need B's origin, or a hypothesis about a factor or a third tensor."""
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
    """Tests the hypothesis that B is A times one factor, rounded to `stored` (None: float64).

    The factor is the least-squares fit of the first values, and a product may be off by half a step plus the factor's
    own error. A factor so close to 1 that an ordinary update would look the same is refuted.
    """

    def __init__(self, stored: Float | None) -> None:
        self._bits = stored.significant_bits if stored is not None else 53
        self._least = stored.min_subnormal if stored is not None else 0.0
        self.factor = 0.0
        self.telling = 0
        """The number of nonzero values of B."""

    def add(self, a: Doubles, b: Doubles) -> bool:
        """Add the next values; False if one refutes the hypothesis."""
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
    """Tests the hypothesis that A and B are the same values rounded to two formats: at most half a step of each
    apart."""

    def __init__(self, one: Float, other: Float) -> None:
        self._one, self._other = one, other

    def add(self, a: Doubles, b: Doubles) -> bool:
        """Add the next values; False if one refutes the hypothesis."""
        if not np.array_equal(np.isfinite(a), np.isfinite(b)):
            return False
        finite = np.isfinite(a)
        a, b = a[finite], b[finite]
        return bool((2 * np.abs(b - a) <= steps(np.abs(a), self._one) + steps(np.abs(b), self._other)).all())


class Average:
    """Tests the hypothesis that B, stored as `stored`, is the average of A and a third tensor, both in the format
    `narrow`.

    Then 2B - A is that third tensor. All its values are on the narrow format's grid, within twice the rounding error of
    B; random values would be with a probability of this width over the grid's spacing.
    """

    def __init__(self, narrow: Float, stored: Float) -> None:
        self._narrow, self._bits = narrow, stored.significant_bits
        self.evidence = 0.0

    def add(self, a: Doubles, b: Doubles) -> bool:
        """Add the next values; False if one refutes the hypothesis."""
        if not (np.isfinite(a).all() and np.isfinite(b).all() and np.array_equal(nearest(a, self._narrow), a)):
            return False
        third = 2 * b - a
        room = 2.0 ** (1 - self._bits) * np.abs(b)
        if not (np.abs(nearest(third, self._narrow) - third) <= room).all():
            return False
        # Values of B that are exact in the narrow format tell nothing: 2B - A is then on the grid in any case.
        able = (nearest(b, self._narrow) != b) & (room > 0)
        chance = np.minimum(2 * room[able] / steps(np.abs(third[able]), self._narrow), 1.0)
        self.evidence += float(-np.log2(chance).sum())
        return True
