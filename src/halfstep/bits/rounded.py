"""Whether one tensor is another one rounded: to a format, and by which rounding, or to a quantiser's grid."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halfstep.bits.grids import CHOSEN
from halfstep.bits.origin import Origin
from halfstep.bits.pair import Doubles, Pair
from halfstep.bits.table import tells
from halfstep.bits.values import matrix_of
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
