"""The constants with which kernels quantize: the rule for scales, and how elements are rounded, encoded and packed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from halfstep import formats
from halfstep.formats import Codebook, Format, Integer, ocp
from halfstep.kernels.cpu import element_codes, elements
from halfstep.kernels.cpu.scales import power_scalars
from halfstep.kernels.gpu.cast import instruction
from halfstep.quant import Quantizer
from halfstep.quant.scaling import Scaling
from halfstep.quant.scaling.absmax import GROUP, DoubleAbsmax
from halfstep.quant.scaling.two_level import FourOverSix


class Rule(NamedTuple):
    """The constants of a scaling rule for one element format; float32 values as their bits."""

    kind: str
    """`power`, `reciprocal`, `quotient`, `narrow` or `two_level`, as a `Scaling` names these; `double`: scales that are
    quantized themselves, for decoding only."""
    largest: int
    """The element format's largest value."""
    added: int = 0
    """For powers: added to amax's bits, so that it may carry into the exponent; `exponent` is subtracted from the
    exponent."""
    exponent: int = 0
    part: int | None = None
    """The share of the amax for which the power is chosen, where it is not 1."""
    tensor_largest: int = 0
    """For two levels: E4M3's largest value times the element format's; `up`: whether scales are rounded up."""
    up: bool = False
    second: Rule | None = None
    """For two levels with a choice: another rule, which a tile takes where its sum of errors is smaller."""
    nearest: elements.Rounding | None = None
    """How elements are rounded to compute these errors."""
    group: int = 0
    """For `double`: how many scales share a scale."""
    corrections: int = 0
    """How many times the quotient of an element and its scale is corrected by `fma`, where it is computed with the
    scale's reciprocal. 0: a division."""


class Pair(NamedTuple):
    """How elements are rounded and encoded."""

    rounding: elements.Rounding
    coding: element_codes.Coding


class Bins(NamedTuple):
    """Bins of float32 values: bin = (bits of the magnitude >> shift) - first, clamped to `most` bins; the bins of
    negative values follow those of positive ones."""

    shift: int
    first: int
    most: int


class Element(NamedTuple):
    """How elements are rounded and encoded: floats and integers by a `Pair`, codebooks by their cut points."""

    rounding: elements.Rounding | None
    coding: element_codes.Coding | None
    bits: int
    high_first: bool
    cuts: tuple[float, ...] | None = None
    values: tuple[int, ...] | None = None
    """The codebook's values, as float32 bits."""
    order: tuple[int, int] | None = None
    """The codes in order of value, 4 bits each, in two words; None where codes count up."""
    bins: Bins | None = None
    """For an 8-bit codebook, which is looked up in its `table`."""
    instruction: str | None = None
    """The GPU's own conversion to these codes (`cast.instruction`)."""


class Meaning(NamedTuple):
    """How packed codes are decoded: by one of the last three fields."""

    bits: int
    high_first: bool
    decoding: element_codes.Decoding | None = None
    whole: tuple[int, int] | None = None
    """For an integer format: the number of bits above its sign, and the float32 bits of its step."""
    looked_up: bool = False
    """For a codebook: its values are in a `table`."""


ROUNDINGS = ("nearest_even", "stochastic")


@cache
def rule(format: Format, scaling: Scaling) -> Rule | None:
    """The constants of a scaling rule; None where kernels do not support it."""
    largest = elements.float_bits(format.max)
    inner = scaling if scaling.inner is None else scaling.inner
    if inner.exact and inner.reads:
        numbers = power_scalars(format, inner)
        if numbers is None:
            return None
        added, exponent = int(numbers[0]), int(numbers[1])
        part = None if inner is scaling else elements.float_bits(scaling.part)
        return Rule("power", largest, added, exponent - (exponent >> 31 << 32), part)
    if scaling.reciprocal:
        return Rule("reciprocal", largest)
    if scaling.quotient:
        return Rule("quotient", largest)
    if scaling.narrow:
        return Rule("narrow", largest)
    if scaling.two_level:
        tensor = elements.float_bits(ocp.float8_e4m3fn.max * format.max)
        return Rule("two_level", largest, tensor_largest=tensor, up=not scaling.clips)  # type: ignore[attr-defined]
    if isinstance(scaling, DoubleAbsmax):
        return Rule("double", largest, group=GROUP)
    if type(scaling) is FourOverSix and format.key == ocp.float4_e2m1fn.key:  # its sums of errors are exact
        tensor = elements.float_bits(scaling.room * format.max)
        four = Rule("two_level", elements.float_bits(format.max / 1.5), tensor_largest=tensor)
        return Rule("two_level", largest, tensor_largest=tensor, second=four, nearest=pair(format).rounding)
    return None


@cache
def element(format: Format, rounding: str) -> Element | None:
    """The constants for encoding; None for a format that kernels do not encode in a byte, or not with that rounding."""
    first = format.high_nibble_first
    if isinstance(format, Codebook):
        if rounding != "nearest_even" or format.ties != "lower":
            return None
        if format.bits == 8 and (found := bins(format)) is not None:
            return Element(None, None, 8, first, bins=found)
        if format.bits != 4:
            return None
        cuts = tuple(float(cut) for cut in element_codes.cut_points(format, False))
        return Element(None, None, 4, first, cuts, _bits(format.values()), element_codes.order_of(format))
    if rounding not in ROUNDINGS or element_codes.in_bytes(format, rounding) is None:
        return None
    return Element(*pair(format, rounding), format.bits, first)


