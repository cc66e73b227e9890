"""What kernels are told of a quantizer: its rule for scales, and how elements are rounded, coded and packed."""

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
    """The numbers of one rule for one element format; float32s as their bits."""

    kind: str
    """`power`, `reciprocal`, `quotient`, `narrow` or `two_level`: what a `Scaling` calls these; `double`: scales that
    have scales, to be read."""
    largest: int
    """The element format's largest value."""
    added: int = 0
    """Of powers: what carries into the exponent of the largest magnitude, and what is taken off it."""
    exponent: int = 0
    part: int | None = None
    """The part of the numbers that the power is for, where it is not all of them."""
    tensor_largest: int = 0
    """Of two levels: E4M3's largest value times the element format's; and whether scales go up."""
    up: bool = False
    second: Rule | None = None
    """Of two levels with a choice: the rule that a tile takes where it leaves the smaller sum of errors."""
    nearest: elements.Rounding | None = None
    """How elements are rounded for these sums."""
    group: int = 0
    """How many scales have a scale."""
    corrections: int = 0
    """How often the quotient of an element and its scale is corrected, where it is formed by the scale's reciprocal: a
    GPU rounds `fma` once. 0: it is divided."""


class Pair(NamedTuple):
    """How numbers are rounded, and coded."""

    rounding: elements.Rounding
    coding: element_codes.Coding


class Bins(NamedTuple):
    """A number's bin is its magnitude's bits, shifted to the right: the `most` of them from `first` on; those of
    negative numbers come after."""

    shift: int
    first: int
    most: int


class Element(NamedTuple):
    """How elements are rounded and coded: a float or an integer by a `Pair`'s numbers, a codebook by its cut points."""

    rounding: elements.Rounding | None
    coding: element_codes.Coding | None
    bits: int
    high_first: bool
    cuts: tuple[float, ...] | None = None
    values: tuple[int, ...] | None = None
    """Their values, as float32 bits."""
    order: tuple[int, int] | None = None
    """The codes by place, 4 bits each; None where they count up."""
    bins: Bins | None = None
    """Of a codebook of 8 bits, which is looked up in its `table`."""
    instruction: str | None = None
    """The GPU's own conversion to these codes (`cast.instruction`)."""


class Meaning(NamedTuple):
    """What packed codes mean: one of the last three says it."""

    bits: int
    high_first: bool
    decoding: element_codes.Decoding | None = None
    whole: tuple[int, int] | None = None
    """An integer's: the bits above its sign, and its step's bits."""
    looked_up: bool = False
    """In a `table`: a codebook's."""


ROUNDINGS = ("nearest_even", "stochastic")


@cache
def rule(format: Format, scaling: Scaling) -> Rule | None:
    """None for a rule that kernels do not know."""
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
    if type(scaling) is FourOverSix and format.key == ocp.float4_e2m1fn.key:  # whose sums of errors are exact
        tensor = elements.float_bits(scaling.room * format.max)
        four = Rule("two_level", elements.float_bits(format.max / 1.5), tensor_largest=tensor)
        return Rule("two_level", largest, tensor_largest=tensor, second=four, nearest=pair(format).rounding)
    return None


@cache
def element(format: Format, rounding: str) -> Element | None:
    """None for a format that kernels do not encode in a byte, or not by that rounding."""
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
    """The numbers of a float or an integer format, saturating."""
    numbers, codes = element_codes.scalars(format, rounding, "saturate")
    return Pair(elements.Rounding(*map(int, numbers)), element_codes.Coding(*map(int, codes)))


@cache
def meaning(format: Format) -> Meaning | None:
    """None for a format whose codes kernels do not read from a byte."""
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
    """What kernels look up of a codebook, as int32: its values by their codes; and of 8 bits, of every bin its cut and
    how many cuts lie below the bin. None for other formats."""
    if not isinstance(format, Codebook):
        return None
    values = element_codes.table(format, torch.float32).view(torch.int32)
    if format.bits == 8 and bins(format) is not None:
        found = _found(format)
        assert found is not None
        values = torch.cat([values, torch.from_numpy(found[1]).flatten()])
    return values.to(device)


