"""Difficult inputs: every 16-bit value, and the surroundings of every boundary of a format."""

import math

import numpy as np
import torch

from oracles import formats as oracle


def every_16_bit_value(dtype: torch.dtype) -> torch.Tensor:
    """All 65536 values of bfloat16 or float16, including NaNs and infinities."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def around(points: np.ndarray, dtype: type) -> np.ndarray:
    """The points and their two neighbours in a numpy dtype, with both signs."""
    with np.errstate(over="ignore", under="ignore"):
        middle = np.asarray(points, np.float64).astype(dtype)
        near = [middle, np.nextafter(middle, dtype(math.inf)), np.nextafter(middle, dtype(-math.inf))]
    return np.unique(np.concatenate([s * v for v in near for s in (dtype(1), dtype(-1))]))


def hard_inputs(name: str, dtype: type) -> np.ndarray:
    """Every value and cut of a format (for wide formats: those at its ends and around 1), with neighbours and specials.

    Includes overflow thresholds, both zeros, the ends of the dtype, infinities and NaN.
    """
    format = oracle.get(name)
    if isinstance(format, oracle.Listed):
        points = np.concatenate([format.values, format.cuts])
        if format.overflow is not None:
            over, ulp = float(format.overflow), float(format.overflow) - format.max
            points = np.concatenate([points, [over, over - ulp / 2, 2 * over]])
        else:
            points = np.concatenate([points, format.max * np.array([1.01, 2.0]), [2 * format.values[1] - format.max]])
    elif isinstance(format, oracle.Wide):
        points = np.array(_ends_of_a_float(format))
    else:
        codes = [1, 2, 3, 2**29 - 1, 2**29, 2**30 - 1, 2**30, 2**30 + 1, 0x6A400000, 2**31 - 3, 2**31 - 2, 2**31 - 1]
        words = [c for code in codes for c in (2 * code, 2 * code + 1)]  # including one more bit, i.e. the cuts
        points = np.array([float(oracle.posit_by_magnitude(c, format.bits + 1, format.es) or 0) for c in words])
    info = np.finfo(dtype)
    ends = [info.max, info.smallest_subnormal, info.smallest_normal, 1e6, math.pi]
    near = around(np.concatenate([points, np.array(ends, np.float64)]), dtype)
    return np.concatenate([near, np.array([0.0, -0.0, math.inf, -math.inf, math.nan], dtype)])


def _ends_of_a_float(format: oracle.Wide) -> list[float]:
    tiny = 2.0 ** (1 - format.bias - format.mantissa_bits)
    normal, gap = 2.0 ** (1 - format.bias), 2.0**-format.mantissa_bits
    ulp = format.max * gap / 2 / (1 - gap / 2)
    points = [1 + k * gap / 2 for k in range(5)] + [1 - gap / 2, 1 - gap / 4, 2 - gap / 2, 3.0, 3 + gap]
    points += [k * tiny / 2 for k in range(1, 8)] + [
        tiny / 4,
        normal,
        normal - tiny,
        normal - tiny / 2,
        normal + tiny / 2,
    ]
    return [*points, format.max, format.max - ulp / 2, format.max - ulp, format.max + ulp / 2, format.max + ulp]


def largest_shared(name: str, dtype: torch.dtype) -> float:
    """The largest value of a format that a torch dtype also represents."""
    format, info = oracle.get(name), torch.finfo(dtype)
    if isinstance(format, oracle.Listed):
        values = format.values[format.values <= info.max]
        held = torch.from_numpy(values).to(dtype).double().numpy()
        return float(values[values == held][-1]) if (values == held).any() else format.max
    bits = min(format.mantissa_bits if isinstance(format, oracle.Wide) else 27, round(-math.log2(info.eps)))
    return format.max if info.max >= format.max else (2 - 2.0**-bits) * 2.0 ** (math.frexp(info.max)[1] - 1)


def identical(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether dtype, shape and all bits are equal; fast, for comparing thousands of tensors."""
    for tensor in (actual, expected):
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
        if not plain or tensor.layout != torch.strided:
            return False
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(actual.itemsize)
    return bits is not None and torch.equal(actual.detach().view(bits), expected.detach().view(bits))


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equality bit for bit, including the sign of zero; any NaN equals any NaN."""
    if identical(actual, expected):
        return
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    number = ~actual.isnan()
    torch.testing.assert_close(actual.signbit() & number, expected.signbit() & number)
