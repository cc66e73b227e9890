"""Rounding by definition: in fractions for one number, by search in the list of values for arrays."""

import math
from fractions import Fraction

import numpy as np


def largest_shared(format: str, dtype: str) -> float:
    """The largest value of a format that x's dtype holds too, worked out by hand."""
    bf16, fp16, fp16_in_bf16 = (2 - 2.0**-7) * 2.0**127, 65504.0, 65280.0
    fp32, tf32 = (2 - 2.0**-23) * 2.0**127, (2 - 2.0**-10) * 2.0**127
    own = {"fp32": fp32, "tf32": tf32, "fp16": fp16, "bf16": bf16, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
    narrow = {
        ("bfloat16", "fp32"): bf16,
        ("bfloat16", "tf32"): bf16,
        ("bfloat16", "fp16"): fp16_in_bf16,
        ("float16", "fp32"): fp16,
        ("float16", "tf32"): fp16,
        ("float16", "bf16"): fp16_in_bf16,
    }
    return narrow.get((dtype, format), own[format])


def neighbours(x: Fraction, format) -> tuple[Fraction, Fraction]:
    """The two values around x >= 0, equal where x is one, were the exponent unbounded above."""
    binade = Fraction(2) ** format.min_exponent
    while x >= 2 * binade:
        binade *= 2
    step = binade / 2**format.mantissa_bits
    below = x // step * step
    return below, below if below == x else below + step


def exact(x: float, format, rounding: str, overflow: str, largest: float | None = None) -> float:
    """x rounded once, from its own value; `largest` is what saturation gives where it is not the format's max."""
    largest = format.max if largest is None else largest
    beyond = math.inf if format.has_infinity else math.nan
    if math.isnan(x):
        return x
    if math.isinf(x):
        return math.copysign(largest if overflow == "saturate" else beyond, x)
    below, above = neighbours(abs(Fraction(x)), format)
    magnitude = _choose(abs(Fraction(x)), below, above, rounding, format)
    if magnitude > (largest if overflow == "saturate" else format.max):
        keeps = overflow == "saturate" or rounding == "toward_zero"
        return math.copysign(largest if keeps else beyond, x)
    return math.copysign(float(magnitude), x)


def _choose(x: Fraction, below: Fraction, above: Fraction, rounding: str, format) -> Fraction:
    if below == above or rounding == "toward_zero":
        return below
    if x - below != above - x:
        return below if x - below < above - x else above
    if rounding == "nearest_away":
        return above
    return below if below / (above - below) % 2 == 0 else above


def on_grid(x: np.ndarray, format, rounding: str, overflow: str, largest: float) -> np.ndarray:
    """Finite or not float64 `x` (of at most 16-bit origin) rounded by search in the list of the format's values."""
    values = [float(v) for v in format.values()]
    grid = np.array([*values, 2 * values[-1] - values[-2]])  # one more: what overflow is decided on
    size = np.minimum(np.abs(x), grid[-1])
    low = np.clip(np.searchsorted(grid, size, side="right") - 1, 0, len(grid) - 2)
    down, up = size - grid[low], grid[low + 1] - size  # both exact in float64: few bits, near each other
    if rounding == "toward_zero":
        rise = up == 0
    else:
        odd = low % 2 == 1  # a value's number in the list has the parity of its mantissa
        rise = (up < down) | ((up == down) & (odd if rounding == "nearest_even" else True))
    result = grid[low + rise]
    too_big = result > (largest if overflow == "saturate" else values[-1])
    beyond = np.inf if format.has_infinity else np.nan
    finite_limit = largest if overflow == "saturate" or rounding == "toward_zero" else beyond
    result = np.where(too_big, finite_limit, result)
    result = np.where(np.isinf(x), largest if overflow == "saturate" else beyond, result)
    return np.copysign(np.where(np.isnan(x), np.nan, result), x)


def around(x: float, dtype: type) -> list[float]:
    """x in a numpy dtype with its neighbours there, of both signs."""
    with np.errstate(over="ignore"):
        middle = dtype(x)
        near = [middle, np.nextafter(middle, dtype(np.inf)), np.nextafter(middle, dtype(-np.inf))]
    return [float(sign * v) for v in near for sign in (1, -1)]
