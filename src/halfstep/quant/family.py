"""How each kind of format is rounded, encoded and decoded: pure functions on flat float64 and int64 tensors.

Each class offers

    rounded(x, format, rounding, overflow, noise)   float64 in, the values of the format out, exactly
    encode(values, format)                          values of the format in, int64 codes out
    decode(codes, format)                           int64 codes in, float64 values out

`noise` is None, or an integer in [0, 2^32) per element: stochastic rounding goes up if and only if floor(remainder *
2^32) + noise >= 2^32, the remainder measured in gaps between neighbours.
"""

import math
from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor

from halfstep.formats import Float, Format, Integer, Posit
from halfstep.quant.rounding import carries_to_infinity, round_steps, stochastic


_FRACTION = 52  # bits of a float64's fraction


class Family(Protocol):
    """The interface of the classes in this file."""

    def rounded(self, x: Tensor, format: Format, rounding: str, overflow: str, noise: Tensor | None) -> Tensor: ...

    def encode(self, values: Tensor, format: Format) -> Tensor: ...

    def decode(self, codes: Tensor, format: Format) -> Tensor: ...


def of(format: Format) -> Family:
    """The implementation for this kind of format; formats without arithmetic of their own are listed code by code."""
    return cast(Family, _ARITHMETIC.get(type(format), _LISTED))


class Floats:
    """Floats: with q = max(floor(log2 |x|), min_exponent) - mantissa_bits, x becomes ± rounding(|x| / 2^q) * 2^q."""

    def rounded(self, x: Tensor, format: Float, rounding: str, overflow: str, noise: Tensor | None) -> Tensor:
        """Rounded values. float64 holds every intermediate exactly: a significand of at most 53 bits, scaled by powers
        of two."""
        magnitude, negative = x.abs(), x.signbit()
        step_exponent = _exponent(magnitude, format) - format.mantissa_bits
        steps = magnitude * power_of_two(-step_exponent)
        whole = round_steps(steps, negative, rounding, noise)
        if format.mantissa_bits == 0 and rounding == "nearest_even":  # a code's parity is its exponent's
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

    def encode(self, values: Tensor, format: Float) -> Tensor:
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

    def decode(self, codes: Tensor, format: Float) -> Tensor:
        mantissa = codes & (1 << format.mantissa_bits) - 1
        exponent = codes >> format.mantissa_bits & (1 << format.exponent_bits) - 1
        negative = codes >> format.bits - 1 == 1
        steps = mantissa + (exponent > 0).long() * (1 << format.mantissa_bits)
        values = steps.double() * power_of_two(exponent.clamp(min=1) - format.bias - format.mantissa_bits)
        last = (1 << format.exponent_bits) - 1
        if format.specials == "ieee":
            values = torch.where(exponent == last, torch.where(mantissa == 0, math.inf, math.nan), values)
        if format.specials == "fn":
            values = torch.where((exponent == last) & (mantissa == (1 << format.mantissa_bits) - 1), math.nan, values)
        if format.specials == "fnuz":
            values = torch.where(negative & (steps == 0) & (exponent == 0), math.nan, values)
        return torch.where(negative, -values, values)


class Integers:
    """Integers: x becomes rounding(x * 2^fraction_bits), clamped to the range; NaN stays NaN and has no code."""

    def rounded(self, x: Tensor, format: Integer, rounding: str, overflow: str, noise: Tensor | None) -> Tensor:
        """Rounded values. Integers have no infinity or NaN, so they saturate whatever `overflow` says."""
        whole = round_steps(x.abs() * 2.0**format.fraction_bits, x.signbit(), rounding, noise)
        return torch.copysign(whole, x).clamp(format.low, format.high) * 2.0**-format.fraction_bits + 0.0

    def encode(self, values: Tensor, format: Integer) -> Tensor:
        return (values * 2.0**format.fraction_bits).long() & (1 << format.bits) - 1

    def decode(self, codes: Tensor, format: Integer) -> Tensor:
        negative = codes >> format.bits - 1 & int(format.low < 0)
        return (codes - (negative << format.bits)).double() * 2.0**-format.fraction_bits


