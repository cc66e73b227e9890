"""Range expansion in lanes: `quant.scaling.expansion`, bit for bit, with the polynomials of `quant.logarithm`.

Each intermediate of a group is computed for many groups at a time: for one group, every operation would wait for the
one before.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import types

from halfstep.formats import Float, Format
from halfstep.kernels.cpu import element_codes
from halfstep.kernels.cpu.blocks import LEVELS
from halfstep.kernels.cpu.compiled import inner
from halfstep.kernels.cpu.elements import Rounding
from halfstep.kernels.cpu.lanes import INFINITY, MAGNITUDE, NAN, SIGN, Lane, bits_of, lanes
from halfstep.kernels.cpu.runs import elementwise, length, runs
from halfstep.kernels.cpu.scales import larger
from halfstep.quant.logarithm import EXP2, HALF_ROOT, LOG2, MAGIC, MAGIC_BITS, log2_fraction, polynomial
from halfstep.quant.quantizer import Quantizer
from halfstep.quant.scaling.expansion import LARGEST, SMALLEST, SPAN, Expansion, log2_of, log2_range


LARGEST_FLOAT = 3.4028234663852886e38
NOTHING = -126.0
"""A log2 that rounds to zero, for formats whose range is at most 40 powers of two."""


def supports(quantizer: Quantizer, columns: int) -> bool:
    """Whether kernels support this quantizer for rows of that many columns."""
    scales, format = quantizer.scales, quantizer.format
    return (
        scales is not None
        and isinstance(scales.rule, Expansion)
        and scales.tile.rows == 1
        and scales.tile.columns in LEVELS
        and columns % scales.tile.columns == 0
        and isinstance(format, Float)
        and element_codes.in_bytes(format, "nearest_even") is not None
        and element_codes.Decoding(*element_codes.decoding_scalars(format)).half > 0
        and quantizer.rounding == "nearest_even"
        and quantizer.outliers is None
    )


def scalars(element: Format, rule: Expansion) -> tuple[Any, Any, Any]:
    """log2 of the range that a group is expanded to, log2 of the largest element, and a 1 where exponents are multiples
    of 1/16, else None."""
    whole = np.float32(1) if rule.sixteenths else None
    return np.float32(log2_range(element, rule.sixteenths)), np.float32(log2_of(element.max)), whole


@cache
def meaning(element: Float) -> tuple[Any, ...]:
    """The constants for decoding a code, followed by the `log2` of each significand of the format. One flat tuple,
    since a parallel kernel takes no nested one."""
    significands = (
        torch.arange(1 << element.mantissa_bits, dtype=torch.float32, device="cpu") / (1 << element.mantissa_bits) + 1
    )
    fractions = log2_fraction(significands)[1]
    return *element_codes.decoding_scalars(element), *(np.float32(fraction) for fraction in fractions.tolist())


# ---- lanes ---------------------------------------------------------------------------------------------------------


def log2(x: Lane) -> Lane:
    """`quant.logarithm.log2`."""
    bits = x.bits()
    exponent = (bits - HALF_ROOT).shift_signed(23)
    t = (bits - (exponent << 23)).float() - 1.0
    return exponent.value_as_float() + polynomial(LOG2, t) * t


def exp2(x: Lane) -> Lane:
    """`quant.logarithm.exp2`."""
    shifted = x + MAGIC
    power = (shifted.bits() - (MAGIC_BITS - 127)) << 23
    return polynomial(EXP2, x - (shifted - MAGIC)) * power.float()


def _log2_of_few_bits(x: Lane, fractions: list[Lane]) -> Lane:
    """The `log2` of an element of few bits: the result for each significand is precomputed, and selected bit by bit."""
    bits = x.bits()
    exponent = (bits - HALF_ROOT).shift_signed(23)
    for bit in range(24 - len(fractions).bit_length(), 23):
        is_set = (bits & 1 << bit) > 0
        fractions = [is_set.pick(above, below) for below, above in zip(fractions[::2], fractions[1::2], strict=True)]
    return exponent.value_as_float() + fractions[0]


@runs
def _value(code, log_scale, root, center, meaning):
    """The value of a code of a group with this scale, exponent and center."""
    count = len(element_codes.Decoding._fields)
    d, fractions = element_codes.Decoding(*meaning[:count]), meaning[count:]
    magnitude = code.to(32) & (d.sign_shift.constant(MAGNITUDE) >> d.sign_shift)
    element = element_codes.half_of(magnitude.to(8), d) * (d.offset + (15 << 23)).float()
    value = exp2((_log2_of_few_bits(element, fractions) + log_scale) * root) * center
    value = (value > LARGEST_FLOAT).pick(value.constant(LARGEST_FLOAT), value)
    value = magnitude.equals(0).pick(center * 0.0, value)
    bits = (magnitude > d.half).pick(magnitude.constant(NAN), value.bits())
    return (bits | (code.to(32) << d.sign_shift) & SIGN).float()


@runs
def _code(value, log_scale, exponent, center, numbers, codes):
    """The code of an element of a group; a ratio of 0 is encoded as a value far below all others."""
    bits = bits_of(value)
    ratio = (bits & MAGNITUDE).float() / center
    power = exponent * log2(ratio) - log_scale
    power = ratio.equals(0.0).pick(power.constant(NOTHING), power)
    element = exp2(power).bits() | (bits & SIGN)
    code = element_codes.encoded_number(element, Rounding(*numbers), element_codes.Coding(*codes))
    return log_scale.is_nan().pick(code.constant(0), code).to(8)


@lanes(types.uint32)
def _less(least, bits):
    """The smaller of `least` and a magnitude's bits minus 1, so that zero counts as the largest."""
    return least.min((bits & MAGNITUDE) - 1)


