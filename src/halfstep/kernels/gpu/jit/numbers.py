"""Floats as bits: widening to float32, rounding, encoding; and the noise of stochastic rounding.

A value is represented by its float32 bits, as uint32. `P` and `C` are `kernels.cpu.elements.Rounding` and
`element_codes.Coding`, constants of the compiled kernel.
"""

import triton
import triton.language as tl


@triton.jit
def widened(stored, KIND: tl.constexpr):
    """The float32 bits of values that an integer pointer to dtype KIND loaded."""
    if KIND == "float32":
        bits = stored.to(tl.uint32, bitcast=True)
    else:
        bits = stored.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        if KIND == "float16":
            magnitude = (bits & 0x7FFFFFFF) >> 3
            number = as_bits(as_float(magnitude) * 5.192296858534828e33)  # 2^112; correct for subnormals too
            bits = tl.where(magnitude >= 0x0F800000, magnitude | 0x7F800000, number) | (bits & 0x80000000)
    return bits


@triton.jit
def narrowed(bits, KIND: tl.constexpr):
    """Float32 bits whose value is exact in dtype KIND, as bits to store; NaN stays NaN."""
    if KIND == "float32":
        stored = bits.to(tl.int32, bitcast=True)
    else:
        if KIND == "float16":
            magnitude = bits & 0x7FFFFFFF
            number = as_bits(as_float(magnitude) * 1.925929944387236e-34) << 3  # 2^-112
            special = (magnitude << 3) & 0x7FFFFFFF
            bits = tl.where(magnitude >= 0x7F800000, special, number) | (bits & 0x80000000)
        stored = (bits >> 16).to(tl.uint16).to(tl.int16, bitcast=True)
    return stored


@triton.jit
def as_float(bits):
    """The float32 with these bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def as_bits(number):
    """The bits of a float32."""
    return number.to(tl.uint32, bitcast=True)


@triton.jit
def constant(BITS: tl.constexpr):
    """The float32 of constant bits."""
    return tl.full((), BITS, tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def nearest_bf16(number):
    """The bits of a float32 rounded to the nearest bfloat16. NaN is quiet, so its upper half is NaN too."""
    bits = as_bits(number)
    return tl.where(is_nan(bits), bits, bits + ((bits >> 16) & 1) + 0x7FFF) & 0xFFFF0000


@triton.jit
def read(place, inside):
    """Load; 0 where not `inside`, which is None for no mask."""
    return tl.load(place, mask=inside, other=None if inside is None else 0)


@triton.jit
def held(number):
    """A float32 clamped to the finite range; NaN stays NaN."""
    number = tl.where(number > 3.4028234663852886e38, 3.4028234663852886e38, number)
    return tl.where(number < -3.4028234663852886e38, -3.4028234663852886e38, number)


@triton.jit
def is_nan(bits):
    """Whether float32 bits are those of a NaN."""
    return (bits & 0x7FFFFFFF) > 0x7F800000


# ---- rounding --------------------------------------------------------------------------------------------------------


@triton.jit
def rounded(bits, noise, P: tl.constexpr):
    """Float32 bits rounded (`kernels.cpu.elements.rounded`): with noise, in the direction of P.add, or to nearest
    even."""
    magnitude = bits & 0x7FFFFFFF
    if noise is None and P.add is None:
        on_bits = magnitude + P.half + ((magnitude >> P.shift) & P.odd)
        fixed = as_bits((as_float(magnitude) + constant(P.magic)) - constant(P.magic))
    else:
        on_bits, steps = noisy(bits, magnitude, noise, P)
        fixed = as_bits(steps * constant(P.step))
    kept: tl.constexpr = 0xFFFFFFFF >> P.shift << P.shift
    result = tl.where(magnitude < P.min_normal, fixed, on_bits & kept)
    if P.zero_sign is None:
        result = tl.where(result > P.largest, P.over, result)
        result = tl.where(magnitude > P.nan_above, 0x7FC00000, result) | (bits & 0x80000000)
    else:
        negative = bits > 0x7FFFFFFF
        over = tl.where(negative, P.over_negative, P.over)
        result = tl.where(result > tl.where(negative, P.largest_negative, P.largest), over, result)
        result = tl.where(magnitude == 0x7F800000, tl.where(negative, P.infinite_negative, P.infinite), result)
        result = tl.where(magnitude > P.nan_above, 0x7FC00000, result)
        result |= tl.where(result == 0, bits & P.zero_sign, bits & 0x80000000)
    return result


@triton.jit
def noisy(bits, magnitude, noise, P: tl.constexpr):
    """The bits with rounding's carry added, and the number of fixed steps, as a float (`elements.noisy_both`)."""
    steps = as_float(magnitude) * constant(P.scale)
    if P.zero_sign is not None:
        steps = tl.minimum(steps, 8388608.0)
    whole = steps.to(tl.int32).to(tl.float32)
    rest = steps - whole
    remainder = (rest * 4294967296.0).to(tl.uint32)
    if noise is None:
        noise = tl.where(bits > 0x7FFFFFFF, P.add_negative, P.add).to(tl.uint32)
        unseen = (whole <= 0.0) & (magnitude > 0)
        remainder = remainder | (rest > 0.0).to(tl.uint32) | unseen.to(tl.uint32)
    whole = tl.where(remainder + noise < remainder, whole + 1.0, whole)
    return magnitude + (noise >> (32 - P.shift)), whole