class Posits:
    """Posits: the bit string of regime, exponent and fraction is cut to the word's length and rounded as a string."""

    def rounded(self, x: Tensor, format: Posit, rounding: str, overflow: str, noise: Tensor | None) -> Tensor:
        """Rounded values. Nearest modes decide on the bit string and never give zero; the others compare the two
        neighbours' values.

        Infinities become NaN (NaR); everything else stays within ± max, whatever `overflow` says.
        """
        magnitude, negative = x.abs(), x.signbit()
        low, rest, half = _cut(magnitude.clamp(format.smallest, format.max).nan_to_num(format.max), format)
        top = (1 << format.bits - 1) - 1
        if rounding.startswith("nearest"):
            outward = {"nearest_even": low & 1 == 1, "nearest_away": torch.ones_like(negative), "nearest_up": ~negative}
            code = (low + ((rest > half) | ((rest == half) & outward[rounding])).long()).clamp(1, top)
        else:
            low = torch.where(magnitude < format.smallest, 0, low)
            below, above = self.decode(low, format), self.decode((low + 1).clamp(max=top), format)
            gap = torch.where(above > below, above - below, 1.0)
            remainder = ((magnitude.clamp(max=format.max) - below) / gap).nan_to_num(0)
            code = low + round_steps(remainder, negative, rounding, noise).long()
        values = torch.where(magnitude == 0, 0.0, self.decode(code, format))
        values = torch.where(magnitude.isnan() | magnitude.isinf(), math.nan, values)
        return torch.where(negative, -values, values) + 0.0

    def encode(self, values: Tensor, format: Posit) -> Tensor:
        magnitude = values.abs().clamp(format.smallest, format.max).nan_to_num(1.0)
        code = torch.where(values == 0, 0, _cut(magnitude, format)[0])
        code = torch.where(values < 0, (1 << format.bits) - code, code)
        return torch.where(values.isnan(), 1 << format.bits - 1, code)

    def decode(self, codes: Tensor, format: Posit) -> Tensor:
        sign_bit = 1 << format.bits - 1
        negative = codes & sign_bit != 0
        body = torch.where(negative, 2 * sign_bit - codes, codes) & sign_bit - 1
        leads = body >> format.bits - 2 & 1
        ends = torch.where(leads == 1, ~body & sign_bit - 1, body)  # its highest set bit ends the regime
        run = format.bits - 1 - torch.frexp(ends.double())[1].long()
        regime = torch.where(leads == 1, run - 1, -run)
        room = (format.bits - 2 - run).clamp(min=0)
        payload = body & (torch.ones_like(room) << room) - 1
        scaled = payload << format.es + 32 - room  # es bits of exponent, then 32 of fraction
        exponent = (regime << format.es) + (scaled >> 32)
        values = (1.0 + (scaled & (1 << 32) - 1).double() * 2.0**-32) * power_of_two(exponent)
        values = torch.where(body == 0, 0.0, torch.where(negative, -values, values))
        return torch.where(codes == sign_bit, math.nan, values)


