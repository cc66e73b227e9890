"""The largest magnitude of a tensor, from the bits of its numbers: integers, so that NaN is the largest of all."""

import triton
import triton.language as tl

from halfstep.kernels.gpu.jit.numbers import widened


@triton.jit(do_not_specialize=["n"])
def largest(x, found, unless, n, SOURCE: tl.constexpr, PART: tl.constexpr, B: tl.constexpr):
    """Raise `found` to the float32 bits of max |x|; where there is a number in `unless` that is not 0, read no x."""
    if unless is None:
        raised(x, found, n, SOURCE, PART, B)
    else:
        if (tl.load(unless) & 0x7FFFFFFF) == 0:
            raised(x, found, n, SOURCE, PART, B)


@triton.jit
def raised(x, found, n, SOURCE: tl.constexpr, PART: tl.constexpr, B: tl.constexpr):
    """A part of a block after the other."""
    start = tl.program_id(0).to(tl.int64) * B
    index = tl.arange(0, PART)
    worst = tl.zeros((PART,), tl.int32)
    if start + B <= n:
        for part in tl.static_range(0, B, PART):
            worst = tl.maximum(worst, magnitude(tl.load(x + start + part + index), SOURCE))
    else:
        for part in tl.static_range(0, B, PART):
            inside = start + part + index < n
            worst = tl.maximum(worst, magnitude(tl.load(x + start + part + index, mask=inside, other=0), SOURCE))
    top = tl.max(worst)
    if SOURCE != "float32":
        top = widened(top.to(tl.int16), SOURCE).to(tl.int32, bitcast=True)
    tl.atomic_max(found, top, sem="relaxed")


@triton.jit
def magnitude(stored, SOURCE: tl.constexpr):
    """What was loaded, without its sign, as an int32."""
    return stored & 0x7FFFFFFF if SOURCE == "float32" else (stored & 0x7FFF).to(tl.int32)
