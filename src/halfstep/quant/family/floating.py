"""Floats: with q = max(floor(log2 |x|), min_exponent) - mantissa_bits, x becomes ± rounding(|x| / 2^q) * 2^q."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halfstep.formats import Float
from halfstep.quant.rounding import carries_to_infinity, round_steps


def rounded(x: Tensor, format: Float, rounding: str, overflow: str, noise: Tensor | None) -> Tensor:
    """float64 holds every intermediate exactly: a significand of at most 53 bits, scaled by powers of two."""
    magnitude, negative = x.abs(), x.signbit()
    step_exponent = _exponent(magnitude, format) - format.mantissa_bits
    steps = magnitude * power_of_two(-step_exponent)
    whole = round_steps(steps, negative, rounding, noise)
    if format.mantissa_bits == 0 and rounding == "nearest_even":  # the parity of a code is that of its exponent
        whole = torch.where((steps == 1.5) & ((step_exponent + format.bias) & 1 == 0), 1.0, whole)
    result = whole * power_of_two(step_exponent)
    if overflow == "saturate" or format.specials == "finite":
        result = result.clamp(max=format.max)
    else:
        keeps = ~(carries_to_infinity(rounding, negative) | magnitude.isinf())
        beyond = math.inf if format.has_infinity else math.nan
        result = torch.where(result > format.max, torch.where(keeps, format.max, beyond), result)
    if format.specials == "fnuz":
        result = torch.where(magnitude.isinf(), math.nan, result)
    result = torch.copysign(torch.where(magnitude.isnan(), math.nan, result), x)
    return result if format.has_negative_zero else result + 0.0


def encode(values: Tensor, format: Float) -> Tensor:
    magnitude = values.abs()
    exponent = _exponent(magnitude, format)
    steps = magnitude * power_of_two(format.mantissa_bits - exponent)
    codes = (exponent + format.bias - 1 << format.mantissa_bits) + steps.nan_to_num(0, 0, 0).long()
    last = (1 << format.bits - 1) - 1  # every bit but the sign
    infinity = (1 << format.exponent_bits) - 1 << format.mantissa_bits
    nan = {"fn": last, "fnuz": 0}.get(format.specials, infinity | 1 << max(format.mantissa_bits - 1, 0))
    codes = torch.where(values.isinf(), infinity, torch.where(values.isnan(), nan, codes))
    negative = values.signbit() | values.isnan() if format.specials == "fnuz" else values.signbit()
    return codes | negative.long() << format.bits - 1


def decode(codes: Tensor, format: Float) -> Tensor:
    mantissa = codes & (1 << format.mantissa_bits) - 1
    exponent = codes >> format.mantissa_bits & (1 << format.exponent_bits) - 1
    negative = codes >> format.bits - 1 == 1
    steps = mantissa + (exponent > 0).long() * (1 << format.mantissa_bits)
    values = steps.double() * power_of_two(exponent.clamp(min=1) - format.bias - format.mantissa_bits)
    last = (1 << format.exponent_bits) - 1
    if format.specials == "ieee":
        values = torch.where(exponent == last, torch.where(mantissa == 0, math.inf, math.nan), values)
    if format.specials == "fn":
        full = (exponent == last) & (mantissa == (1 << format.mantissa_bits) - 1)
        values = torch.where(full, math.nan, values)
    if format.specials == "fnuz":
        values = torch.where(negative & (steps == 0) & (exponent == 0), math.nan, values)
    return torch.where(negative, -values, values)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in float64, from the bits; torch.ldexp goes through float32 and overflows beyond 2^127."""
    return (exponent.clamp(-1022, 1023) + 1023 << 52).view(torch.float64)


def _exponent(magnitude: Tensor, format: Float) -> Tensor:
    """max(floor(log2 |x|), min_exponent) from the bit field: magnitude = f * 2^e with f in [1/2, 1)."""
    exponent = torch.frexp(magnitude)[1].long() - 1
    return torch.where(magnitude == 0, format.min_exponent, exponent.clamp(min=format.min_exponent))
