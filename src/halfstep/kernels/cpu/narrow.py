"""bfloat16 to bfloat16 in lanes of 16 bits, nearest-even: twice as many lanes as `elements` has, and nothing widened.

Rounding is on the bits of the number, below the format's smallest normal one, too: there the cut moves up a bit a
binade, so that a step stays the same. A carry out of the significand is the next binade.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from halfstep.formats import Float, Format
from halfstep.kernels.cpu import elements
from halfstep.kernels.cpu.elements import Rounding
from halfstep.kernels.cpu.lanes import Lane


_MAGNITUDE = 0x7FFF
_FRACTION = 7


class Narrow(NamedTuple):
    """The numbers of one rounding: uint16 in a kernel's arguments, lanes inside it. Values are bfloat16 bits."""

    stop: Any
    """The exponent field from which on the cut stays where it is."""
    base: Any
    """The cut, in bits from below, plus the exponent field, up to `stop`."""
    step: Any
    """The smallest value above zero; 0 where that is bfloat16's own and needs no care."""
    half_step: Any
    largest: Any
    over: Any
    nan_above: Any
    largest_negative: Any = None
    over_negative: Any = None
    infinite: Any = None
    infinite_negative: Any = None
    zero_sign: Any = None


Scalars = tuple[np.uint16, ...]


@cache
def scalars(format: Format, overflow: str) -> Scalars:
    """The `Narrow` of a format that `elements.knows`."""
    wide = elements.scalars(format, "nearest_even", overflow, torch.bfloat16)
    p = Rounding(*(int(number) >> 16 for number in wide))  # only fields that bfloat16 holds exactly are used
    step = format.min_exponent - format.mantissa_bits if isinstance(format, Float) else -format.fraction_bits
    base = step + 127 + _FRACTION
    smallest_normal = format.min_exponent + 127 if isinstance(format, Float) else base
    own = smallest_normal == 1  # bfloat16's subnormals are the format's, down to its last bit
    numbers = Narrow(
        stop=0 if own else min(smallest_normal, base),
        base=max(base - 1, 0) if own else base,
        step=0 if own else elements.float_bits(2.0**step) >> 16,
        half_step=0 if own else elements.float_bits(2.0 ** (step - 1)) >> 16,
        largest=p.largest,
        over=p.over,
        nan_above=p.nan_above,
        largest_negative=p.largest_negative,
        over_negative=p.over_negative,
        infinite=p.infinite,
        infinite_negative=p.infinite_negative,
        zero_sign=p.zero_sign,
    )
    return tuple(np.uint16(number) for number in numbers if number is not None)


def rounded(bits: Lane, p: Narrow) -> Lane:
    """The bits of a bfloat16 rounded to nearest, ties to even."""
    magnitude = bits & _MAGNITUDE
    value = (magnitude < p.step).pick((magnitude > p.half_step).pick(p.step, 0), _cut(magnitude, p))
    return elements.finish(bits, magnitude, value, p)


def _cut(magnitude: Lane, p: Narrow) -> Lane:
    cut = (p.base - (magnitude >> _FRACTION).min(p.stop)).min(_FRACTION)
    one = magnitude.constant(1) << cut
    # The bit above the fraction is the leading one, whatever the exponent's last bit is: what is cut to it is odd.
    odd = ((magnitude | 1 << _FRACTION) >> cut) & 1
    return (magnitude + ((one - 1 + odd) >> 1)) & (one.constant(0) - one)