@cache
def pair(format: Format, rounding: str = "nearest_even") -> Pair:
    """The constants for rounding and encoding in a float or integer format, saturating."""
    numbers, codes = element_codes.scalars(format, rounding, "saturate")
    return Pair(elements.Rounding(*map(int, numbers)), element_codes.Coding(*map(int, codes)))


@cache
def meaning(format: Format) -> Meaning | None:
    """The constants for decoding; None for a format whose codes kernels do not read from a byte."""
    made = Meaning(format.bits, format.high_nibble_first)
    if isinstance(format, Codebook):
        return made._replace(looked_up=True) if format.bits in (4, 8) else None
    if element_codes.in_bytes(format, "nearest_even") is None:
        return None
    numbers = tuple(int(number) for number in element_codes.decoding_scalars(format))
    if isinstance(format, Integer):
        return made._replace(whole=(numbers[0], numbers[1]))
    return made._replace(decoding=element_codes.Decoding(*numbers))


@cache
def table(format: Format, device: torch.device) -> torch.Tensor | None:
    """A codebook's lookup table, as int32: its values by code; with 8 bits also, for each bin, its cut point and how
    many cut points lie below the bin. None for other formats."""
    if not isinstance(format, Codebook):
        return None
    values = element_codes.table(format, torch.float32).view(torch.int32)
    if format.bits == 8 and bins(format) is not None:
        found = _found(format)
        assert found is not None
        values = torch.cat([values, torch.from_numpy(found[1]).flatten()])
    return values.to(device)


def _bits(values: Sequence[float]) -> tuple[int, ...]:
    """Values as float32 bits."""
    return tuple(int(bits) for bits in np.array(values, np.float32).view(np.uint32))


def e4m3() -> Pair:
    """The constants for the E4M3 scales of two levels."""
    return pair(ocp.float8_e4m3fn)


@cache
def written(dtype: torch.dtype) -> elements.Rounding:
    """The rounding to a 16-bit dtype, saturating, of an element times its scale."""
    return elements.Rounding(*map(int, elements.scalars(formats.get(dtype), "nearest_even", "saturate")))


@cache
def constants_on(
    quantizer: Quantizer, device: torch.device, dtype: torch.dtype, portable: tuple[Rule, Element] | None = None
) -> tuple[Rule, Element]:
    """The constants with which kernels quantize tensors of that dtype on that device: `portable` (default: `constants`
    of the quantizer), changed to use the GPU's own instructions, which give the same bits."""
    found = portable or constants(quantizer)
    assert found is not None
    rule, element = found
    made = instruction(quantizer.format, quantizer.rounding, "saturate", device)
    divides = rule.kind == "quotient" and made is not None  # without the instruction, rounding needs an exact quotient
    corrections = (2 if dtype == torch.float32 else 1) if divides else 0
    return rule._replace(corrections=corrections), element._replace(instruction=made)


def constants(quantizer: Quantizer) -> tuple[Rule, Element] | None:
    """The constants with which kernels quantize, on any device; None where they do not support the quantizer."""
    scales = quantizer.scales
    if scales is None or quantizer.outliers is not None or quantizer.clamp is not None:
        return None
    ruled, coded = rule(quantizer.format, scales.rule), element(quantizer.format, quantizer.rounding)
    if ruled is None or coded is None or ruled.kind == "double" or (coded.rounding is None and ruled.kind == "power"):
        return None
    return ruled, coded


# ---- codebooks of 8 bits: the index of a value among 256 increasing ones, by a lookup table --------------------------


@cache
def bins(format: Codebook) -> Bins | None:
    """The bins of an 8-bit codebook's cut points; None where kernels do not support it."""
    values = format.values()
    rising = all(format.decode(code) == value for code, value in enumerate(values))
    found = _found(format) if len(values) == 256 and rising and format.ties == "lower" else None
    return None if found is None else found[0]


_SHIFTS = range(18, 12, -1)
"""Numbers of low bits of the float32 that bins ignore: tried in this order until no bin holds two cut points."""


@cache
def _found(format: Codebook) -> tuple[Bins, np.ndarray] | None:
    cuts = np.array(element_codes.cut_points(format, with_values=False), np.float32)
    sizes = np.abs(cuts)[cuts != 0].view(np.uint32)
    for shift in _SHIFTS:
        first, last = (int(size) >> shift for size in (sizes.min(), sizes.max()))
        ends = np.arange(first, last + 2, dtype=np.uint32) << shift
        smallest, largest = ends[:-1].copy(), ends[1:] - 1
        smallest[0], largest[-1] = 0, np.float32(np.inf).view(np.uint32)
        # In increasing order of value: positive bins from their smallest magnitude, negative ones from their largest.
        low = np.concatenate([smallest.view(np.float32), -largest.view(np.float32)])
        high = np.concatenate([largest.view(np.float32), -smallest.view(np.float32)])
        below, above = np.searchsorted(cuts, low), np.searchsorted(cuts, high)
        if (above - below).max() <= 1:
            cut = np.where(above > below, cuts[np.minimum(below, len(cuts) - 1)], np.float32(np.inf))
            rows = np.stack([cut.astype(np.float32).view(np.int32), below.astype(np.int32)], 1)
            return Bins(shift, first, len(smallest)), rows
    return None