def _bits(values: Sequence[float]) -> tuple[int, ...]:
    """As float32's."""
    return tuple(int(bits) for bits in np.array(values, np.float32).view(np.uint32))


def e4m3() -> Pair:
    """Those of the scales of two levels."""
    return pair(ocp.float8_e4m3fn)


@cache
def written(dtype: torch.dtype) -> elements.Rounding:
    """How products are rounded to a dtype of 16 bits, saturating."""
    return elements.Rounding(*map(int, elements.scalars(formats.get(dtype), "nearest_even", "saturate")))


@cache
def told(
    quantizer: Quantizer, device: torch.device, dtype: torch.dtype, given: tuple[Rule, Element] | None = None
) -> tuple[Rule, Element]:
    """What kernels are told of a quantizer, which is `given` or `known`, of tensors of that dtype there: by the
    instructions of that GPU, which give the same bits."""
    found = given or known(quantizer)
    assert found is not None
    rule, element = found
    made = instruction(quantizer.format, quantizer.rounding, "saturate", device)
    divides = rule.kind == "quotient" and made is not None  # what is rounded otherwise takes every bit of a quotient
    corrections = (2 if dtype == torch.float32 else 1) if divides else 0
    return rule._replace(corrections=corrections), element._replace(instruction=made)


def known(quantizer: Quantizer) -> tuple[Rule, Element] | None:
    """What kernels are told of a quantizer; None where they do not do what it does."""
    scales = quantizer.scales
    if scales is None or quantizer.outliers is not None or quantizer.clamp is not None:
        return None
    ruled, coded = rule(quantizer.format, scales.rule), element(quantizer.format, quantizer.rounding)
    if ruled is None or coded is None or ruled.kind == "double" or (coded.rounding is None and ruled.kind == "power"):
        return None
    return ruled, coded


# ---- codebooks of 8 bits: where a number's place among 256 rising values is looked up --------------------------------


@cache
def bins(format: Codebook) -> Bins | None:
    """How the numbers between its values are laid in bins; None where kernels do not read and write its codes."""
    values = format.values()
    rising = all(format.decode(code) == value for code, value in enumerate(values))
    found = _found(format) if len(values) == 256 and rising and format.ties == "lower" else None
    return None if found is None else found[0]


_SHIFTS = range(18, 12, -1)
"""Bits of a significand that make no difference to bins: fewer and fewer, while some bin has two cuts."""


@cache
def _found(format: Codebook) -> tuple[Bins, np.ndarray] | None:
    cuts = np.array(element_codes.cut_points(format, with_values=False), np.float32)
    sizes = np.abs(cuts)[cuts != 0].view(np.uint32)
    for shift in _SHIFTS:
        first, last = (int(size) >> shift for size in (sizes.min(), sizes.max()))
        ends = np.arange(first, last + 2, dtype=np.uint32) << shift
        smallest, largest = ends[:-1].copy(), ends[1:] - 1
        smallest[0], largest[-1] = 0, np.float32(np.inf).view(np.uint32)
        # Of positive numbers from the smallest magnitude to the largest, of negative ones the other way.
        low = np.concatenate([smallest.view(np.float32), -largest.view(np.float32)])
        high = np.concatenate([largest.view(np.float32), -smallest.view(np.float32)])
        below, above = np.searchsorted(cuts, low), np.searchsorted(cuts, high)
        if (above - below).max() <= 1:
            cut = np.where(above > below, cuts[np.minimum(below, len(cuts) - 1)], np.float32(np.inf))
            rows = np.stack([cut.astype(np.float32).view(np.int32), below.astype(np.int32)], 1)
            return Bins(shift, first, len(smallest)), rows
    return None
