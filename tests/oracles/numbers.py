"""Inputs that numbers go wrong on: every 16-bit value, and the surroundings of every boundary of a format."""

import numpy as np
import torch

from oracles.rounding import around


def every_16_bit_value(dtype: torch.dtype) -> torch.Tensor:
    """All 65536 codes of bfloat16 or float16, NaNs and infinities included."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def boundaries(format, dtype: type) -> list[float]:
    """Values, midpoints, overflow thresholds and subnormal edges of a format, each with its neighbours in `dtype`."""
    ulp = 2.0 ** (format.max_exponent - format.mantissa_bits)
    tiny, gap = format.min_subnormal, format.eps
    points = [0.0, 1.0, 1 + gap / 2, 1 + gap, 1 + 1.5 * gap, 2 - gap / 2, 3.0, 3.0 + gap]
    points += [k * tiny / 2 for k in range(1, 8)] + [tiny / 4]
    points += [format.min_normal, format.min_normal - tiny, format.min_normal - tiny / 2, format.min_normal + tiny / 2]
    points += [format.max, format.max - ulp / 2, format.max - ulp, np.inf, np.nan]
    if format.max < 1e38:
        points += [format.max + ulp / 2, format.max + ulp, 2 * format.max, 1e6]
    elif dtype is np.float64:
        points += [format.max + ulp / 2, format.max + ulp, 2 * format.max, 1e300]
    else:
        points += [float(np.finfo(np.float32).max)]
        if ulp > 2.0**104:
            points += [format.max + ulp / 2]
    with np.errstate(over="ignore"):
        return [v for point in points for v in around(point, dtype)]


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equality bit for bit, the sign of zero included; any NaN equals any NaN."""
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    number = ~actual.isnan()
    torch.testing.assert_close(actual.signbit() & number, expected.signbit() & number)
