"""log2 and exp2 in float32 with the same bits on every device: polynomials, evaluated in a fixed order.

Each operation is rounded once. Other implementations (`kernels.cpu.expansion`) use these coefficients and contract no
operations.
"""

from typing import Any

import torch
from torch import Tensor


LOG2 = (
    1.4426950216293335, -0.7213472127914429, 0.4809102714061737, -0.3607162535190582, 0.2879391014575958,
    -0.23867566883563995, 0.21521227061748505, -0.20893390476703644, 0.12926436960697174,
)  # fmt: skip
"""log2(1 + t) = t * (sum of these times powers of t), for 1 + t in [sqrt(1/2), sqrt(2)): minimax, relative error
4e-8."""

EXP2 = (
    1.0, 0.6931471824645996, 0.24022646248340607, 0.05550328642129898, 0.009618489071726799, 0.0013399930903688073,
    0.0001534581242594868,
)  # fmt: skip
"""2^f, f in [-1/2, 1/2]: minimax, relative error 2e-9."""

HALF_ROOT = 0x3F3504F3
"""The bits of sqrt(1/2)."""
MAGIC, MAGIC_BITS = 12582912.0, 0x4B400000
"""1.5 * 2^23: added to a float32, it leaves the nearest integer in the lower bits."""


def log2(x: Tensor) -> Tensor:
    """log2 of positive normal float32 values; exact for powers of two.

    Within 2.12 ulps over every 61st of them (tests/exhaustive/logarithm.py takes all). The result is meaningless for
    values that are not positive, normal and finite.
    """
    exponent, fraction = log2_fraction(x)
    return exponent.float() + fraction


def log2_fraction(x: Tensor) -> tuple[Tensor, Tensor]:
    """The integer and the fraction whose sum, rounded, is `log2`."""
    bits = x.view(torch.int32)
    exponent = (bits - HALF_ROOT) >> 23
    t = (bits - (exponent << 23)).view(torch.float32) - 1.0
    return exponent, polynomial(LOG2, t) * t


def exp2(x: Tensor) -> Tensor:
    """2^x of float32 values in [-126, 127]; exact for integers. Within 1.19 ulps over every 61st."""
    shifted = x + MAGIC
    power = (shifted.view(torch.int32) - MAGIC_BITS + 127) << 23
    return polynomial(EXP2, x - (shifted - MAGIC)) * power.view(torch.float32)


def polynomial(coefficients: tuple[float, ...], x: Any) -> Any:
    """The sum of coefficients times powers of x, a tensor or a kernel's lane: Horner's rule, from the last coefficient
    on."""
    total = x * coefficients[-1]
    for coefficient in reversed(coefficients[1:-1]):
        total = (total + coefficient) * x
    return total + coefficients[0]
