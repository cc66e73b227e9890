"""The errors of a cast, given input and output: sums of squares, and counts of new zeros and infinities."""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from halfstep.kernels.cpu.compiled import Kernel, inner


PIECE = 4096  # values summed in float32, vectorised, before the sum is added in float64
_OPTIONS: Any = {
    "fastmath": {"reassoc", "nsz", "contract"},  # sums may be reordered; infinities and NaN are respected
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}


class Errors(NamedTuple):
    """Sums over the finite values x and their cast values y; squares are of x / unit and (y - x) / unit."""

    signal: float = 0.0
    noise: float = 0.0
    zeroed: int = 0
    """How many nonzero x have y = 0."""
    infinite: int = 0
    """How many y are infinite or NaN: excluded from `noise`."""
    largest: float = 0.0
    """The largest |y - x| / |x| where y is neither zero nor infinite."""

    def __add__(self, other: Errors) -> Errors:  # type: ignore[override]
        """The errors of both parts of a tensor together."""
        signal, noise, zeroed, infinite = (a + b for a, b in zip(self[:4], other[:4], strict=True))
        return Errors(signal, noise, int(zeroed), int(infinite), max(self.largest, other.largest))


def unit(amax: float) -> float:
    """The divisor of a tensor before squaring: 1, or its amax where squares would leave float32's range."""
    return 1.0 if 2.0**-30 < amax < 2.0**30 else max(amax, 2.0**-120)


def parts_of(size: int) -> int:
    """The number of parts in which that many values are summed."""
    return max(1, min(size >> 16, 16))


def compare(x: NDArray[np.float32], y: NDArray[np.float32], amax: float) -> Errors:
    """The errors of y as a cast of x, flat arrays of equal size, in units of `unit(amax)`; amax is close to max |x|."""
    found = np.zeros((parts_of(x.size), 5), np.float64)
    _compare(x.size, x, y, np.float32(1 / unit(amax)), found)
    signal, noise, zeroed, infinite, _ = found.sum(0)
    return Errors(float(signal), float(noise), int(zeroed), int(infinite), float(found[:, 4].max()))


@numba.njit(**_OPTIONS)
def _sums(x, y, factor, largest):
    zero, one, end = np.float32(0), np.float32(1), np.float32(np.inf)
    signal = noise = zeroed = infinite = zero
    for i in range(x.size):
        given = abs(x[i]) < end
        held = given & (abs(y[i]) < end)
        value = x[i] if given else zero
        error = y[i] - value if held else zero
        lost = (y[i] == zero) & (value != zero)
        scaled, wrong = value * factor, error * factor
        signal += scaled * scaled
        noise += wrong * wrong
        zeroed += one if lost else zero
        infinite += one if given & (not held) else zero
        size = one if lost | (value == zero) else abs(value)
        share = zero if lost else abs(error) / size
        largest[i] = max(largest[i], share)
    return signal, noise, zeroed, infinite


@inner
def _part(x, y, factor, found):
    largest = np.zeros(PIECE, np.float32)
    for a in range(0, x.size, PIECE):
        signal, noise, zeroed, infinite = _sums(x[a : a + PIECE], y[a : a + PIECE], factor, largest)
        found[0] += signal
        found[1] += noise
        found[2] += zeroed
        found[3] += infinite
    found[4] = largest.max()


@Kernel
def _compare(x, y, factor, found):
    parts = len(found)
    for part in numba.prange(parts):
        a, b = x.size * part // parts, x.size * (part + 1) // parts
        _part(x[a:b], y[a:b], factor, found[part])