class Listed:
    """Formats listed value by value (codebooks, bare exponents): rounding is a binary search in the boundaries."""

    def rounded(self, x: Tensor, format: Format, rounding: str, overflow: str, noise: Tensor | None) -> Tensor:
        """The neighbour of x that the rounding chooses; beyond the ends, the ends (see `Format.overflow_from`)."""
        values, boundaries, even = (t.to(x.device) for t in _lists(format))
        inside = x.nan_to_num(0.0).clamp(format.min, format.max)
        index = (torch.searchsorted(values, inside, right=True) - 1).clamp(0, len(values) - 2)
        low, high, turn = values[index], values[index + 1], boundaries[index]
        if noise is not None:
            rises = stochastic((inside - low) / (high - low), noise) == 1
        elif rounding == "nearest_even":
            tie = (
                even[index + 1]
                if format.ties == "even"
                else torch.tensor(format.ties == "upper", device=x.device, dtype=torch.bool)
            )
            rises = (inside > turn) | ((inside == turn) & tie)
        elif rounding == "nearest_away":
            rises = (inside > turn) | ((inside == turn) & (high.abs() >= low.abs()))
        elif rounding == "nearest_up":
            rises = inside >= turn
        elif rounding == "toward_zero":
            rises = torch.where(inside < 0, inside != low, inside == high)
        else:
            rises = inside > low if rounding == "up" else inside == high
        result = torch.where(rises, high, low)
        lost = x.isnan() if format.min <= 0 else x.isnan() | (x <= 0)
        if overflow == "ieee" and format.has_nan:
            end = x > format.max if rounding == "up" else x >= format.overflow_from
            lost = lost | (x.isposinf() if rounding in ("toward_zero", "down") else end)
        return torch.where(lost, math.nan, result)

    def encode(self, values: Tensor, format: Format) -> Tensor:
        order, codes, nan = (t.to(values.device) for t in _codes(format))
        found = codes[torch.searchsorted(order, values.nan_to_num(0.0)).clamp(max=len(codes) - 1)]
        return torch.where(values.isnan(), nan, found)

    def decode(self, codes: Tensor, format: Format) -> Tensor:
        return _decoded(format).to(codes.device)[codes]


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in float64, from the bits; torch.ldexp goes through float32 and overflows beyond 2^127."""
    return (exponent.clamp(-1022, 1023) + 1023 << 52).view(torch.float64)


def _exponent(magnitude: Tensor, format: Float) -> Tensor:
    """max(floor(log2 |x|), min_exponent), by frexp: magnitude = f * 2^e with f in [1/2, 1)."""
    exponent = torch.frexp(magnitude)[1].long() - 1
    return torch.where(magnitude == 0, format.min_exponent, exponent.clamp(min=format.min_exponent))


def _cut(magnitude: Tensor, format: Posit) -> tuple[Tensor, Tensor, Tensor]:
    """The code at or below each value in [smallest, max], the bits cut off, and half a step in units of these bits."""
    bits = magnitude.view(torch.int64)  # a positive normal float64: minpos is at least 2^-960
    exponent = (bits >> _FRACTION) - 1023
    regime = exponent >> format.es
    payload = (exponent & (1 << format.es) - 1) << _FRACTION | bits & (1 << _FRACTION) - 1
    length = torch.where(regime >= 0, regime + 2, 1 - regime)  # bits of the regime, with the bit that ends it
    room = (format.bits - 1 - length).clamp(min=0)
    prefix = torch.where(regime >= 0, ((torch.ones_like(regime) << regime.clamp(min=0) + 1) - 1) << 1, 1)
    prefix = torch.where(length > format.bits - 1, prefix >> 1, prefix)  # for max the word ends before the regime does
    shift = format.es + _FRACTION - room
    one = torch.ones_like(shift)
    return prefix << room | payload >> shift, payload & (one << shift) - 1, one << shift - 1


@cache
def _lists(format: Format) -> tuple[Tensor, Tensor, Tensor]:
    values, boundaries = format.values(), format.boundaries()
    even = [code & 1 == 0 for code in _codes(format)[1].tolist()]
    return _wide(values), _wide(boundaries), torch.tensor(even, dtype=torch.bool, device="cpu")


@cache
def _codes(format: Format) -> tuple[Tensor, Tensor, Tensor]:
    """The values, ascending; the first code of each; the code of NaN (0 where there is none)."""
    code_of: dict[float, int] = {}
    for code in format.codes():
        code_of.setdefault(format.decode(code) + 0.0, code)
    nan = [code for code in format.codes() if math.isnan(format.decode(code))]
    return (
        _wide(format.values()),
        torch.tensor([code_of[v] for v in format.values()], dtype=torch.int64, device="cpu"),
        torch.tensor((nan or [0])[0], dtype=torch.int64, device="cpu"),
    )


@cache
def _decoded(format: Format) -> Tensor:
    return _wide([format.decode(code) for code in format.codes()])


def _wide(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


_ARITHMETIC = {Float: Floats(), Integer: Integers(), Posit: Posits()}
_LISTED = Listed()
