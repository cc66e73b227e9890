"""How surprising it is that values fit a format, counted in bits; whether those that share a scale lie on a grid."""

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
"""Bits of evidence below which nothing is concluded: a chance of 1 in 1000."""

CERTAIN = 40.0
"""Bits from which on a conclusion counts as certain: a chance of 1 in 10^12."""

MIXED = 0.01
"""The least share of values which is that of a mixture."""

SHORT = 4
"""Of random mantissas one in 2^SHORT leaves so many of the last bits unused."""

CHOSEN = 2
"""Magnitudes whose fit is no evidence: a format and a scale are chosen after the values were seen, so that they fit."""


_ANY = (1 << 20, -(1 << 20), WIDTH - 1, False)  # as a format: 53 bits, without ends


@dataclass(frozen=True)
class Fit:
    """How many of the values that could tell lie on a narrower format's grid, and the bits of evidence in that.

    Values that could tell are `Table.telling`, of exponents at which the narrower format has fewer bits. Where the
    wider one has a bits and the narrower g, random mantissas fit with a chance of (2^(g-1) - 1) / (2^(a-1) - 1).
    """

    held: int = 0
    beyond: int = 0
    bits: float = 0.0
    """log2 of one over the chance that all of `held` do; equal values count once, those of CHOSEN magnitudes
    not at all."""
    expected: float = 0.0
    """The share that random mantissas would have."""
    short: int = 0
    """Values beyond that leave SHORT or more of the last bits unused: of random mantissas one in 2^SHORT does."""
    filled: int = 0
    """Those of `held` that use the narrower format's last bit: of random mantissas a half."""

    @property
    def share(self) -> float:
        """The share of the values that could tell which lie on the grid."""
        return self.held / (self.held + self.beyond) if self.held + self.beyond else 0.0

    @property
    def mixed(self) -> bool:
        """Whether clearly more values fit than by chance, and the others have random mantissas: values of the narrower
        type, of which some were written since. Averages and sums of such values have short mantissas of any length.
        """
        written = self.beyond / 2**SHORT
        random = self.short <= 2 * written + 3 * np.sqrt(written) + 1
        evident = self.bits >= CERTAIN and self.share >= max(MIXED, 3 * self.expected)
        return evident and bool(random) and 4 * self.filled >= self.held

    @property
    def accepted(self) -> bool:
        """Whether all of them do, and chance does not explain it."""
        return self.beyond == 0 and self.bits >= ENOUGH


def fit(scan: Scan, narrow: Float, wide: Float | None, used: int = WIDTH) -> Fit:
    """How the values of a tensor, which `wide` holds (None: 53 bits), fit `narrow`.

    Random mantissas are those of `wide`, or of as many bits as are `used`.
    """
    few, most = _ends(narrow, wide, scan.table.lowest, len(scan.table.counts), used)
    # Where the narrower one has no fewer bits for any of the exponents, no value could tell.
    return Fit() if few is most else _fit(scan, few, most)


def first_looks(tables: Sequence[Table], wide: Float | None, formats: Sequence[Float]) -> list[First]:
    """What a first look at tables of values that `wide` holds (None: 53 bits) says of these formats: in one call."""
    few = max((one.significant_bits for one in formats), default=0)
    return first_look(tables, [scaled(wide) if wide else _ANY, *map(scaled, formats)], (few, SHORT, MIXED, CERTAIN))


def fit_bits(scan: Scan, wide: Sequence[Float | None], step: int | None = None) -> float:
    """The evidence that values of random mantissas, which all of `wide` hold, would use more significant bits than
    these do, or not all be multiples of 2^step; the number of bits, or the step, was chosen to fit.
    """
    table, most = (
        scan.table,
        np.min([_ends(None, one, scan.table.lowest, len(scan.table.counts), WIDTH)[1] for one in wide], axis=0),
    )
    few = np.full(most.size, table.significant_bits) if step is None else np.maximum(table.rows - step + 1, 0)
    found = _fit(scan, np.minimum(few, most), most).bits - np.log2(WIDTH if step is None else table.rows.size)
    return max(0.0, float(found))


def halved(scan: Scan, look: First) -> tuple[int, float]:
    """The bits that half of the values fit, the others not, and the evidence that random mantissas of as many bits as
    are in use would not.
    """
    count, left = scan.table.told, look.left
    # At most (4p)^(n/2): the chance that half of n values do what each does with a chance of p = 2^-left.
    evidence = count / 2 * (left - 2) * _weight(scan, count) if left >= SHORT else 0.0
    return look.most - left, evidence


