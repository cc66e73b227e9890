"""How surprising it is that values fit a format, counted in bits; whether values that share a scale lie on a grid."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from halfstep import formats
from halfstep.bits.scan import Levels, Scan
from halfstep.bits.table import WIDTH, Table, first_look, held_bits, scaled, tells
from halfstep.bits.values import TILES, Doubles, Places, as_float32
from halfstep.formats import Float
from halfstep.kernels.cpu import looks
from halfstep.kernels.cpu.tables import First, fitting, on_grid
from halfstep.quant import Tile


ENOUGH = 10.0
"""Bits of evidence below which nothing is concluded: a probability of 1 in 1000."""

CERTAIN = 40.0
"""Bits from which on a conclusion counts as certain: a probability of 1 in 10^12."""

MIXED = 0.01
"""The least share of fitting values in a mixture."""

SHORT = 4
"""Unused last bits that make a mantissa short: one in 2^SHORT random mantissas leaves that many unused."""

CHOSEN = 2
"""The number of magnitudes whose fit is no evidence: format and scale are chosen after seeing the values, so that they
fit."""


_ANY = (1 << 20, -(1 << 20), WIDTH - 1, False)  # a format of 53 bits and unbounded range


@dataclass(frozen=True)
class Fit:
    """How many of the able values lie on a narrower format's grid, and the bits of evidence in that.

    Able values are `Table.telling`, with exponents at which the narrower format has fewer bits. Where the wider one has
    a bits and the narrower g, random mantissas fit with a probability of (2^(g-1) - 1) / (2^(a-1) - 1).
    """

    held: int = 0
    beyond: int = 0
    bits: float = 0.0
    """log2 of 1 / the probability that all of `held` fit; equal values count once, those of CHOSEN magnitudes not at
    all."""
    expected: float = 0.0
    """The share of random mantissas that would fit."""
    short: int = 0
    """Values that do not fit, but leave SHORT or more of the last bits unused, as one in 2^SHORT random mantissas
    does."""
    filled: int = 0
    """Values of `held` that use the narrower format's last bit, as half of random mantissas do."""

    @property
    def share(self) -> float:
        """The share of the able values that lie on the grid."""
        return self.held / (self.held + self.beyond) if self.held + self.beyond else 0.0

    @property
    def mixed(self) -> bool:
        """Whether clearly more values fit than by chance, and the others have random mantissas: values of the narrower
        type, some of which were written since. Averages and sums of such values have short mantissas of any length."""
        written = self.beyond / 2**SHORT
        random = self.short <= 2 * written + 3 * np.sqrt(written) + 1
        evident = self.bits >= CERTAIN and self.share >= max(MIXED, 3 * self.expected)
        return evident and bool(random) and 4 * self.filled >= self.held

    @property
    def accepted(self) -> bool:
        """Whether all values fit, and not by chance."""
        return self.beyond == 0 and self.bits >= ENOUGH


def fit(scan: Scan, narrow: Float, wide: Float | None, used: int = WIDTH) -> Fit:
    """How the values of a tensor, which `wide` holds (None: 53 bits), fit `narrow`.

    Random mantissas are those of `wide`, limited to `used` bits.
    """
    few, most = _ends(narrow, wide, scan.table.lowest, len(scan.table.counts), used)
    # Where the narrower format has as many bits at all exponents, no value is able to tell.
    return Fit() if few is most else _fit(scan, few, most)


def first_looks(tables: Sequence[Table], wide: Float | None, formats: Sequence[Float]) -> list[First]:
    """A first look, in one call, at tables of values that `wide` holds (None: 53 bits): which formats may hold them."""
    few = max((one.significant_bits for one in formats), default=0)
    return first_look(tables, [scaled(wide) if wide else _ANY, *map(scaled, formats)], (few, SHORT, MIXED, CERTAIN))


def fit_bits(scan: Scan, wide: Sequence[Float | None], step: int | None = None) -> float:
    """The evidence that random mantissas of values that all of `wide` hold would use more significant bits than these
    do, or not all be multiples of 2^step; the number of bits, or the step, was chosen to fit, which costs evidence."""
    table, most = (
        scan.table,
        np.min([_ends(None, one, scan.table.lowest, len(scan.table.counts), WIDTH)[1] for one in wide], axis=0),
    )
    few = np.full(most.size, table.significant_bits) if step is None else np.maximum(table.rows - step + 1, 0)
    found = _fit(scan, np.minimum(few, most), most).bits - np.log2(WIDTH if step is None else table.rows.size)
    return max(0.0, float(found))


