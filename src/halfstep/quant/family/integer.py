"""Integers: x becomes rounding(x * 2^fraction_bits), clamped to the range; NaN stays NaN and has no code."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.formats import Integer
from halfstep.quant.rounding import round_steps


def rounded(x: Tensor, format: Integer, rounding: str, overflow: str, noise: Tensor | None) -> Tensor:
    """Beyond the range an integer saturates whatever `overflow` says: there is nothing else it could become."""
    whole = round_steps(x.abs() * 2.0**format.fraction_bits, x.signbit(), rounding, noise)
    return torch.copysign(whole, x).clamp(format.low, format.high) * 2.0**-format.fraction_bits + 0.0


def encode(values: Tensor, format: Integer) -> Tensor:
    return (values * 2.0**format.fraction_bits).long() & (1 << format.bits) - 1


def decode(codes: Tensor, format: Integer) -> Tensor:
    negative = codes >> format.bits - 1 & int(format.low < 0)
    return (codes - (negative << format.bits)).double() * 2.0**-format.fraction_bits
