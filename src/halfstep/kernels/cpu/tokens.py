"""Rounds a few rows of activations for `few_rows`, with the kernels of large tensors, chosen once for all calls.

Checking tensors and creating them would take longer than rounding a token's activations.
"""

from collections.abc import Callable
from math import isfinite
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from halfstep.kernels.cpu import amax, blocks, cast, elements, rules
from halfstep.kernels.cpu.arrays import empty, widened
from halfstep.quant import Quantizer, Scales
from halfstep.quant.scaling.two_level import TwoLevel
from halfstep.quant.tile import TENSOR


Rounded = tuple[NDArray[np.float32], float | None]
"""Flat values, and the scale of the whole tensor; None for 1."""
Rounder = Callable[[NDArray[Any]], Rounded | None]
"""Rounds an `array` of whole rows; returns None where it does not support the values."""


def rounder(quantizer: Quantizer, columns: int, dtype: torch.dtype) -> Rounder | None:
    """The function that rounds rows of that many elements to values that fit `dtype`; None where no kernel here
    supports it.

    The values are those that kernels write to a tensor of that dtype. The rounder returns None for subnormal results in
    bfloat16, and for values that are not finite with two levels of scales.
    """
    scales = quantizer.scales
    if scales is None or quantizer.rounding != "nearest_even":
        return None
    if scales.tile == TENSOR:
        return _by_tensor(quantizer, dtype) if scales.rule.reciprocal else None
    if dtype == torch.float16:
        return None
    if (how := blocks.value_constants(quantizer, columns)) is None:
        return None
    if scales.rule.exact:
        return _by_powers(columns, quantizer, scales, dtype, how)
    clips = isinstance(scales.rule, TwoLevel) and scales.rule.clips
    return _by_two_levels(quantizer, scales, dtype, how) if clips else None


def _by_tensor(quantizer: Quantizer, dtype: torch.dtype) -> Rounder | None:
    format = quantizer.format
    numbers = elements.scalars(format, "nearest_even", "saturate", dtype, torch.float32)
    if numbers is None:
        return None

    def rounded(x: NDArray[Any]) -> Rounded:
        out = empty(x.size, dtype)
        scale = cast.round_whole(x, format, out, numbers)
        return widened(out), scale

    return rounded


def _by_powers(columns: int, quantizer: Quantizer, scales: Scales, dtype: torch.dtype, how: Any) -> Rounder:
    sides, ruled = (
        blocks.sides_of(scales.tile, columns),
        blocks.rule_arguments(quantizer.format, scales.rule, values=True),
    )

    def rounded(x: NDArray[Any]) -> Rounded | None:
        out = empty(x.size, dtype)
        tiny = blocks.round_values(x, out, sides, ruled, None, None, *how)
        return None if tiny and dtype == torch.bfloat16 else (widened(out), None)

    return rounded


def _by_two_levels(quantizer: Quantizer, scales: Scales, dtype: torch.dtype, how: Any) -> Rounder:
    format, rule = quantizer.format, scales.rule
    assert isinstance(rule, TwoLevel)
    sides, apart = blocks.sides_of(scales.tile, 0), rules.apart(format, None, dtype, True)

    def rounded(x: NDArray[Any]) -> Rounded | None:
        largest = amax.number(x)
        if not isfinite(largest):
            return None
        scale, out = rules.tensor_scale_of(largest, format), empty(x.size, dtype)
        blocks.round_values(x, out, sides, rules.given(format, rule, scale), apart, None, *how)
        return widened(out), float(scale)

    return rounded
