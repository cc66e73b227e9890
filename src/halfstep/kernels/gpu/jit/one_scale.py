"""Codes under one scale of the whole tensor, which follows from its largest magnitude: read, foreseen and written.

`F` is the `Form` of `kernels.gpu.kinds`.
"""

import triton
import triton.language as tl

from halfstep.kernels.gpu.jit.elements import code_with_nan, element_of
from halfstep.kernels.gpu.jit.masters import nearest
from halfstep.kernels.gpu.jit.numbers import as_bits, as_float, held, widened
from halfstep.kernels.gpu.jit.scales import scales


@triton.jit
def values(stored, scale, F: tl.constexpr):
    """The float32 values of codes."""
    KIND: tl.constexpr = F.kind
    D: tl.constexpr = F.decoding
    OWN: tl.constexpr = F.instruction
    if F.kind == "codes":
        element = element_of(stored, D, OWN)
    else:
        element = as_float(widened(stored, KIND))
    if F.rule.kind == "power":
        return element * scale
    else:
        return tl.where(scale == 0.0, 0.0, held(element * scale))


@triton.jit
def note(most, number, inside):
    """Raise the bits of a largest magnitude to those of a block's."""
    magnitude = (as_bits(number) & 0x7FFFFFFF).to(tl.int32, bitcast=True)
    if inside is not None:
        magnitude = tl.where(inside, magnitude, 0)
    tl.atomic_max(most, tl.max(magnitude, 0), sem="relaxed")


@triton.jit
def new_scale(most, F: tl.constexpr):
    """Of a tensor whose largest magnitude has these bits: the scale, and what numbers meet before they are rounded."""
    R: tl.constexpr = F.rule
    most = most.to(tl.uint32, bitcast=True)
    _, scale, meets, keep = scales(most, None, R, None)
    if F.rule.kind == "power":  # the numbers of a tensor that is lost are NaN, and not 0
        meets = as_float(tl.where(most >= 0x7F800000, 0x7FC00000, as_bits(meets)).to(tl.uint32))
        keep = most | 0xFFFFFFFF
    return scale, meets, keep


@triton.jit
def codes(number, meets, keep, F: tl.constexpr, HALF: tl.constexpr):
    """What an integer pointer stores of float32 numbers."""
    KIND: tl.constexpr = F.kind
    Q: tl.constexpr = F.element
    if F.rule.kind == "power":
        number = number * meets
    else:
        number = as_float(as_bits(number) & keep)
        if F.rule.kind == "reciprocal":
            number = number * meets
        else:
            number = tl.div_rn(number, meets + number * 0.0)
    if F.kind == "codes":
        return code_with_nan(as_bits(number), Q).to(tl.uint8)
    else:
        return nearest(number, KIND, HALF)
