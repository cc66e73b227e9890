"""Seeds that follow from a key and from a tensor's numbers: `kernels.seeds`, in one program."""

import triton
import triton.language as tl

from halfstep.kernels.gpu.jit.numbers import splitmix


@triton.jit(do_not_specialize=["taken", "c1", "c2", "c3", "s0", "s1", "s2", "s3"])
def seeds(
    x, key, out, taken, c1, c2, c3, s0, s1, s2, s3,
    COUNT: tl.constexpr, ROOM: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Write COUNT seeds, of `taken` elements that lie s0 ... s3 apart, c1 ... c3 along the last three dimensions."""
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
