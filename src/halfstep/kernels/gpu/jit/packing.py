"""A block of a flat tensor's codes, put where they lie and taken from there: 4- and 6-bit ones packed (`quant.pack`).

`PACKED` is None for codes in a container each, else the shifts of `kernels.cpu.packing.shifts`: the places of two
codes in a byte, or three numbers where four codes lie in three bytes. `FULL` blocks are not masked.
"""

import triton
import triton.language as tl


@triton.jit
def put(out, made, start, n, PACKED: tl.constexpr, FULL: tl.constexpr, B: tl.constexpr):
    """Store B codes, or values, from the element `start` on."""
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
            if FULL:
                tl.store(place + byte, (word >> (8 * byte)).to(tl.uint8))
            else:
                tl.store(place + byte, (word >> (8 * byte)).to(tl.uint8), mask=index < (n - start) // 4)


@triton.jit
def put_numbers(place, made, rest, FULL: tl.constexpr, B: tl.constexpr):
    """Store B numbers, or the first `rest` of them."""
    index = tl.arange(0, B)
    if FULL:
        tl.store(place + index, made)
    else:
        tl.store(place + index, made, mask=index < rest)


@triton.jit
def taken(codes, start, n, PACKED: tl.constexpr, FULL: tl.constexpr, B: tl.constexpr):
    """B codes from the element `start` on, 32 bits wide."""
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
            if FULL:
                word |= tl.load(place + byte).to(tl.uint32) << (8 * byte)
            else:
                word |= tl.load(place + byte, mask=index < (n - start) // 4, other=0).to(tl.uint32) << (8 * byte)
        even = tl.interleave(word & 63, (word >> 12) & 63)
        odd = tl.interleave((word >> 6) & 63, word >> 18)
        code = tl.interleave(even, odd)
    return code


@triton.jit
def taken_numbers(place, rest, FULL: tl.constexpr, B: tl.constexpr):
    """B bytes or 16-bit integers, or the first `rest` of them and zeros, 32 bits wide."""
    index = tl.arange(0, B)
    stored = tl.load(place + index) if FULL else tl.load(place + index, mask=index < rest, other=0)
    if stored.dtype == tl.int16:
        stored = stored.to(tl.uint16, bitcast=True)
    return stored.to(tl.uint32)
