"""The weight of an update, and what its master keeps beside it (`quant.masters`): read and written."""

import triton
import triton.language as tl

from halfstep.kernels.gpu.jit.numbers import as_bits, as_float, is_nan, narrowed, nearest_bf16, rounded, widened


@triton.jit
def nearest(number, KIND: tl.constexpr, HALF: tl.constexpr):
    """A float32 rounded to nearest even in KIND, as bits to store; HALF is the `Rounding` to float16."""
    if KIND == "float32":
        return narrowed(as_bits(number), KIND)
    if KIND == "bfloat16":
        return narrowed(nearest_bf16(number), KIND)
    return narrowed(rounded(as_bits(number), None, HALF), KIND)


@triton.jit
def stochastic_bf16(number, random_bits):
    """A float32 rounded stochastically to bfloat16, as bits to store."""
    bits = as_bits(number)
    up = tl.where((bits & 0x7FFFFFFF) == 0x7F800000, bits, bits + (random_bits >> 16))
    return narrowed(tl.where(is_nan(bits), bits | 0x400000, up), "bfloat16")


@triton.jit
def beside(weight, rest):
    """The bits of `rest`, the second bf16 of a weight kept as a sum of two, or 0 where it is too large beside the first
    (`masters.drop_impossible`)."""
    size, part = (weight >> 16) & 0x7FFF, (rest >> 16) & 0x7FFF
    return tl.where(part > tl.where(size > 0x3C0, size, 0x3C0) - 0x380, 0, rest)


@triton.jit
def joined(stored, low):
    """The float32 bits of a rounded upper half plus the signed lower part `low` (int32); of the half alone where that
    is NaN."""
    upper = widened(stored, "bfloat16")
    both = upper + low.to(tl.uint32, bitcast=True)
    return tl.where(is_nan(both), upper, both)


@triton.jit
def whole(stored, kept, MASTER: tl.constexpr, KIND: tl.constexpr, HALF: tl.constexpr):
    """The float32 weight that the rule updates. What the master keeps is used only as far as it fits the weight, which
    may have been written since."""
    own = widened(stored, KIND)
    if MASTER == "fp32":
        bits = widened(kept, "float32")
        image = ~is_nan(bits) & (nearest(as_float(bits), KIND, HALF) == stored)
        own = tl.where(image, bits, own)
    if MASTER == "split":
        own = joined(stored, kept.to(tl.int32))
    if MASTER == "residue":
        own = joined(stored, kept.to(tl.int8, bitcast=True).to(tl.int32) << 8)
    if MASTER == "collage":
        return as_float(own) + as_float(beside(own, widened(kept, "bfloat16")))
    return as_float(own)


@triton.jit
def sum_bf16(one, other):
    """The sum of two bfloat16 values, rounded to the nearest bfloat16; all in float32."""
    return as_float(nearest_bf16(one + other))


@triton.jit
def kept_after(
    updated, full, stored, kept, random_bits, MASTER: tl.constexpr, KIND: tl.constexpr, NOISY: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """The weight and the master's tensor to store, after the rule updated the float32 weight `full` to `updated`."""
    if MASTER == "split":
        bits = as_bits(updated)
        lost = is_nan(bits)  # the payload of a NaN depends on the processor, so it is not kept
        upper, low = tl.where(lost, 0x7FC00000, bits + 0x8000), tl.where(lost, 0, bits)
        return narrowed(upper, "bfloat16"), low.to(tl.uint16).to(tl.int16, bitcast=True)
    elif MASTER == "residue":
        bits = as_bits(updated)
        lost = is_nan(bits)
        bits = bits + ((bits >> 8) & 1) + 0x7F  # 24 bits, to nearest, ties to even
        upper, low = tl.where(lost, 0x7FC00000, bits + 0x8000), tl.where(lost, 0, bits >> 8)
        return narrowed(upper, "bfloat16"), low.to(tl.uint8)
    elif MASTER == "kahan":
        rest = as_float(beside(widened(stored, KIND), widened(kept, KIND)))
        rest = sum_bf16(rest, as_float(nearest_bf16(updated - full)))
        grown = sum_bf16(full, rest)
        rest = sum_bf16(rest, as_float(nearest_bf16(full - grown)))
        return narrowed(as_bits(grown), KIND), narrowed(as_bits(rest), KIND)
    elif MASTER == "collage":
        high = as_float(widened(stored, KIND))
        rest = as_float(beside(as_bits(high), widened(kept, KIND)))
        wanted = as_float(nearest_bf16(updated - full))
        total = sum_bf16(high, wanted)
        rest = sum_bf16(rest, as_float(nearest_bf16(wanted - as_float(nearest_bf16(total - high)))))
        grown = sum_bf16(total, rest)
        rest = as_float(nearest_bf16(rest - as_float(nearest_bf16(grown - total))))
        return narrowed(as_bits(grown), KIND), narrowed(as_bits(rest), KIND)
    elif NOISY:
        return stochastic_bf16(updated, random_bits), kept
    elif MASTER == "fp32":
        return nearest(updated, KIND, HALF), narrowed(as_bits(updated), "float32")
    else:
        return nearest(updated, KIND, HALF), kept
