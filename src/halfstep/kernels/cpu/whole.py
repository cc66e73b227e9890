"""Moments with one scale a tensor, in Adam's kernel: the scale follows from all of what is written, so it comes first.

One pass forms the new moments for their largest magnitudes alone, and a second one forms them again and writes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.formats import Float
from halfstep.kernels.cpu import element_codes
from halfstep.kernels.cpu.compiled import CHUNK, inner
from halfstep.kernels.cpu.element_codes import Coding, Decoding
from halfstep.kernels.cpu.elements import Rounding
from halfstep.kernels.cpu.lanes import MAGNITUDE, NAN, SIGN
from halfstep.kernels.cpu.runs import elementwise
from halfstep.quant.quantizer import Quantizer


_ROOM = 2.0**100  # for scales: a value times one of them stays below infinity
_CODES = {torch.float16: torch.int16}


@cache
def knows(quantizer: Quantizer, codes: torch.dtype) -> bool:
    """Whether kernels do what this quantizer does to a tensor whose codes lie in that dtype."""
    scales, format = quantizer.scales, quantizer.format
    if (
        scales is None
        or quantizer.rounding != "nearest_even"
        or quantizer.outliers is not None
        or not scales.rule.reads
    ):
        return False
    if not scales.rule.linear or scales.rule.factor(torch.ones((), dtype=torch.float32, device="cpu"), format) is None:
        return False
    return codes == torch.float16 or (isinstance(format, Float) and _is_byte(format) and codes.itemsize == 1)


def _is_byte(format: Float) -> bool:
    known = format.bits == 8 and element_codes.scalars(format, "nearest_even", "saturate") is not None
    return known and Decoding(*element_codes.decoding_scalars(format)).half > 0


def usual(scale: Tensor) -> bool:
    """Whether a stored scale is one that values may be multiplied by without a look at what comes of it."""
    return 0.0 <= float(scale) <= _ROOM


def factor(quantizer: Quantizer, amax: Any) -> Tensor | None:
    """What a tensor of that amax is multiplied by; None where that is for the reference to say."""
    assert quantizer.scales is not None
    found = quantizer.scales.rule.factor(torch.tensor(float(amax), dtype=torch.float32, device="cpu"), quantizer.format)
    return found if found is not None and bool(found.isfinite()) and usual(found.reciprocal()) else None


def numpy_type(codes: torch.dtype) -> torch.dtype:
    """The type in which codes of that dtype travel."""
    return _CODES.get(codes, torch.uint8)


# ---- lanes ---------------------------------------------------------------------------------------------------------


@elementwise
def _values(code, scale, decoding):
    if decoding is None:
        return code.half_to_float() * scale
    d = Decoding(*decoding)
    magnitude = code & (d.sign_shift.constant(MAGNITUDE) >> d.sign_shift).to(8)
    value = (element_codes.half_of(code, d) * (d.offset + (15 << 23)).float()).bits()
    nan = value.constant(NAN) | (value & SIGN)
    return (magnitude.to(32) > d.half).pick(nan, value).float() * scale


@elementwise
def close_whole(value, factor, numbers, codes):
    """In kernels: the codes of values, which are first multiplied by the factor."""
    product = value * factor
    if numbers is None:
        return product.float_to_half()
    return element_codes.encoded_number(product.bits(), Rounding(*numbers), Coding(*codes)).to(8)


@inner
def open_whole(codes, scale, decoding):
    """In kernels: the values of codes."""
    values = np.empty(CHUNK, np.float32)[: codes.size]
    _values(values, codes, scale, decoding)
    return values
