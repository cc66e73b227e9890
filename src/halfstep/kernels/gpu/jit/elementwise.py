"""Elementwise kernels over flat tensors: rounding, encoding, decoding, scaling a matmul's result, amax, seeds.

`PACKED` is None for unpacked codes, else the result of `kernels.cpu.codes.shifts`: two shifts for two codes in a byte,
or three numbers for four codes in three bytes (`quant.pack`). A `FULL` block is stored without a mask.
"""

import triton
import triton.language as tl

from halfstep.kernels.gpu.jit.instruction import converted
from halfstep.kernels.gpu.jit.masters import nearest
from halfstep.kernels.gpu.jit.numbers import (
    as_bits,
    as_float,
    coded,
    constant,
    decoded,
    narrowed,
    noise,
    read,
    rounded,
    seed_of,
    splitmix,
    widened,
)


# ---- blocks of codes -------------------------------------------------------------------------------------------------


@triton.jit
def put(out, made, start, n, PACKED: tl.constexpr, FULL: tl.constexpr, B: tl.constexpr):
    """Store B codes, packed, or values, from element `start` on."""
    if PACKED is None:
        put_numbers(out + start, made, n - start, FULL, B)
    elif len(PACKED) == 2:
        one, two = tl.split(tl.reshape(made, (B // 2, 2)))
        put_numbers(out + start // 2, (one << PACKED[0]) | (two << PACKED[1]), (n - start) // 2, FULL, B // 2)
    else:
        even, odd = tl.split(tl.reshape(made.to(tl.uint32), (B // 2, 2)))
        one, two = tl.split(tl.reshape(even | (odd << 6), (B // 4, 2)))
        word, index = one | (two << 12), tl.arange(0, B // 4)
        place = out + start // 4 * 3 + 3 * index
        for byte in tl.static_range(3):
            inside = None if FULL else index < (n - start) // 4
            tl.store(place + byte, (word >> (8 * byte)).to(tl.uint8), mask=inside)


@triton.jit
def put_numbers(place, made, rest, FULL: tl.constexpr, B: tl.constexpr):
    """Store B values, or only the first `rest` of them."""
    index = tl.arange(0, B)
    tl.store(place + index, made, mask=None if FULL else index < rest)


@triton.jit
def taken(codes, start, n, PACKED: tl.constexpr, FULL: tl.constexpr, B: tl.constexpr):
    """Load B codes from element `start` on, unpacked to 32 bits each."""
    if PACKED is None:
        code = taken_numbers(codes + start, n - start, FULL, B)
    elif len(PACKED) == 2:
        byte = taken_numbers(codes + start // 2, (n - start) // 2, FULL, B // 2)
        code = tl.interleave((byte >> PACKED[0]) & 15, (byte >> PACKED[1]) & 15)
    else:
        index = tl.arange(0, B // 4)
        place = codes + start // 4 * 3 + 3 * index
        word = tl.zeros((B // 4,), tl.uint32)
        for byte in tl.static_range(3):
            word |= read(place + byte, None if FULL else index < (n - start) // 4).to(tl.uint32) << (8 * byte)
        even = tl.interleave(word & 63, (word >> 12) & 63)
        odd = tl.interleave((word >> 6) & 63, word >> 18)
        code = tl.interleave(even, odd)
    return code


@triton.jit
def taken_numbers(place, rest, FULL: tl.constexpr, B: tl.constexpr):
    """Load B bytes or 16-bit integers as 32 bits each; zeros beyond the first `rest`."""
    index = tl.arange(0, B)
    stored = read(place + index, None if FULL else index < rest)
    if stored.dtype == tl.int16:
        stored = stored.to(tl.uint16, bitcast=True)
    return stored.to(tl.uint32)


@triton.jit
def kept_code(code, TARGET: tl.constexpr):
    """32-bit codes converted to the type of TARGET's integer pointer."""
    if TARGET == "uint8":
        return code.to(tl.uint8)
    elif TARGET == "uint16":
        return code.to(tl.uint16).to(tl.int16, bitcast=True)
    else:
        return code.to(tl.int32, bitcast=True)


# ---- rounding and encoding, which also find the amax -----------------------------------------------------------------


@triton.jit
def result(
    stored, factor, low, high, start, index,
    P: tl.constexpr, C: tl.constexpr, SOURCE: tl.constexpr, TARGET: tl.constexpr, NOISY: tl.constexpr,
    INSTRUCTION: tl.constexpr,
):  # fmt: skip
    """The rounded value or code to store for one element; and the bits of the input's magnitude."""
    bits = widened(stored, SOURCE)
    magnitude = bits & 0x7FFFFFFF
    if factor is not None:
        bits = as_bits(as_float(bits) * factor)
    random_bits = noise(low, high, start, index) if NOISY else None
    if C is None:
        made = narrowed(rounded(bits, random_bits, P), TARGET)
    elif INSTRUCTION is not None:
        made = converted(bits, INSTRUCTION)
    else:
        made = kept_code(coded(bits, random_bits, P, C), TARGET)
    return made, magnitude


@triton.jit(do_not_specialize=["n", "low", "high", "held"])
def cast(
    x, out, factor, found, n, low, high, held,
    P: tl.constexpr, C: tl.constexpr, SOURCE: tl.constexpr, TARGET: tl.constexpr, NOISY: tl.constexpr,
    INSTRUCTION: tl.constexpr, PACKED: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Write x * factor, rounded, or its codes, to `out`; raise `found` to the bits of max |x|."""
    start = tl.program_id(0).to(tl.int64) * B
    index = tl.arange(0, B)
    if NOISY:
        low, high = seed_of(low, high, held)
    times = None if factor is None else tl.load(factor).to(tl.float32, bitcast=True)
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


# ---- decoding, by arithmetic or from a table, which also finds the largest code --------------------------------------


@triton.jit
def stored_value(code, table, last, D: tl.constexpr, WHOLE: tl.constexpr, TARGET: tl.constexpr):
    """The value to store for a code of 32 bits; `WHOLE`: the format is an integer format."""
    if D is None:
        made = tl.load(table + tl.minimum(code.to(tl.int32, bitcast=True), last))
    elif WHOLE:
        number = (code << D[0]).to(tl.int32, bitcast=True) >> D[0]
        made = narrowed(as_bits(number.to(tl.float32) * constant(D[1])), TARGET)
    else:
        made = narrowed(decoded(code, D), TARGET)
    return made


@triton.jit(do_not_specialize=["n", "last"])
def decode(
    codes, out, table, found, n, last,
    D: tl.constexpr, WHOLE: tl.constexpr, TARGET: tl.constexpr, PACKED: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Write the values of codes; raise `found` to the largest code. The table holds the values of codes up to
    `last`."""
    start = tl.program_id(0).to(tl.int64) * B
    if start + B <= n:
        code = taken(codes, start, n, PACKED, True, B)
        put_numbers(out + start, stored_value(code, table, last, D, WHOLE, TARGET), n - start, True, B)
    else:
        code = taken(codes, start, n, PACKED, False, B)
        put_numbers(out + start, stored_value(code, table, last, D, WHOLE, TARGET), n - start, False, B)
    if found is not None:
        tl.atomic_max(found, tl.max(code.to(tl.int32, bitcast=True)), sem="relaxed")


# ---- posits (`kernels.cpu.posit`) ------------------------------------------------------------------------------------


# `P` is a `Cutting`, a constant of the kernel. d, the exponent and significand of a float32 minus the bias, is signed:
# its upper bits are the regime.


@triton.jit
def cut_at(d, P: tl.constexpr):
    """How many low bits of d are dropped, and its regime, counted from 0 on either side of 1."""
    signed = d.to(tl.int32, bitcast=True)
    regime = ((signed >> P.regime_shift) ^ (signed >> 31)).to(tl.uint32, bitcast=True)
    return tl.minimum(regime + P.base, P.regime_shift).to(tl.uint32), regime


@triton.jit
def posit_rounded(magnitude, P: tl.constexpr):
    """The rounded d of a magnitude, treated as if it were nonzero."""
    d = tl.maximum(tl.minimum(magnitude, P.largest), P.smallest).to(tl.uint32) - 0x3F800000
    cut, _ = cut_at(d, P)
    # Where the cut is at the regime, the last bit of the code is the one that ends it: 0 after ones, 1 after zeros.
    odd = tl.where(cut < P.regime_shift, (d >> cut) & 1, d >> 31)
    one = tl.full(d.shape, 1, tl.uint32) << cut
    return (d + (one >> 1) + odd - 1) & (0 - one)


@triton.jit
def posit_value(bits, P: tl.constexpr):
    """The float32 bits of the nearest posit; NaN for infinities."""
    magnitude = bits & 0x7FFFFFFF
    value = (posit_rounded(magnitude, P) + 0x3F800000) | (bits & 0x80000000)
    value = tl.where(magnitude == 0, 0, value)
    return tl.where(magnitude >= 0x7F800000, 0x7FC00000, value).to(tl.uint32)


@triton.jit
def posit_code(bits, P: tl.constexpr):
    """The code of the nearest posit, 32 bits each."""
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
    """The value or code to store for one element, as TARGET says."""
    bits = widened(stored, SOURCE)
    coded: tl.constexpr = TARGET == "uint8" or TARGET == "uint16" or TARGET == "uint32"
    return kept_code(posit_code(bits, P), TARGET) if coded else narrowed(posit_value(bits, P), TARGET)


@triton.jit(do_not_specialize=["n"])
def posit(x, out, n, P: tl.constexpr, SOURCE: tl.constexpr, TARGET: tl.constexpr, B: tl.constexpr):
    """Write the nearest posits of x, or their codes, to `out`."""
    start = tl.program_id(0).to(tl.int64) * B
    index = tl.arange(0, B)
    if start + B <= n:
        put_numbers(out + start, posit_of(tl.load(x + start + index), P, SOURCE, TARGET), n - start, True, B)
    else:
        stored = tl.load(x + start + index, mask=start + index < n, other=0)
        put_numbers(out + start, posit_of(stored, P, SOURCE, TARGET), n - start, False, B)


# ---- a matmul's float32 result times a scale, plus a bias, rounded to a 16-bit dtype ---------------------------------


@triton.jit(do_not_specialize=["n", "columns"])
def finish(product, scale, bias, out, n, columns, TARGET: tl.constexpr, HALF: tl.constexpr, B: tl.constexpr):
    """Write `product * scale + bias`, rounded, for one block of the flat result; `columns` is the length of the
    bias."""
    start = tl.program_id(0).to(tl.int64) * B
    if start + B <= n:
        finish_block(product + start, scale, bias, out + start, start, None, columns, TARGET, HALF, B)
    else:
        inside = start + tl.arange(0, B) < n
        finish_block(product + start, scale, bias, out + start, start, inside, columns, TARGET, HALF, B)


@triton.jit
def finish_block(
    product, scale, bias, out, start, inside, columns, TARGET: tl.constexpr, HALF: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """One block, whose pointers are at its first element, element `start` of the result."""
    index = tl.arange(0, B)
    number = as_float(read(product + index, inside).to(tl.uint32, bitcast=True)) * tl.load(scale)
    if bias is not None:
        column = (start % columns).to(tl.int32) + index
        if columns >= B:
            column = tl.where(column >= columns, column - columns, column)
        else:
            column = column % columns
        number = number + as_float(widened(tl.load(bias + column), TARGET))
    tl.store(out + index, nearest(number, TARGET, HALF), mask=inside)


# ---- amax, by comparing bits as integers, so that NaN is the largest -------------------------------------------------


@triton.jit(do_not_specialize=["n"])
def largest(x, found, unless, n, SOURCE: tl.constexpr, PART: tl.constexpr, B: tl.constexpr):
    """Raise `found` to the float32 bits of max |x|; where the value at `unless` is not 0, do not read x."""
    if unless is None:
        raised(x, found, n, SOURCE, PART, B)
    else:
        if (tl.load(unless) & 0x7FFFFFFF) == 0:
            raised(x, found, n, SOURCE, PART, B)


@triton.jit
def raised(x, found, n, SOURCE: tl.constexpr, PART: tl.constexpr, B: tl.constexpr):
    """Raise `found` by one block, read in parts of PART elements."""
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
    """The loaded bits without their sign, as int32."""
    return stored & 0x7FFFFFFF if SOURCE == "float32" else (stored & 0x7FFF).to(tl.int32)


# ---- seeds hashed from a key and a tensor's values (`kernels.operator`), in one program ------------------------------


@triton.jit(do_not_specialize=["taken", "c1", "c2", "c3", "s0", "s1", "s2", "s3"])
def seeds(
    x, key, out, taken, c1, c2, c3, s0, s1, s2, s3,
    COUNT: tl.constexpr, ROOM: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Write COUNT seeds, hashed from `taken` elements: c1, c2, c3 of them along the last three dimensions, with strides
    s0 to s3."""
    total = tl.zeros((B,), tl.uint64)
    for start in range(0, taken, B):
        place = start + tl.arange(0, B)
        rest = place // c3
        upper = rest // c2
        offset = (place % c3).to(tl.int64) * s3 + (rest % c2).to(tl.int64) * s2
        offset += (upper % c1).to(tl.int64) * s1 + (upper // c1).to(tl.int64) * s0
        bits = tl.load(x + offset, mask=place < taken, other=0).to(tl.int64).to(tl.uint64, bitcast=True)
        total += bits * (place.to(tl.uint64) * 0xAF251AF3B0F025B5 | 1)
    steps = tl.load(key + 1).to(tl.uint64, bitcast=True)
    state = tl.sum(total) + tl.load(key).to(tl.uint64, bitcast=True) + steps * 0xD1342543DE82EF95
    at = tl.arange(0, ROOM)
    number = splitmix(state + at.to(tl.uint64) * 0x9E3779B97F4A7C15, 0)
    tl.store(out + at, number.to(tl.int64, bitcast=True), mask=at < COUNT)