@lru_cache(1 << 10)
def _ends(
    narrow: Float | None, wide: Float | None, lowest: int, count: int, used: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The significant bits of each exponent's values in a format and in a wider one (None: 53), of which so many are
    used; read-only, for they are kept.
    """
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
"""Whole numbers times one step: how many bits their codes have, follows from the steps between the ends."""

GRIDS = (
    WHOLE, "float8_e4m3fn", "float8_e5m2", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn", "nf4", "bnb_fp4",
)  # fmt: skip
"""What is looked for."""

WIDER = {"float6_e2m3fn": "float8_e4m3fn", "float6_e3m2fn": "float8_e5m2"}
"""Formats of as many significant bits and more exponents."""

_STEPS = 255  # between the ends of a grid of whole numbers: codes of 8 bits
_FEW = 10  # values of a tile that say no to nearly all that do not fit; of the first one all are looked at
_CORNERS = 3  # rows of which they are looked at
_TOPS = 16  # a tile's largest magnitude is one of so many of the grid's largest; of whole numbers it may be any
_WIDEST = 24  # significant bits from which on there is room for several roundings: scales multiplied one by one


@dataclass(frozen=True)
class Match:
    """A format; all magnitudes are its values times a scale for each `tile` (None: one for the whole tensor)."""

    format: str
    tile: Tile | None
    fit: Fit
    even: bool = False
    """Whether these are whole numbers of one step in all, or in most tiles: quantised, or counted."""

    also: tuple[str, ...] = ()
    """A format of the same steps and fewer exponents, which holds the values as well."""
    finer: float = 0.0
    """The bits that steps as fine as the wider format's have there, and no value uses."""

    @property
    def grid(self) -> str:
        """The one of `GRIDS` that this is found on."""
        return WHOLE if self.format.startswith(WHOLE) else self.format

    @property
    def size(self) -> int:
        """The magnitudes of the format: of several that hold the values, the smallest says most."""
        return 2 ** (int(self.format[3:]) - 1) - 1 if self.grid == WHOLE else _grid(self.format).size

    @property
    def sure(self) -> bool:
        """Whether no chance explains it, nor floating point its steps."""
        return self.fit.bits >= CERTAIN and (self.grid != WHOLE or self.finer >= CERTAIN)


def fit_levels(levels: Levels, wide: Float | None) -> Match | None:
    """The format whose values, times one scale, are all of a tensor's distinct magnitudes; or None.

    Of several, it is the one of the fewest values; the largest levels fit by choice.
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

    Each tile may have any scale, so its largest magnitude fits by choice; of the others only those are evidence that
    are in no tile before, so that values which come again count once. A match is CERTAIN, or none: a model has
    thousands of tensors, and real blocks give hundreds of bits. Where only the first rows are such, the tiles beyond
    are counted in the match's fit. `names` are the `suspects`, where they are known.
    """
    names = suspects([places], wide)[0] if names is None else names
    if not names:
        return None
    kinds = [tile for tile in TILES if places.has(tile)]
    begun = [(tile, matches) for tile in kinds if (matches := _matches(places.first, tile, names, wide))]
    for tile, matches in begun:  # what the first tile does not fit, all do not
        found = _matches(places, tile, [match.grid for match in matches], wide)
        if (best := _best(match for match in found if match.sure)) is not None:
            return best
    bests = ((tile, _best(match for match in matches if match.sure)) for tile, matches in begun)
    return next((_partly(best, places, tile, wide) for tile, best in bests if best is not None), None)


def _best(matches: Iterable[Match]) -> Match | None:
    """The match of the fewest values; of more exponents where no value is so small that it tells the two apart."""
    order = sorted(matches, key=lambda match: (match.size, -match.fit.bits))
    for other in order[1:]:
        if WIDER.get(order[0].format) == other.format and order[0].finer < CERTAIN:
            return replace(other, also=(order[0].format,))
    return order[0] if order else None


def _partly(match: Match, places: Places, tile: Tile, wide: Float | None) -> Match:
    """The same match, its fit the tiles that do and those that do not."""
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
    """For each the formats that its first few values could be of, which are in one tile of any kind: nearly always
    none.
    """
    some = [as_float32(one.lines[:, : TILES[-1].columns], one.dtype) for one in places]
    starts = np.cumsum([0, *(part.size for part in some)])
    limits, room = (TILES[-1].columns, _FEW, _CORNERS), (_relative(wide), wide.min_subnormal if wide else 0.0)
    columns = np.array([part.shape[1] for part in some])
    found = looks.suspects(np.concatenate([part.ravel() for part in some]), starts, columns, _grids(), limits, room)
    return [[GRIDS[i] for i in row.nonzero()[0]] if row.any() else [] for row in found]


@cache
def _grids() -> tuple[Doubles, NDArray[np.int64], Doubles]:
    """All grids one after the other, where each begins, and the ratios of all pairs of values of each, ascending."""
    grids = [_grid(name) for name in GRIDS]
    ratios = np.unique(np.concatenate([(grid[:, None] / grid).ravel() for grid in grids]))
    return np.concatenate(grids), np.cumsum([0, *(grid.size for grid in grids)]), ratios[ratios <= 1]


def _relative(wide: Float | None) -> float:
    """How far a value and the one that it is compared with may be off, as they were stored."""
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
    """The evidence that steps grow no finer where values are smaller: of whole numbers rather than as many bits of
    floating point, of a format below its normal values rather than the wider one.
    """
    if name not in (WHOLE, *WIDER):
        return 0.0
    octaves = np.frexp(levels / step * (1 + 2.0**-6))[1]  # a value may have been rounded down
    if name in WIDER:
        return float((np.maximum(formats.get(name, Float).min_exponent + 1 - octaves, 0) * times).sum())
    codes = np.round(levels / step).astype(np.int64)
    octaves = np.frexp(codes.astype(np.float64))[1]
    significant = octaves + 1 - np.frexp((codes & -codes).astype(np.float64))[1]
    return float(((significant.max() - octaves) * times).sum())


def _format(name: str, steps: float) -> str | None:
    """A format's name; of whole numbers by the bits of as many codes as lie between their ends, None beyond 8."""
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
    """Levels on a grid times a scale: of each the bits of evidence, and what the choice of the scale costs."""

    bits: Doubles
    scale: float
    chosen: float


def _held(levels: Doubles, name: str, wide: Float | None, every: bool = False) -> _Held | None:
    """How levels lie on the grid times one scale; None if they do not all.

    The largest level is one of the grid's largest values (`every`: any of them). Another is found if it lies within the
    roundings to `wide` (its own and the largest one's) of a value of the grid times the scale. A random one would by
    the chance that this width has in the room between two values.
    """
    tops = _tops(levels, name, wide, every)
    if not tops.size:
        return None
    bits = _bits(levels, name, tops, wide)
    # A random step of whole numbers is one of the smaller ones as likely: coarse ones are simpler.
    chosen = np.log2(tops) + 2.6 if name == WHOLE else np.full(tops.size, np.log2(_TOPS))
    best = int((bits.sum(1) - chosen).argmax())
    return _Held(bits[best], float(levels[-1] / tops[best]), float(chosen[best]))


def _tops(levels: Doubles, name: str, wide: Float | None, every: bool = False) -> Doubles:
    """The places of the largest level on the grid with which all levels are on it."""
    grid = _grid(name)
    if levels.size > grid.size:
        return grid[:0]
    tops = grid if every or name == WHOLE else grid[-_TOPS:]
    return tops[on_grid(levels, grid, tops, *_room(levels[-1], wide))]


def _bits(levels: Doubles, name: str, tops: Doubles, wide: Float | None) -> Doubles:
    """For each place of the largest level the evidence of each in that all are on the grid."""
    grid, (relative, step) = _grid(name), _room(levels[-1], wide)
    scaled = levels / levels[-1] * tops[:, None]
    place = np.minimum(np.maximum(np.searchsorted(grid, scaled), 1), grid.size - 1)
    low, high = grid[place - 1], grid[place]
    near = np.where(scaled - low < high - scaled, low, high)
    tolerance = relative * near + step * tops[:, None]
    return -np.log2(np.minimum(2 * tolerance / (high - low), 1.0))


def _room(largest: float, wide: Float | None) -> tuple[float, float]:
    """How far a value may be off, relative to it, and in values of which the largest one is `largest`."""
    return _relative(wide), wide.min_subnormal / largest if wide else 0.0