@triton.jit
def coded(bits, noise, P: tl.constexpr, C: tl.constexpr):
    """The code of float32 bits after rounding (`kernels.cpu.element_codes.encoded`), 32 bits each."""
    magnitude = bits & 0x7FFFFFFF
    if noise is None and P.add is None:
        on_bits = magnitude + P.half + ((magnitude >> P.shift) & P.odd)
        fixed = as_bits(as_float(magnitude) + constant(P.magic)) - P.magic
    else:
        on_bits, steps = noisy(bits, magnitude, noise, P)
        fixed = steps.to(tl.int32).to(tl.uint32, bitcast=True)
    code = tl.where(magnitude < P.min_normal, fixed, (on_bits >> P.shift) - C.bias)
    sign = (bits & 0x80000000) >> C.sign_shift
    if C.complement is None:
        code = tl.where(code > C.largest, C.over, code)
        if P.nan_above is not None:
            code = tl.where(magnitude > P.nan_above, C.nan, code)
        code |= sign
    else:
        negative = bits > 0x7FFFFFFF
        over = tl.where(negative, C.over_negative, C.over)
        code = tl.where(code > tl.where(negative, C.largest_negative, C.largest), over, code)
        if P.nan_above is not None:
            code = tl.where(magnitude == 0x7F800000, tl.where(negative, C.infinite_negative, C.infinite), code)
            code = tl.where(magnitude > P.nan_above, C.nan, code)
        if C.complement:
            code = tl.where(negative, 0 - code, code) & C.complement
        else:
            code |= tl.where(code == 0, (bits & P.zero_sign) >> C.sign_shift, sign)
    return code


@triton.jit
def decoded(code, D: tl.constexpr):
    """The float32 bits of a code of 32 bits (`kernels.cpu.element_codes.decoded`)."""
    most: tl.constexpr = 0x7FFFFFFF >> D.sign_shift
    at_top = code << D.sign_shift
    if D.offset > 0 and D.offset < 0x40000000 and D.sign_shift >= D.shift:
        # The code's bits shifted into a float32 are its value divided by a power of two, for subnormals too.
        apart = (at_top.to(tl.int32, bitcast=True) >> (D.sign_shift - D.shift)).to(tl.uint32, bitcast=True)
        value = as_bits(as_float(apart & (0x80000000 | most << D.shift)) * constant(D.offset + 0x3F800000))
        beyond = (value & 0x7FFFFFFF) > (D.largest << D.shift) + D.offset
        past = (value & 0x7FFFFFFF) > (D.largest + 1 << D.shift) + D.offset
    else:
        magnitude = code & most
        fixed = as_bits(magnitude.to(tl.float32) * constant(D.step))
        value = tl.where(magnitude < D.min_normal, fixed, (magnitude << D.shift) + D.offset) | (at_top & 0x80000000)
        beyond, past = magnitude > D.largest, magnitude > D.largest + 1
    if D.over == 0x7FC00000 and D.largest < most:
        value = tl.where(beyond, 0x7FC00000, value)
    elif D.largest < most:
        value = tl.where(beyond, D.over | (at_top & 0x80000000), value)
        value = tl.where(past, 0x7FC00000, value)
    if D.nan <= 2 * most + 1:
        value = tl.where(code == D.nan, 0x7FC00000, value)
    return value.to(tl.uint32)


# ---- noise -----------------------------------------------------------------------------------------------------------


@triton.jit
def mix(x):
    """The integer hash lowbias32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def seed_of(low, high, held):
    """The halves of a seed from `gpu.halves`: low and high themselves, or, if `held`, those of the seed at that
    address."""
    address = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    there = held != 0
    seed = tl.load(address.to(tl.pointer_type(tl.int64)), mask=there, other=0)
    return tl.where(there, seed.to(tl.int32), low), tl.where(there, (seed >> 32).to(tl.int32), high)


@triton.jit
def noise_keys(low, high, chunk):
    """The two keys of a chunk's noise (`quant.rounding.noise_keys`), from a seed's signed halves and the chunk as
    int64."""
    golden = tl.full((), 0x9E3779B9, tl.uint32)
    base = mix(low.to(tl.uint32, bitcast=True) + golden)
    left = mix(base ^ (chunk & 0xFFFFFFFF).to(tl.uint32))
    one = mix(left + mix(base ^ high.to(tl.uint32, bitcast=True)) + (chunk >> 32).to(tl.uint32) * golden)
    return one, mix(one ^ left)


@triton.jit
def noise_by(one, two, index):
    """32 bits of noise from a chunk's keys, for elements at these indices in it."""
    x = one + index.to(tl.uint32)
    x = ((x ^ (x >> 16)) * 0x7FEB352D) ^ two
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def noise(low, high, start, index):
    """32 bits of noise (`quant.noise_bits`) for the elements `start + index`: `start` an int64 multiple of the block's
    size, which divides 2^14, `index` int32s below that size."""
    one, two = noise_keys(low, high, start >> 14)
    return noise_by(one, two, (start & 0x3FFF).to(tl.uint32) + index.to(tl.uint32))


@triton.jit
def noise_anywhere(low, high, place):
    """The same noise for elements at any int64 indices (`quant.rounding.noise_at`)."""
    one, two = noise_keys(low, high, place >> 14)
    return noise_by(one, two, place & 0x3FFF)


@triton.jit
def splitmix(state, key):
    """One step of `quant.derive_seed`, on uint64: mix one key into the state, which starts at 0."""
    state = (state ^ key) + 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)
