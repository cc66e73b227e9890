"""Posits: the bit string regime, exponent, fraction is cut to the word, and rounding happens on the string."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halfstep.formats import Posit
from halfstep.quant.family.floating import power_of_two
from halfstep.quant.rounding import round_steps


_FRACTION = 52  # bits of a float64's fraction


def rounded(x: Tensor, format: Posit, rounding: str, overflow: str, noise: Tensor | None) -> Tensor:
    """Nearest modes decide on the bit string and never give zero; the others know the two neighbours by value.

    Infinities become NaN (NaR); everything else stays within ± max, whatever `overflow` says.
    """
    magnitude, negative = x.abs(), x.signbit()
    inside = magnitude.clamp(format.smallest, format.max).nan_to_num(format.max)
    low, rest, half = _cut(inside, format)
    top = (1 << format.bits - 1) - 1
    if rounding.startswith("nearest"):
        outward = {"nearest_even": low & 1 == 1, "nearest_away": torch.ones_like(negative), "nearest_up": ~negative}
        tie_up = outward[rounding]
        code = (low + ((rest > half) | ((rest == half) & tie_up)).long()).clamp(1, top)
    else:
        low = torch.where(magnitude < format.smallest, 0, low)
        below, above = decode(low, format), decode((low + 1).clamp(max=top), format)
        gap = torch.where(above > below, above - below, 1.0)
        remainder = ((magnitude.clamp(max=format.max) - below) / gap).nan_to_num(0)
        code = low + round_steps(remainder, negative, rounding, noise).long()
    values = torch.where(magnitude == 0, 0.0, decode(code, format))
    values = torch.where(magnitude.isnan() | magnitude.isinf(), math.nan, values)
    return torch.where(negative, -values, values) + 0.0


def _cut(magnitude: Tensor, format: Posit) -> tuple[Tensor, Tensor, Tensor]:
    """The code at or below each number in [smallest, max], the bits cut off, and what half a step is in those bits."""
    bits = magnitude.view(torch.int64)  # a positive normal float64: minpos is at least 2^-960
    exponent = (bits >> _FRACTION) - 1023
    regime = exponent >> format.es
    payload = (exponent & (1 << format.es) - 1) << _FRACTION | bits & (1 << _FRACTION) - 1
    length = torch.where(regime >= 0, regime + 2, 1 - regime)  # of the regime with the bit that ends it
    room = (format.bits - 1 - length).clamp(min=0)
    ones = ((torch.ones_like(regime) << regime.clamp(min=0) + 1) - 1) << 1
    prefix = torch.where(regime >= 0, ones, 1)
    prefix = torch.where(length > format.bits - 1, prefix >> 1, prefix)  # max: the word ends before the regime does
    shift = format.es + _FRACTION - room
    one = torch.ones_like(shift)
    return prefix << room | payload >> shift, payload & (one << shift) - 1, one << shift - 1


def encode(values: Tensor, format: Posit) -> Tensor:
    magnitude = values.abs().clamp(format.smallest, format.max).nan_to_num(1.0)
    code = torch.where(values == 0, 0, _cut(magnitude, format)[0])
    code = torch.where(values < 0, (1 << format.bits) - code, code)
    return torch.where(values.isnan(), 1 << format.bits - 1, code)


def decode(codes: Tensor, format: Posit) -> Tensor:
    sign_bit = 1 << format.bits - 1
    negative = codes & sign_bit != 0
    body = torch.where(negative, 2 * sign_bit - codes, codes) & sign_bit - 1
    leads = body >> format.bits - 2 & 1
    ends = torch.where(leads == 1, ~body & sign_bit - 1, body)  # its highest one is the bit that ends the regime
    run = format.bits - 1 - torch.frexp(ends.double())[1].long()
    regime = torch.where(leads == 1, run - 1, -run)
    room = (format.bits - 2 - run).clamp(min=0)
    payload = body & (torch.ones_like(room) << room) - 1
    scaled = payload << format.es + 32 - room  # es bits of exponent, then 32 of fraction
    exponent = (regime << format.es) + (scaled >> 32)
    values = (1.0 + (scaled & (1 << 32) - 1).double() * 2.0**-32) * power_of_two(exponent)
    values = torch.where(body == 0, 0.0, torch.where(negative, -values, values))
    return torch.where(codes == sign_bit, math.nan, values)