def _ends(amax: Lane, least: Lane) -> tuple[Lane, Lane]:
    """The largest and the smallest magnitude of a group; 1 where the group is all zeros or not finite."""
    usual = (amax > 0) & (amax < INFINITY)
    one = amax.constant(127 << 23)
    largest = usual.pick(amax, one).float()
    return largest, usual.pick(least + 1, one).float().max(largest * SPAN)


@elementwise
def _span(amax, least):
    largest, smallest = _ends(amax, least)
    return log2(largest / smallest)


@elementwise
def _exponent(span, rule):
    exponent = (span.constant(1.0) / span * rule[0]).min(LARGEST)
    if rule[2] is not None:
        exponent = (exponent * 16.0).truncated().value_as_float() * 0.0625
    return exponent.max(SMALLEST)


@elementwise
def _center(amax, least, span):
    return _ends(amax, least)[1] * exp2(span * 0.5)


@elementwise
def _scale(amax, least, exponent, center, rule):
    scale = exp2(exponent * log2(_ends(amax, least)[0] / center) - rule[1])
    return (amax >= INFINITY).pick(amax.constant(NAN), scale.bits()).float()


@elementwise
def _log_scale(scale):
    """log2 of a scale; NaN for NaN."""
    return scale.is_nan().pick(scale, log2(scale))


@elementwise
def _reciprocal(exponent):
    return exponent.constant(1.0) / exponent


@elementwise
def _center_or_nan(scale, center):
    return scale.is_nan().pick(scale, center)


# ---- many groups ---------------------------------------------------------------------------------------------------


@inner
def _values(codes, log_scale, root, center, levels, out, meaning):
    block, run = 1 << len(levels), length(levels)
    for b in range(log_scale.size):
        s, r, c = log_scale[b], root[b], center[b]
        for start in range(b * block, (b + 1) * block, run):
            _value(out, start, levels, (codes, s, r, c, meaning))


@inner
def decode_groups(codes, scale, exponent, center, levels, out, meaning):
    """Write the values of whole groups, from one-byte codes."""
    log_scale, root, middle = (
        np.empty(scale.size, np.float32),
        np.empty(scale.size, np.float32),
        np.empty(scale.size, np.float32),
    )
    _log_scale(log_scale, scale)
    _reciprocal(root, exponent)
    _center_or_nan(middle, scale, center)
    _values(codes, log_scale, root, middle, levels, out, meaning)


@inner
def _note_ends(x, levels, amax, least):
    run = 1 << len(levels)
    for b in range(amax.size):
        part = x[b * run : (b + 1) * run]
        most, fewest = np.uint32(0), np.uint32(0xFFFFFFFF)
        for i in range(part.size):
            most, fewest = larger(most, part[i]), _less(fewest, part[i])
        amax[b], least[b] = most, fewest


@inner
def _groups(x, log_scale, exponent, center, levels, out, numbers, codes):
    block, run = 1 << len(levels), length(levels)
    for b in range(log_scale.size):
        s, k, c = log_scale[b], exponent[b], center[b]
        for start in range(b * block, (b + 1) * block, run):
            _code(out, start, levels, (x, s, k, c, numbers, codes))


@inner
def encode_groups(x, scale, exponent, center, levels, out, rule, numbers, codes):
    """Write the scales and codes of whole groups, from float32 bits."""
    amax, least = np.empty(scale.size, np.uint32), np.empty(scale.size, np.uint32)
    span = np.empty(scale.size, np.float32)
    _note_ends(x, levels, amax, least)
    _span(span, amax, least)
    _exponent(exponent, span, rule)
    _center(center, amax, least, span)
    _scale(scale, amax, least, exponent, center, rule)
    _log_scale(span, scale)
    _groups(x, span, exponent, center, levels, out, numbers, codes)
