"""The largest batch whose step fits a device's memory."""

from __future__ import annotations

import re
from collections.abc import Callable

from halfstep.errors import AccountError


_UNITS = {"GB": 10**9, "GiB": 2**30, "MB": 10**6, "MiB": 2**20, "TB": 10**12, "TiB": 2**40}


def bytes_from(text: str) -> int:
    """The bytes of a size with its unit.

    Raises:
        AccountError: there is no number, or no unit: 80 GB are 74.5 GiB.

    >>> bytes_from("80GB"), bytes_from("80 GiB")
    (80000000000, 85899345920)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if found is None or found[2] not in _UNITS or not float(found[1]):
        raise AccountError(
            f"memory of {text!r} given; expected a number and one of {', '.join(_UNITS)}, such as 80GB (1 GB is 10^9 "
            "bytes, 1 GiB 2^30)"
        )
    return int(float(found[1]) * _UNITS[found[2]])


def largest(peak_of: Callable[[int], int], memory: int, known: tuple[int, int]) -> tuple[int, int]:
    """The largest batch whose peak is at most `memory`, and that peak; (0, peak of a batch of 1) where not even one
    fits.

    The peak grows by as much with every example, but for what is rounded up; so it is guessed by a line through two
    batches and then counted, until a batch fits and the next does not.

    Args:
        peak_of: the peak of a batch, counted again.
        known: a batch and its peak.
    """
    peaks = dict([known])

    def peak(batch: int) -> int:
        if batch not in peaks:
            peaks[batch] = peak_of(batch)
        return peaks[batch]

    low, high = 0, 0  # fits, and does not; 0 is none yet
    guess = 1
    while True:
        if peak(guess) <= memory:
            low = guess
        else:
            high = guess
        if high == low + 1:
            return (low, peak(low)) if low else (0, peak(1))
        guess = _next(peaks, low, high, memory)


def _next(peaks: dict[int, int], low: int, high: int, memory: int) -> int:
    """The batch to try next: where a line through what is known meets the memory, within what is open."""
    first, *_, last = sorted(peaks) if len(peaks) > 1 else (1, 1)
    slope = (peaks[last] - peaks[first]) / (last - first) if last > first else 0.0
    if slope <= 0:
        guess = 2 * max(low, 1)
    else:
        near = min(peaks, key=lambda batch: abs(peaks[batch] - memory))
        guess = near + int((memory - peaks[near]) // slope)
    return max(low + 1, min(guess, high - 1)) if high else max(low + 1, guess)
