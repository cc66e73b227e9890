"""The loops of `cast_errors`: rounding and comparing at once, the rounded values in registers only.

The largest relative error is a division an element, and seldom grows: the loops multiply to see whether it does.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import types

from halfstep.kernels.cpu import elements
from halfstep.kernels.cpu.comparison import PIECE
from halfstep.kernels.cpu.compiled import Kernel, inner
from halfstep.kernels.cpu.element_codes import looked_up
from halfstep.kernels.cpu.elements import Rounding
from halfstep.kernels.cpu.lanes import INFINITY, MAGNITUDE, SIGN, Lane, bits_of, lanes
from halfstep.kernels.cpu.runs import fill


# ---- one element ---------------------------------------------------------------------------------------------------


@lanes(types.float32)
def _value(x: Lane) -> Lane:
    return bits_of(x).float()


@lanes(types.float32)
def _scaled_value(x, scale, numbers, cuts):
    """x / scale, rounded, times scale."""
    quotient = bits_of(x).float() / scale
    if cuts is not None:
        return looked_up(quotient, cuts) * scale
    return _nearest(quotient.bits(), *numbers).float() * scale


def _nearest(bits: Lane, least: Lane, above: Lane, largest: Lane) -> Lane:
    """Finite values rounded to nearest, ties to even, saturated.

    A float32 sum with 2^23 steps has no bit below a step. The step is a bit of the significand, or the format's least
    one: 2^23 of it have the bits `least`, and 2^23 of the other those of the power of two in x plus `above`.
    """
    magnitude = bits & MAGNITUDE
    magic = ((bits & INFINITY) + above).max(least).float()
    return ((magnitude.float() + magic) - magic).bits().min(largest) | (bits & SIGN)


@lanes(types.float32)
def _rounded(x, numbers):
    return elements.rounded(bits_of(x), Rounding(*numbers)).float()


@lanes(types.float32)
def _difference(y, x):
    return y - x


@lanes(types.float32)
def _finite_difference(y, x):
    """y - x, or 0 where y is infinite."""
    return (y.bits() & MAGNITUDE).equals(INFINITY).pick(y.constant(0.0), y - x)


@lanes(types.float32)
def _plus_square(total, value, factor):
    return total.plus_square(value if factor is None else value * factor)


@lanes(types.uint32)
def _plus_nonzero(count, y):
    return count + (~y.equals(0.0)).to(32)


@lanes(types.uint32)
def _plus_infinite(count, y):
    return count + (y.bits() & MAGNITUDE).equals(INFINITY).to(32)


@lanes(types.uint32)
def _or_worse(seen, error, y, x, worst):
    """Bits, the first of them set once |error| was above `worst` times |x| where y is not zero."""
    minus = y.equals(0.0).pick(error.bits().constant(SIGN), error.bits() | SIGN).float()
    return seen | (x.bits() & MAGNITUDE).float().times_plus(worst, minus).bits()  # rounded once: the sign is right


# ---- a piece -------------------------------------------------------------------------------------------------------


@inner
def _scaled(x, scale, numbers, cuts, factor, worst):
    noise, nonzero, worse = np.float32(0), np.uint32(0), np.uint32(0)
    for i in range(x.size):
        value, y = _value(x[i]), _scaled_value(x[i], scale[i], numbers, cuts)
        error = _difference(y, value)
        noise = _plus_square(noise, error, factor)
        nonzero = _plus_nonzero(nonzero, y)
        worse = _or_worse(worse, error, y, value, worst)
    return noise, nonzero, worse


@inner
def _plain(x, numbers, factor, worst):
    noise, nonzero, infinite, worse = np.float32(0), np.uint32(0), np.uint32(0), np.uint32(0)
    for i in range(x.size):
        value, y = _value(x[i]), _rounded(x[i], numbers)
        error = _finite_difference(y, value)
        noise = _plus_square(noise, error, factor)
        nonzero = _plus_nonzero(nonzero, y)
        infinite = _plus_infinite(infinite, y)
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
    """|y - x| / |x| where y is neither zero nor infinite; 0 where it is."""
    return np.float32(0) if y == 0 or np.isinf(y) else abs(y - x) / abs(x)


@inner
def _largest_scaled(x, scale, numbers, cuts):
    found = np.float32(0)
    for i in range(x.size):
        found = max(found, _share(_scaled_value(x[i], scale[i], numbers, cuts), _value(x[i])))
    return found


@inner
def _largest_plain(x, numbers):
    found = np.float32(0)
    for i in range(x.size):
        found = max(found, _share(_rounded(x[i], numbers), _value(x[i])))
    return found


@inner
def _spread(scale, levels, out):
    for i in range(scale.size):
        fill(out, i << len(levels), scale[i], levels)


@inner
def _above(share):
    """A little more: the share itself was rounded."""
    return np.float32(share) * np.float32(1 + 2.0**-22)


@Kernel
def sum_scaled_errors(x, scale, levels, numbers, cuts, factor, found):
    parts, pieces = len(found), (x.size + PIECE - 1) // PIECE
    for part in numba.prange(parts):
        by, mine = np.empty(PIECE, np.float32), found[part]
        for p in range(pieces * part // parts, pieces * (part + 1) // parts):
            a, b = p * PIECE, min(x.size, (p + 1) * PIECE)
            _spread(scale[a >> len(levels) : b >> len(levels)], levels, by)
            noise, nonzero, worse = _scaled(x[a:b], by, numbers, cuts, factor, _above(mine[3]))
            mine[0] += noise
            mine[1] += nonzero
            if worse >> np.uint32(31):
                mine[3] = max(mine[3], _largest_scaled(x[a:b], by, numbers, cuts))


@Kernel
def sum_plain_errors(x, numbers, factor, found):
    parts, pieces = len(found), (x.size + PIECE - 1) // PIECE
    for part in numba.prange(parts):
        mine = found[part]
        for p in range(pieces * part // parts, pieces * (part + 1) // parts):
            piece = x[p * PIECE : min(x.size, (p + 1) * PIECE)]
            noise, nonzero, infinite, worse = _plain(piece, numbers, factor, _above(mine[3]))
            mine[0] += noise
            mine[1] += nonzero
            mine[2] += infinite
            if worse >> np.uint32(31):
                mine[3] = max(mine[3], _largest_plain(piece, numbers))


@Kernel
def sum_squares(x, factor, found):
    parts, pieces = len(found), (x.size + PIECE - 1) // PIECE
    for part in numba.prange(parts):
        for p in range(pieces * part // parts, pieces * (part + 1) // parts):
            found[part] += _squares(x[p * PIECE : min(x.size, (p + 1) * PIECE)], factor)
