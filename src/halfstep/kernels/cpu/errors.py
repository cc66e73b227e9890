"""What a cast did to a tensor: squares of values and errors, and what became zero or infinite, in one pass."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from halfstep.kernels.cpu.compiled import Kernel, inner


_PIECE = 1024  # sums are kept for each place in a piece, so that loops run in lanes without reordering a sum
_RUN = 64  # pieces summed in float32 before the sums go to float64


class Errors(NamedTuple):
    """Sums over the finite values x and what a cast made of them, y; squares are of x / amax and (y - x) / amax."""

    signal: float
    noise: float
    zeroed: int
    """x is not zero, and y is."""
    infinite: int
    """y is infinite or NaN: left out of `noise`."""
    largest: float
    """The largest |y - x| / |x| where y is neither zero nor infinite."""


def compare(x: NDArray[np.float32], y: NDArray[np.float32], amax: float) -> Errors:
    """Compare two flat arrays of equal size; `amax` is the largest |x|, or any number near it."""
    parts = max(1, min(x.size >> 16, 16))
    found = np.zeros((parts, 5), np.float64)
    _compare(x.size, x, y, np.float32(1 / amax if amax > 2.0**-120 else 1.0), found)
    signal, noise, zeroed, infinite, _ = found.sum(0)
    return Errors(float(signal), float(noise), int(zeroed), int(infinite), float(found[:, 4].max()))


@inner
def _sums(x, y, factor, signal, noise, zeroed, infinite, largest):
    zero, one, end = np.float32(0), np.float32(1), np.float32(np.inf)
    for i in range(x.size):
        finite = (abs(x[i]) < end) & (abs(y[i]) < end)
        value = x[i] if abs(x[i]) < end else zero
        error = y[i] - value if finite else zero
        lost = (y[i] == zero) & (value != zero)
        signal[i] += (value * factor) * (value * factor)
        noise[i] += (error * factor) * (error * factor)
        zeroed[i] += one if lost else zero
        infinite[i] += zero if finite | (abs(x[i]) >= end) else one
        share = zero if lost | (value == zero) else abs(error) / abs(value)
        largest[i] = max(largest[i], share)


@inner
def _part(x, y, factor, found):
    sums = np.zeros((5, _PIECE), np.float32)
    count = 0
    for a in range(0, x.size, _PIECE):
        b = min(a + _PIECE, x.size)
        _sums(x[a:b], y[a:b], factor, sums[0], sums[1], sums[2], sums[3], sums[4])
        count += 1
        if count == _RUN or b == x.size:
            for k in range(4):
                total = 0.0
                for i in range(_PIECE):
                    total += sums[k, i]
                found[k] += total
            found[4] = max(found[4], sums[4].max())
            sums[:4] = 0
            count = 0


@Kernel
def _compare(x, y, factor, found):
    parts = len(found)
    for part in numba.prange(parts):
        a, b = x.size * part // parts, x.size * (part + 1) // parts
        _part(x[a:b], y[a:b], factor, found[part])