def halved(scan: Scan, look: First) -> tuple[int, float]:
    """The significant bits that half of the values fit, the others not; and the evidence that random mantissas of the
    bits in use would not."""
    count, left = scan.table.telling_count, look.left
    # At most (4p)^(n/2): the probability that half of n values do what each does with probability p = 2^-left.
    evidence = count / 2 * (left - 2) * _weight(scan, count) if left >= SHORT else 0.0
    return look.most - left, evidence


@lru_cache(1 << 10)
def _ends(
    narrow: Float | None, wide: Float | None, lowest: int, count: int, used: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The significant bits of values by exponent, in a narrower format and in a wider one (None: 53), at most `used`;
    read-only arrays, since they are cached."""
    most, few = (np.full(count, WIDTH - 1) if one is None else held_bits(one, lowest, count) for one in (wide, narrow))
    most = np.minimum(most, used)
    few = most if (few >= most).all() else np.minimum(few, most)
    few.flags.writeable = most.flags.writeable = False
    return few, most


def _weight(scan: Scan, count: int) -> float:
    """The share of `count` values that is evidence: equal ones count once, those of CHOSEN magnitudes not at all."""
    once = min(1.0, scan.distinct / count) if count else 0.0
    return once * max(0.0, 1 - CHOSEN / scan.magnitudes) if scan.magnitudes else 0.0


def _fit(scan: Scan, few: NDArray[np.int64], most: NDArray[np.int64]) -> Fit:
    held, able, seen = fitting(scan.table.counts, scan.table.telling, few, most, SHORT)
    count, (inside, short, filled) = int(held.sum()), seen.tolist()
    beyond = scan.table.nonzero - inside
    if not count:
        return Fit(0, beyond, short=short, filled=filled)
    chance = (2.0 ** np.maximum(few - 1, 0) - 1) / (2.0 ** np.maximum(most - 1, 1) - 1)
    bits = float((held * -np.log2(np.where(held > 0, chance, 1.0))).sum())
    return Fit(count, beyond, bits * _weight(scan, count), float((able * chance).sum() / able.sum()), short, filled)


WHOLE = "int"
"""Integers times one step: the number of bits of their codes is computed from the steps between smallest and
largest."""

GRIDS = (
    WHOLE, "float8_e4m3fn", "float8_e5m2", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn", "nf4", "bnb_fp4",
)  # fmt: skip
"""The grids that are looked for."""

WIDER = {"float6_e2m3fn": "float8_e4m3fn", "float6_e3m2fn": "float8_e5m2"}
"""Formats with the same significant bits and more exponents."""

_STEPS = 255  # steps between the ends of a grid of integers: 8-bit codes
_FEW = 10  # values of a tile, enough to rule out nearly all that do not fit; of the first tile all are checked
_CORNERS = 3  # rows of which these values are checked
_TOPS = 16  # a tile's largest magnitude is one of this many largest of the grid; of integers it may be any
_WIDEST = 24  # significant bits from which on several roundings are allowed for: scales multiplied one by one


@dataclass(frozen=True)
class Match:
    """A format whose values, times a scale for each `tile` (None: one for the tensor), are all magnitudes."""

    format: str
    tile: Tile | None
    fit: Fit
    even: bool = False
    """Whether these are integers times one step in all, or in most tiles: quantized, or counted."""

    also: tuple[str, ...] = ()
    """A format with the same steps and fewer exponents, which holds the values as well."""
    finer: float = 0.0
    """The bits of the wider format's finer steps that no value uses."""

    @property
    def grid(self) -> str:
        """The name in `GRIDS`."""
        return WHOLE if self.format.startswith(WHOLE) else self.format

    @property
    def size(self) -> int:
        """The number of magnitudes of the format: of several that hold the values, the smallest is the strongest
        statement."""
        return 2 ** (int(self.format[3:]) - 1) - 1 if self.grid == WHOLE else _grid(self.format).size

    @property
    def sure(self) -> bool:
        """Whether the match is certain, and integers are told from floats."""
        return self.fit.bits >= CERTAIN and (self.grid != WHOLE or self.finer >= CERTAIN)


def fit_levels(levels: Levels, wide: Float | None) -> Match | None:
    """The format whose values, times one scale, are all of a tensor's distinct magnitudes; or None.

    Of several, the one with the fewest values; the largest levels fit by choice, so they are no evidence.
    """
    found = []
    for name in GRIDS:
        held = _held(levels.magnitudes, name, wide)
        if held is not None and (named := _format(name, (levels.high - levels.low) / held.scale)):
            finer = _finer(name, levels.magnitudes, levels.times, held.scale)
            if name == WHOLE and finer < CERTAIN:
                continue
            weight = held.bits[tells(levels.magnitudes)][:-CHOSEN].sum() - np.log2(_TOPS * len(GRIDS))
            found.append(
                Match(named, None, Fit(levels.magnitudes.size, 0, max(float(weight), 0.0)), name == WHOLE, (), finer)
            )
    return _best(one for one in found if one.fit.accepted)


def fit_tiles(places: Places, wide: Float | None, names: Sequence[str] | None = None) -> Match | None:
    """The format whose values, times a scale for each tile, are all magnitudes of every tile looked at; or None.

    Each tile may have any scale, so its largest magnitude fits by choice; of the others only those count that are in no
    tile before, so that repeated values count once. A match is CERTAIN, or none: a model has thousands of tensors, and
    real blocks give hundreds of bits. Where only the first rows match, the match's fit counts the tiles that do and
    those that do not. `names` are the `suspects`, if known.
    """
    names = suspects([places], wide)[0] if names is None else names
    if not names:
        return None
    kinds = [tile for tile in TILES if places.has(tile)]
    begun = [(tile, matches) for tile in kinds if (matches := _matches(places.first, tile, names, wide))]
    for tile, matches in begun:  # only formats that the first tiles fit
        found = _matches(places, tile, [match.grid for match in matches], wide)
        if (best := _best(match for match in found if match.sure)) is not None:
            return best
    bests = ((tile, _best(match for match in matches if match.sure)) for tile, matches in begun)
    return next((_partly(best, places, tile, wide) for tile, best in bests if best is not None), None)


def _best(matches: Iterable[Match]) -> Match | None:
    """The match with the fewest values; with more exponents, where no value is so small that it distinguishes the
    two."""
    order = sorted(matches, key=lambda match: (match.size, -match.fit.bits))
    for other in order[1:]:
        if WIDER.get(order[0].format) == other.format and order[0].finer < CERTAIN:
            return replace(other, also=(order[0].format,))
    return order[0] if order else None


def _partly(match: Match, places: Places, tile: Tile, wide: Float | None) -> Match:
    """The same match, whose fit counts the tiles that match and those that do not."""
    tiles = [np.unique(np.abs(values)) for values in places.tiles(tile)]
    held = [one.scale for levels in tiles if (one := _held(levels, match.grid, wide, every=True)) is not None]
    even = match.grid == WHOLE and _even(held, wide)
    return replace(match, even=even, fit=replace(match.fit, held=len(held), beyond=len(tiles) - len(held)))


def _even(steps: list[float], wide: Float | None) -> bool:
    """Whether most tiles have the same step."""
    if len(steps) < 2:
        return False
    near = np.abs(np.array(steps) - np.median(steps)) <= 4 * _relative(wide) * np.array(steps)
    return 2 * int(near.sum()) > len(steps)


def suspects(places: Sequence[Places], wide: Float | None) -> list[list[str]]:
    """For each tensor, the formats of which its first few values could be, within one tile of any kind: nearly always
    none."""
    some = [as_float32(one.lines[:, : TILES[-1].columns], one.dtype) for one in places]
    starts = np.cumsum([0, *(part.size for part in some)])
    limits, room = (TILES[-1].columns, _FEW, _CORNERS), (_relative(wide), wide.min_subnormal if wide else 0.0)
    columns = np.array([part.shape[1] for part in some])
    found = looks.suspects(np.concatenate([part.ravel() for part in some]), starts, columns, _grids(), limits, room)
    return [[GRIDS[i] for i in row.nonzero()[0]] if row.any() else [] for row in found]


@cache
def _grids() -> tuple[Doubles, NDArray[np.int64], Doubles]:
    """All grids concatenated, where each begins, and the ratios of all pairs of values of each, ascending."""
    grids = [_grid(name) for name in GRIDS]
    ratios = np.unique(np.concatenate([(grid[:, None] / grid).ravel() for grid in grids]))
    return np.concatenate(grids), np.cumsum([0, *(grid.size for grid in grids)]), ratios[ratios <= 1]


def _relative(wide: Float | None) -> float:
    """The relative error allowed between a value and the one that it is compared with, as both were rounded when
    stored."""
    bits = wide.significant_bits if wide else 53
    return 2.0 ** ((1 if bits < _WIDEST else 3) - bits) * 1.01


def _matches(places: Places, tile: Tile, names: Sequence[str], wide: Float | None) -> list[Match]:
    count, seen, steps, scales = 0, np.zeros(0), 1.0, list[float]()
    finer = dict.fromkeys(names, 0.0)
    evidence = dict.fromkeys(names, -float(np.log2(len(TILES) * len(GRIDS))))
    for values in places.tiles(tile):
        levels, times = np.unique(np.abs(values), return_counts=True)
        if levels.size == 1:  # fits every grid
            seen = np.union1d(seen, levels)
            continue
        found = {name: held for name in evidence if (held := _held(levels, name, wide)) is not None}
        if not found:
            return []
        new = ~np.isin(levels[:-1], seen)
        evidence = {
            name: evidence[name] + max(float(held.bits[:-1][new].sum()) - held.chosen, 0.0)
            for name, held in found.items()
        }
        for name, held in found.items():
            finer[name] += _finer(name, levels, times, held.scale)
        if WHOLE in found:
            scales.append(found[WHOLE].scale)
            steps = max(steps, (max(values.max(), 0) - min(values.min(), 0)) / scales[-1])
        count, seen = count + levels.size, np.union1d(seen, levels)
    if not count:
        return []
    even = _even(scales, wide)
    return [
        Match(named, tile, Fit(count, 0, max(bits, 0.0)), name == WHOLE and even, (), finer[name])
        for name, bits in evidence.items()
        if (named := _format(name, steps))
    ]


def _finer(name: str, levels: Doubles, times: NDArray[np.int64], step: float) -> float:
    """The evidence that steps do not grow finer for smaller values: for integers against floats of as many bits, for a
    format's subnormals against the wider format."""
    if name not in (WHOLE, *WIDER):
        return 0.0
    octaves = np.frexp(levels / step * (1 + 2.0**-6))[1]  # with a margin, since a value may have been rounded down
    if name in WIDER:
        return float((np.maximum(formats.get(name, Float).min_exponent + 1 - octaves, 0) * times).sum())
    codes = np.round(levels / step).astype(np.int64)
    octaves = np.frexp(codes.astype(np.float64))[1]
    significant = octaves + 1 - np.frexp((codes & -codes).astype(np.float64))[1]
    return float(((significant.max() - octaves) * times).sum())


def _format(name: str, steps: float) -> str | None:
    """A format's name; for integers, intN with enough bits for these steps, None beyond 8."""
    if name != WHOLE:
        return name
    return f"int{int(np.ceil(np.log2(round(steps) + 1)))}" if 1 <= round(steps) <= _STEPS else None


@cache
def _grid(name: str) -> Doubles:
    if name == WHOLE:
        return np.arange(1.0, _STEPS + 1)
    values = np.abs(np.array([float(v) for v in formats.get(name).values()]))
    return np.unique(values[np.isfinite(values) & (values != 0)])


@dataclass(frozen=True)
class _Held:
    """Levels on a grid times a scale: the evidence of each in bits, and the cost in bits of choosing the scale."""

    bits: Doubles
    scale: float
    chosen: float


def _held(levels: Doubles, name: str, wide: Float | None, every: bool = False) -> _Held | None:
    """How levels lie on the grid times one scale; None if not all do.

    The largest level is one of the grid's largest values (`every`: any of them). Another level is on the grid if it is
    within the rounding errors in `wide` (its own and the largest one's) of a grid value times the scale. A random one
    would be with a probability of this width over the distance of two values.
    """
    tops = _tops(levels, name, wide, every)
    if not tops.size:
        return None
    bits = _bits(levels, name, tops, wide)
    # Choosing a finer step of integers costs more: coarse ones are simpler.
    chosen = np.log2(tops) + 2.6 if name == WHOLE else np.full(tops.size, np.log2(_TOPS))
    best = int((bits.sum(1) - chosen).argmax())
    return _Held(bits[best], float(levels[-1] / tops[best]), float(chosen[best]))


def _tops(levels: Doubles, name: str, wide: Float | None, every: bool = False) -> Doubles:
    """The positions of the largest level on the grid for which all levels are on it."""
    grid = _grid(name)
    if levels.size > grid.size:
        return grid[:0]
    tops = grid if every or name == WHOLE else grid[-_TOPS:]
    return tops[on_grid(levels, grid, tops, *_room(levels[-1], wide))]


def _bits(levels: Doubles, name: str, tops: Doubles, wide: Float | None) -> Doubles:
    """For each position of the largest level, the evidence of each level in that all are on the grid."""
    grid, (relative, step) = _grid(name), _room(levels[-1], wide)
    scaled = levels / levels[-1] * tops[:, None]
    place = np.minimum(np.maximum(np.searchsorted(grid, scaled), 1), grid.size - 1)
    low, high = grid[place - 1], grid[place]
    near = np.where(scaled - low < high - scaled, low, high)
    tolerance = relative * near + step * tops[:, None]
    return -np.log2(np.minimum(2 * tolerance / (high - low), 1.0))


def _room(largest: float, wide: Float | None) -> tuple[float, float]:
    """The allowed error of a value: relative to it, and absolute, in units of the largest value."""
    return _relative(wide), wide.min_subnormal / largest if wide else 0.0
