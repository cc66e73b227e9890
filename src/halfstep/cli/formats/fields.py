"""A code's bits, field by field, and what they mean."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import isinf, isnan

from halfstep.cli.formats.number import exact_text, labelled
from halfstep.formats import Codebook, Float, Format, Integer, Posit, PowerOfTwo
from halfstep.formats.posit import parts


@dataclass(frozen=True)
class Field:
    """Some bits of a code and what they mean."""

    name: str
    bits: str
    meaning: str


def bits_text(format: Format, code: int) -> str:
    """The bits of a code, a space between fields: `0 1000 101`."""
    return " ".join(field.bits for field in fields(format, code) if field.bits)


def hex_text(format: Format, code: int) -> str:
    """A code in hexadecimal, with the digits its bits need."""
    return f"0x{code:0{-(-format.bits // 4)}x}"


def fields(format: Format, code: int) -> list[Field]:
    """The fields of a code, from the highest bit."""
    bits = f"{code:0{format.bits}b}"
    if isinstance(format, Float):
        return _float_fields(format, code)
    if isinstance(format, Posit):
        return _posit_fields(format, code)
    if isinstance(format, Integer):
        n = format.decode(code) * (1 << format.fraction_bits)
        steps = f" of 1/{1 << format.fraction_bits}" if format.fraction_bits else ""
        return [Field("two's complement" if format.low else "unsigned", bits, f"{n:.0f}{steps}")]
    if isinstance(format, PowerOfTwo):
        return [Field("exponent", bits, "all ones: NaN" if code == 255 else f"{code} - 127: 2^{code - 127}")]
    return [Field("table index" if isinstance(format, Codebook) else "code", bits, f"entry {code}")]


def _float_fields(format: Float, code: int) -> list[Field]:
    sign, exponent, mantissa = format.fields(code)
    value = format.decode(code)
    power = f"{exponent} - {format.bias}: 2^{exponent - format.bias}"
    if exponent == 0:
        power = f"0, subnormal: 2^{format.min_exponent}"
    fraction = f"{int(exponent > 0)} + {mantissa}/{1 << format.mantissa_bits}"
    if isnan(value) or isinf(value):
        power, fraction = "NaN" if isnan(value) else "infinity", ""
    return [
        Field("sign", str(sign), "-" if sign else "+"),
        Field("exponent", f"{exponent:0{format.exponent_bits}b}", power),
        Field("mantissa", f"{mantissa:0{format.mantissa_bits}b}" if format.mantissa_bits else "", fraction),
    ]


def _posit_fields(format: Posit, code: int) -> list[Field]:
    sign, top = code >> format.bits - 1, 1 << format.bits - 1
    if code in (0, top):
        return [Field("sign", str(sign), ""), Field("rest", "0" * (format.bits - 1), "NaR" if sign else "zero")]
    lead, regime, power, fraction = parts(f"{(2 * top - code if sign else code):0{format.bits - 1}b}", format.es)
    stored = int(power.ljust(format.es, "0") or "0", 2)
    return [
        Field("sign", str(sign), "-: the rest is shown negated (two's complement)" if sign else "+"),
        Field("regime", lead, f"{regime}: 2^({regime} * {1 << format.es}) = 2^{regime << format.es}"),
        Field("exponent", power, f"{stored}: 2^{stored}" if format.es else "the format has none"),
        Field("fraction", fraction, f"1 + {int(fraction, 2)}/{1 << len(fraction)}" if fraction else "1"),
    ]


def point_text(format: Format, value: Fraction | float, code: int | None) -> str:
    """A value with its code and the bits of that, which a line break does not part."""
    bits = "" if code is None else bits_text(format, code).replace(" ", "\xa0")
    return f"{exact_text(value):<22}  {'no code' if code is None else hex_text(format, code)}  {bits}"


def fields_text(format: Format, code: int, indent: int) -> str:
    """A line for each field of a code."""
    found = fields(format, code)
    wide = max(len(field.bits) for field in found)
    return labelled([(field.name, f"{field.bits or '-':<{wide}}  {field.meaning}") for field in found], indent)
