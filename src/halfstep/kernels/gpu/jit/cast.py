"""Values, or codes, of a tensor's numbers rounded one by one: one pass, the largest magnitude noted on the way."""

import triton
import triton.language as tl

from halfstep.kernels.gpu.jit.instruction import converted
from halfstep.kernels.gpu.jit.numbers import as_bits, as_float, coded, narrowed, noise, rounded, seed_of, widened
from halfstep.kernels.gpu.jit.packing import put


@triton.jit
def result(
    stored, factor, low, high, start, index,
    P: tl.constexpr, C: tl.constexpr, SOURCE: tl.constexpr, TARGET: tl.constexpr, NOISY: tl.constexpr,
    INSTRUCTION: tl.constexpr,
):  # fmt: skip
    """What is stored of one element; and the bits of its magnitude."""
    bits = widened(stored, SOURCE)
    magnitude = bits & 0x7FFFFFFF
    if factor is not None:
        bits = as_bits(as_float(bits) * factor)
    drawn = None
    if NOISY:
        drawn = noise(low, high, start, index)
    if C is None:
        made = narrowed(rounded(bits, drawn, P), TARGET)
    elif INSTRUCTION is not None:
        made = converted(bits, INSTRUCTION)
    elif TARGET == "uint8":
        made = coded(bits, drawn, P, C).to(tl.uint8)
    else:
        made = coded(bits, drawn, P, C).to(tl.uint16).to(tl.int16, bitcast=True)
    return made, magnitude


@triton.jit(do_not_specialize=["n", "low", "high", "held"])
def cast(
    x, out, factor, found, n, low, high, held,
    P: tl.constexpr, C: tl.constexpr, SOURCE: tl.constexpr, TARGET: tl.constexpr, NOISY: tl.constexpr,
    INSTRUCTION: tl.constexpr, PACKED: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Write what x, times a factor, is rounded to, or its code; raise `found` to the bits of max |x|."""
    start = tl.program_id(0).to(tl.int64) * B
    index = tl.arange(0, B)
    if NOISY:
        low, high = seed_of(low, high, held)
    times = None
    if factor is not None:
        times = tl.load(factor).to(tl.float32, bitcast=True)
    if start + B <= n:
        stored = tl.load(x + start + index)
        made, magnitude = result(stored, times, low, high, start, index, P, C, SOURCE, TARGET, NOISY, INSTRUCTION)
        put(out, made, start, n, PACKED, True, B)
    else:
        stored = tl.load(x + start + index, mask=start + index < n, other=0)
        made, magnitude = result(stored, times, low, high, start, index, P, C, SOURCE, TARGET, NOISY, INSTRUCTION)
        put(out, made, start, n, PACKED, False, B)
    if found is not None:
        tl.atomic_max(found, tl.max(magnitude.to(tl.int32, bitcast=True)), sem="relaxed")
