"""Rounding to the nearest posit, as values or as codes (`kernels.cpu.posit`).

`P` is its `Cutting`, known when a kernel is compiled. d, the exponent and significand of a float32 less the bias, is
signed: its upper bits are the regime.
"""

import triton
import triton.language as tl

from halfstep.kernels.gpu.jit.numbers import narrowed, widened
from halfstep.kernels.gpu.jit.packing import put_numbers


@triton.jit
def cut_at(d, P: tl.constexpr):
    """How many bits of d are cut, and its regime, from 0 up on either side of 1."""
    signed = d.to(tl.int32, bitcast=True)
    regime = ((signed >> P.regime_shift) ^ (signed >> 31)).to(tl.uint32, bitcast=True)
    return tl.minimum(regime + P.base, P.regime_shift).to(tl.uint32), regime


@triton.jit
def posit_rounded(magnitude, P: tl.constexpr):
    """The d of a magnitude, rounded, as if it were a number other than zero."""
    d = tl.maximum(tl.minimum(magnitude, P.largest), P.smallest).to(tl.uint32) - 0x3F800000
    cut, _ = cut_at(d, P)
    # A cut at the regime: the last bit of the code is the one that ends it, 0 after ones, 1 after zeros.
    odd = tl.where(cut < P.regime_shift, (d >> cut) & 1, d >> 31)
    one = tl.full(d.shape, 1, tl.uint32) << cut
    return (d + (one >> 1) + odd - 1) & (0 - one)


@triton.jit
def posit_value(bits, P: tl.constexpr):
    """The float32 bits of the nearest posit; NaN of infinities."""
    magnitude = bits & 0x7FFFFFFF
    value = (posit_rounded(magnitude, P) + 0x3F800000) | (bits & 0x80000000)
    value = tl.where(magnitude == 0, 0, value)
    return tl.where(magnitude >= 0x7F800000, 0x7FC00000, value).to(tl.uint32)


@triton.jit
def posit_code(bits, P: tl.constexpr):
    """The code of the nearest posit, 32 bits wide."""
    magnitude = bits & 0x7FFFFFFF
    d = posit_rounded(magnitude, P)
    cut, regime = cut_at(d, P)
    unit = tl.full(d.shape, 1, tl.uint32)
    rest = (d & ((1 << P.regime_shift) - 1)) >> cut
    ones = (1 << (P.bits - 1)) - (unit << (P.bits - 2 - regime))
    zeros = unit << ((P.bits - 3 - regime) & 31)
    code = tl.where(d > 0x7FFFFFFF, zeros, ones) | rest
    code = tl.where(bits > 0x7FFFFFFF, 0 - code, code) & ((2 << (P.bits - 1)) - 1)
    code = tl.where(magnitude == 0, 0, code)
    return tl.where(magnitude >= 0x7F800000, 1 << (P.bits - 1), code).to(tl.uint32)


@triton.jit
def posit_of(stored, P: tl.constexpr, SOURCE: tl.constexpr, TARGET: tl.constexpr):
    """What is stored of one element: a value in a dtype, or a code of so many bits."""
    bits = widened(stored, SOURCE)
    if TARGET == "uint8":
        made = posit_code(bits, P).to(tl.uint8)
    elif TARGET == "uint16":
        made = posit_code(bits, P).to(tl.uint16).to(tl.int16, bitcast=True)
    elif TARGET == "uint32":
        made = posit_code(bits, P).to(tl.int32, bitcast=True)
    else:
        made = narrowed(posit_value(bits, P), TARGET)
    return made


@triton.jit(do_not_specialize=["n"])
def posit(x, out, n, P: tl.constexpr, SOURCE: tl.constexpr, TARGET: tl.constexpr, B: tl.constexpr):
    """Write the nearest posits of x, or their codes."""
    start = tl.program_id(0).to(tl.int64) * B
    index = tl.arange(0, B)
    if start + B <= n:
        put_numbers(out + start, posit_of(tl.load(x + start + index), P, SOURCE, TARGET), n - start, True, B)
    else:
        stored = tl.load(x + start + index, mask=start + index < n, other=0)
        put_numbers(out + start, posit_of(stored, P, SOURCE, TARGET), n - start, False, B)
