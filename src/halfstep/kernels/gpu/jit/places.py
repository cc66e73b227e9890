"""Codebooks of 256 rising values: a code's value, and a number's code, from the table of `kernels.gpu.places`."""

import triton
import triton.language as tl

from halfstep.kernels.gpu.jit.numbers import as_bits, as_float


@triton.jit
def value_at(code, known):
    """The float32 of a code."""
    return as_float(tl.load(known + code.to(tl.int32)).to(tl.uint32, bitcast=True))


@triton.jit
def placed(number, known, T: tl.constexpr):
    """How many of 255 rising cuts a number is above; no NaN."""
    bits = as_bits(number)
    bin = ((bits & 0x7FFFFFFF) >> T.shift).to(tl.int32) - T.first
    bin = tl.minimum(tl.maximum(bin, 0), T.most - 1) + tl.where(bits > 0x7FFFFFFF, T.most, 0)
    found = known + 256 + 2 * bin
    cut = as_float(tl.load(found).to(tl.uint32, bitcast=True))
    return tl.load(found + 1) + (number > cut).to(tl.int32)
