"""Conversion to and from E4M3 and E5M2 by PTX instructions of Ada, Hopper and Blackwell; no interpreter runs them.

They round to nearest even and saturate, infinities too. They give NaN one code without a sign: here the sign of the
input is restored, as in `quant.encode`, and E5M2's NaN becomes 0x7E.
"""

import triton
import triton.language as tl


# The sign of a code, NaN's too, is that of its input: the upper bytes of four inputs are gathered for it.
_E4M3: tl.constexpr = tl.constexpr("""{
    .reg .b16 low, high;
    .reg .b32 code, sign, other;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 code, {low, high};
    prmt.b32 sign, $1, $2, 0x0073;
    prmt.b32 other, $3, $4, 0x7300;
    prmt.b32 sign, sign, other, 0x7610;
    lop3.b32 $0, code, sign, 0x80808080, 0xF8;
}""")

# No finite code has all five exponent bits set: adding 4 to a byte carries into its upper bit for NaN alone.
_E5M2: tl.constexpr = tl.constexpr("""{
    .reg .b16 low, high;
    .reg .b32 code, sign, other;
    cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
    cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
    mov.b32 code, {low, high};
    and.b32 other, code, 0x7F7F7F7F;
    add.u32 other, other, 0x04040404;
    shr.u32 other, other, 7;
    lop3.b32 code, code, other, 0x01010101, 0x70;
    prmt.b32 sign, $1, $2, 0x0073;
    prmt.b32 other, $3, $4, 0x7300;
    prmt.b32 sign, sign, other, 0x7610;
    lop3.b32 $0, code, sign, 0x80808080, 0xF8;
}""")

# Both formats are exact subsets of float16.
_VALUES: tl.constexpr = tl.constexpr("""{
    .reg .b16 low, high, one, two;
    .reg .b32 pair;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.KINDx2 pair, low;
    mov.b32 {one, two}, pair;
    cvt.f32.f16 $0, one;
    cvt.f32.f16 $1, two;
    cvt.rn.f16x2.KINDx2 pair, high;
    mov.b32 {one, two}, pair;
    cvt.f32.f16 $2, one;
    cvt.f32.f16 $3, two;
}""")
_E4M3_VALUES: tl.constexpr = tl.constexpr(_VALUES.value.replace("KIND", "e4m3"))
_E5M2_VALUES: tl.constexpr = tl.constexpr(_VALUES.value.replace("KIND", "e5m2"))


@triton.jit
def unconverted(code, KIND: tl.constexpr):
    """The float32 values of one-byte codes; NaN may have any payload."""
    text: tl.constexpr = _E4M3_VALUES if KIND == "e4m3" else _E5M2_VALUES
    return tl.inline_asm_elementwise(text, "=r,=r,=r,=r,r", [code], dtype=tl.float32, is_pure=True, pack=4)


@triton.jit
def converted(bits, KIND: tl.constexpr):
    """The one-byte codes of float32 bits; KIND is e4m3 or e5m2."""
    text: tl.constexpr = _E4M3 if KIND == "e4m3" else _E5M2
    return tl.inline_asm_elementwise(text, "=r,r,r,r,r", [bits], dtype=tl.uint8, is_pure=True, pack=4)


# Without handling of NaN; 0 where the mask is 0.
_NUMBERS: tl.constexpr = tl.constexpr("""{
    .reg .b16 low, high;
    .reg .b32 code;
    cvt.rn.satfinite.KINDx2.f32 low, $2, $1;
    cvt.rn.satfinite.KINDx2.f32 high, $4, $3;
    mov.b32 code, {low, high};
    and.b32 $0, code, $5;
}""")
_E4M3_NUMBERS: tl.constexpr = tl.constexpr(_NUMBERS.value.replace("KIND", "e4m3"))
_E5M2_NUMBERS: tl.constexpr = tl.constexpr(_NUMBERS.value.replace("KIND", "e5m2"))


@triton.jit
def numbers_converted(bits, keep, KIND: tl.constexpr):
    """The one-byte codes of float32 bits, ANDed with the byte mask `keep`: bits may be NaN only where it is 0."""
    text: tl.constexpr = _E4M3_NUMBERS if KIND == "e4m3" else _E5M2_NUMBERS
    return tl.inline_asm_elementwise(text, "=r,r,r,r,r,r", [bits, keep], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def words_converted(a, b, c, d, keep, KIND: tl.constexpr):
    """`numbers_converted` of four tensors with a 32-bit mask, as one word each, with the code of `a` lowest."""
    text: tl.constexpr = _E4M3_NUMBERS if KIND == "e4m3" else _E5M2_NUMBERS
    return tl.inline_asm_elementwise(text, "=r,r,r,r,r,r", [a, b, c, d, keep], dtype=tl.uint32, is_pure=True, pack=1)


_LARGER: tl.constexpr = tl.constexpr("max.NaN.xorsign.abs.KINDx2 $0, $1, $2;")
_LARGER_BF16: tl.constexpr = tl.constexpr(_LARGER.value.replace("KIND", "bf16"))
_LARGER_FP16: tl.constexpr = tl.constexpr(_LARGER.value.replace("KIND", "f16"))


@triton.jit
def larger(a, b, SOURCE: tl.constexpr):
    """Elementwise, the value of larger magnitude of two bf16 or fp16 tensors (as int16), with any sign; NaN where one
    is NaN."""
    text: tl.constexpr = _LARGER_BF16 if SOURCE == "bfloat16" else _LARGER_FP16
    return tl.inline_asm_elementwise(text, "=r,r,r", [a, b], dtype=tl.int16, is_pure=True, pack=2)


_WIDE_BF16: tl.constexpr = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;")
_WIDE_FP16: tl.constexpr = tl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.f32.f16 $0, low;
    cvt.f32.f16 $1, high;
}""")


@triton.jit
def pairs_widened(stored, SOURCE: tl.constexpr):
    """The float32 bits of bf16 or fp16 tensors (as int16); NaN may have any payload."""
    text: tl.constexpr = _WIDE_BF16 if SOURCE == "bfloat16" else _WIDE_FP16
    return tl.inline_asm_elementwise(text, "=r,=r,r", [stored], dtype=tl.uint32, is_pure=True, pack=2)
