"""The errors that a cast would make in a tensor, summed over rows without writing the rounded values.

For finite values with magnitudes below ROOM; `comparison.compare` takes any values, and two arrays. The largest
relative error would cost a division per element but seldom grows, so the loops only multiply to see whether it does.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import prange, types
from numpy.typing import NDArray

from halfstep.formats import Codebook, Format, Integer
from halfstep.kernels.cpu import element_codes, elements, rules, scales
from halfstep.kernels.cpu.comparison import PIECE, Errors, parts_of, unit
from halfstep.kernels.cpu.compiled import CHUNK, Kernel, each, ends, inner, none, specialized
from halfstep.kernels.cpu.lanes import INFINITY, MAGNITUDE, SIGN, Lane, as_floats, bits_of, lanes
from halfstep.kernels.cpu.runs import elementwise, fill
from halfstep.quant.quantizer import Quantizer
from halfstep.quant.scaling import Scaling
from halfstep.quant.scaling.two_level import TwoLevel
from halfstep.quant.tile import Tile


ROOM = 2.0**120
"""Magnitudes must be below it: then no value times its scale overflows."""

_BLOCK = 16  # values per amax of the first pass
_LEVELS = {16: 4, 32: 5, 64: 6}  # numbers of elements that share a scale, and their logarithms; longer ones are split
_HUGE = np.finfo(np.float32).max


def supports(quantizer: Quantizer, columns: int) -> bool:
    """Whether `CastErrors` supports this quantizer for rows of that many columns."""
    if quantizer.rounding != "nearest_even" or quantizer.outliers is not None:
        return False
    if quantizer.scales is None:
        return quantizer.overflow == "ieee" and elements.scalars(quantizer.format, "nearest_even", "ieee") is not None
    tile, rule, format = quantizer.scales.tile, quantizer.scales.rule, quantizer.format
    width = tile.columns or columns
    blocks = tile.rows == 1 and width in _LEVELS
    ruled = rule.quotient or (blocks and (rule.two_level or scales.power_scalars(format, rule) is not None))
    if not ruled or columns % width or width % _BLOCK:
        return False
    if isinstance(format, Codebook):
        return format.ties == "lower"
    return element_codes.in_bytes(format, "nearest_even") is not None and format.max == -format.min


class Rows:
    """Some rows of a matrix, whole tiles high: a flat array of float32, bfloat16 or float16, as `arrays.array` gives
    it."""

    def __init__(self, x: NDArray[Any], columns: int) -> None:
        self.x, self.columns = x.view(), columns
        self.x.flags.writeable = False  # so that memory-mapped and other arrays share one compiled kernel
        self._maxima: dict[int, NDArray[np.uint32]] = {}

    def maxima(self, run: int) -> NDArray[np.uint32]:
        """The bits of the amax of every `run` elements."""
        if run not in self._maxima:
            if run == _BLOCK:
                found = np.empty(self.x.size // _BLOCK, np.uint32)
                _maxima(self.x.size, self.x, found)
            elif run % (2 * _BLOCK) == 0 and run <= 64 * _BLOCK:  # numpy is slow along a short last dimension
                half = self.maxima(run // 2)
                found = np.maximum(half[::2], half[1::2])
            else:
                found = self.maxima(_BLOCK).reshape(-1, run // _BLOCK).max(1)
            self._maxima[run] = found
        return self._maxima[run]

    def squares(self, amax: float) -> float:
        """The sum of (x / unit(amax))^2."""
        found = np.zeros(parts_of(self.x.size), np.float64)
        sum_squares(self.x.size, self.x, _factor(amax), found)
        return float(found.sum())


class CastErrors:
    """The errors of a quantizer that `supports` accepts, summed over a tensor's rows.

    Args:
        amax: the tensor's amax, below ROOM.
    """

    def __init__(self, quantizer: Quantizer, amax: float) -> None:
        self._quantizer, self._amax, self._factor = quantizer, np.float32(amax), _factor(amax)
        self._cuts = element_codes.cut_points(quantizer.format, True)
        self._numbers: Any = None
        if quantizer.scales is None:
            self._numbers = elements.scalars(quantizer.format, "nearest_even", quantizer.overflow)
        elif self._cuts is None:
            self._numbers = _saturating(quantizer.format)
        self._noise, self._nonzero, self._infinite, self._largest = 0.0, 0, 0, 0.0

    def add(self, rows: Rows) -> None:
        """Add the errors of more rows."""
        found = np.zeros((parts_of(rows.x.size), 4), np.float64)
        found[:, 3] = self._largest
        chosen = self._quantizer.scales
        by: Any = None, None
        if chosen is not None:
            run, scale = self._scales(rows, chosen.tile, chosen.rule)
            by = scale, (np.uint32(0),) * _LEVELS[run]
        sum_errors(rows.x.size, rows.x, *by, self._numbers, self._cuts, self._factor, found)
        noise, nonzero, infinite, _ = found.sum(0)
        self._noise += float(noise)
        self._nonzero += int(nonzero)
        self._infinite += int(infinite)
        self._largest = float(found[:, 3].max())

    def errors(self, signal: float, nonzero: int) -> Errors:
        """The errors of all rows, given the sum of their `Rows.squares` and their number of nonzero values."""
        return Errors(signal, self._noise, nonzero - self._nonzero, self._infinite, self._largest)

    def _scales(self, rows: Rows, tile: Tile, rule: Scaling) -> tuple[int, NDArray[np.float32]]:
        """The number of neighbouring elements that share a scale, and the scales."""
        run = tile.columns or rows.columns
        if tile.rows or tile.columns:
            amax = rows.maxima(run)
            if tile.rows != 1:
                amax = _in_bands(amax.reshape(-1, rows.columns // run), tile.rows or len(amax))
        else:
            run, amax = rows.x.size, np.full(1, self._amax).view(np.uint32)
        format, scale = self._quantizer.format, np.empty(amax.size, np.float32)
        ruled: Any = None, np.float32(format.max), None
        stored: Any = scale
        if isinstance(rule, TwoLevel):
            largest = torch.tensor(float(self._amax), dtype=torch.float32, device="cpu")
            ruled = rules.given(format, rule, rule.tensor_scale(largest, format))[:3]
        elif not rule.quotient:
            ruled, stored = (scales.power_scalars(format, rule), None, None), np.empty(amax.size, np.uint8)
        _note_scales(amax.size, amax, *ruled, stored, scale)
        if run in _LEVELS:
            return run, scale
        part = max(length for length in _LEVELS if run % length == 0)
        return part, np.repeat(scale, run // part)


def _factor(amax: float) -> np.float32 | None:
    """The factor on values before squaring; None if it is 1."""
    return None if unit(amax) == 1 else np.float32(1 / unit(amax))


def _in_bands(amax: NDArray[np.uint32], high: int) -> NDArray[np.uint32]:
    """The amax of every `high` rows of each column, repeated for each of these rows."""
    whole = len(amax) // high * high
    bands = amax[:whole].reshape(-1, high, amax.shape[1]).max(1).repeat(high, 0)
    rest = amax[whole:].max(0, initial=0) if whole < len(amax) else amax[:0]
    return np.concatenate([bands, np.broadcast_to(rest, amax[whole:].shape)]).ravel()


@cache
def _saturating(format: Format) -> tuple[np.uint32, ...]:
    """The constants of `_nearest`, as bits."""
    p = elements.Rounding(*elements.scalars(format, "nearest_even", "saturate"))
    return p.magic, np.uint32(0 if isinstance(format, Integer) else int(p.shift) << 23), p.largest


# ---- scales --------------------------------------------------------------------------------------------------------


@Kernel
def _maxima(x, found):
    for chunk in prange((x.size + CHUNK - 1) // CHUNK):
        a, b = ends(chunk, x.size)
        scales.as_bits(found[a >> 4 : b >> 4], scales.largest_stored(x[a:b], 4))


@elementwise
def _to_divide(out, amax):
    """The divisor `out`, replaced by the largest float32 where a tile or its scale is zero, so that quotients are
    zero."""
    return (amax.equals(0) | out.equals(0.0)).pick(out.constant(_HUGE), out)


@Kernel
def _note_scales(amax, rule, whole, up, stored, scale):
    for chunk in prange((amax.size + CHUNK - 1) // CHUNK):
        a, b = ends(chunk, amax.size)
        kept = stored[a:b]
        divisor, beside = rules.room(b - a, whole, kept)
        rules.note(amax[a:b], rule, whole, up, None, None, kept, divisor, beside)
        scale[a:b] = as_floats(divisor)
        _to_divide(scale[a:b], amax[a:b])


# ---- loops: the rounded values in registers only ---------------------------------------------------------------------


# ---- one element ---------------------------------------------------------------------------------------------------


@lanes(types.float32)
def _value(x: Lane) -> Lane:
    return bits_of(x).float()


@lanes(types.float32)
def _made(x, scale, numbers, cuts):
    """x rounded; with a scale, x / scale rounded, times scale."""
    if scale is None:
        return elements.rounded(bits_of(x), elements.Rounding(*numbers)).float()
    quotient = bits_of(x).float() / scale
    if cuts is not None:
        return element_codes.looked_up(quotient, cuts) * scale
    return _nearest(quotient.bits(), *numbers).float() * scale


def _nearest(bits: Lane, least: Lane, above: Lane, largest: Lane) -> Lane:
    """The bits of finite values rounded to nearest even, saturated.

    Adding and subtracting 2^23 steps in float32 rounds to a multiple of the step. The step is a bit of the significand,
    or the format's smallest: `least` is the bits of 2^23 times that; for the former, 2^23 steps have the exponent field
    of x plus `above`.
    """
    magnitude = bits & MAGNITUDE
    magic = ((bits & INFINITY) + above).max(least).float()
    return ((magnitude.float() + magic) - magic).bits().min(largest) | (bits & SIGN)


@lanes(types.float32)
def _difference(y, x, scale):
    """y - x, or 0 where y is infinite; with a scale y never is."""
    if scale is not None:
        return y - x
    return (y.bits() & MAGNITUDE).equals(INFINITY).pick(y.constant(0.0), y - x)


@lanes(types.float32)
def _plus_square(total, value, factor):
    return total.plus_square(value if factor is None else value * factor)


@lanes(types.uint32)
def _plus_nonzero(count, y):
    return count + (~y.equals(0.0)).to(32)


@lanes(types.uint32)
def _plus_infinite(count, y, scale):
    return count + (y.bits() & MAGNITUDE).equals(INFINITY).to(32) if scale is None else count


@lanes(types.uint32)
def _or_worse(seen, error, y, x, worst):
    """`seen` with its sign bit set if |error| is above `worst` times |x| where y is not zero."""
    minus = y.equals(0.0).pick(error.bits().constant(SIGN), error.bits() | SIGN).float()
    return seen | (x.bits() & MAGNITUDE).float().times_plus(worst, minus).bits()  # rounded once: the sign is right


# ---- a piece -------------------------------------------------------------------------------------------------------


@inner
def _sums(x, scale, numbers, cuts, factor, worst):
    noise, nonzero, infinite, worse = np.float32(0), np.uint32(0), np.uint32(0), np.uint32(0)
    for i in range(x.size):
        s = each(scale, i)
        value, y = _value(x[i]), _made(x[i], s, numbers, cuts)
        error = _difference(y, value, s)
        noise = _plus_square(noise, error, factor)
        nonzero = _plus_nonzero(nonzero, y)
        infinite = _plus_infinite(infinite, y, s)
        worse = _or_worse(worse, error, y, value, worst)
    return noise, nonzero, infinite, worse


@inner
def _squares(x, factor):
    total = np.float32(0)
    for i in range(x.size):
        total = _plus_square(total, _value(x[i]), factor)
    return total


@inner
def _share(y, x):
    """|y - x| / |x|; 0 where y is zero or infinite."""
    return np.float32(0) if y == 0 or np.isinf(y) else abs(y - x) / abs(x)


@inner
def _largest(x, scale, numbers, cuts):
    found = np.float32(0)
    for i in range(x.size):
        found = max(found, _share(_made(x[i], each(scale, i), numbers, cuts), _value(x[i])))
    return found


@specialized
def _spread(scale, levels, a, b, by):
    """In kernels: the scale of each element from a to b, written to `by`; None without scales."""

    def spread(scale, levels, a, b, by):
        for i in range((b - a) >> len(levels)):
            fill(by, i << len(levels), scale[(a >> len(levels)) + i], levels)
        return by

    return (lambda scale, levels, a, b, by: None) if none(scale) else spread


@inner
def _above(share):
    """A slightly larger share, since the share itself was rounded."""
    return np.float32(share) * np.float32(1 + 2.0**-22)


@Kernel
def sum_errors(x, scale, levels, numbers, cuts, factor, found):
    parts, pieces = len(found), (x.size + PIECE - 1) // PIECE
    for part in prange(parts):
        room_for, mine = np.empty(PIECE, np.float32), found[part]
        for p in range(pieces * part // parts, pieces * (part + 1) // parts):
            a, b = p * PIECE, min(x.size, (p + 1) * PIECE)
            by = _spread(scale, levels, a, b, room_for)
            noise, nonzero, infinite, worse = _sums(x[a:b], by, numbers, cuts, factor, _above(mine[3]))
            mine[0] += noise
            mine[1] += nonzero
            mine[2] += infinite
            if worse >> np.uint32(31):
                mine[3] = max(mine[3], _largest(x[a:b], by, numbers, cuts))


@Kernel
def sum_squares(x, factor, found):
    parts, pieces = len(found), (x.size + PIECE - 1) // PIECE
    for part in prange(parts):
        for p in range(pieces * part // parts, pieces * (part + 1) // parts):
            found[part] += _squares(x[p * PIECE : min(x.size, (p + 1) * PIECE)], factor)
