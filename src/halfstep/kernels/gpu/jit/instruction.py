"""E4M3 and E5M2 codes, and back, by the instructions that Ada, Hopper and Blackwell have; no interpreter runs them.

To codes it rounds to nearest, ties to even, and saturates, infinities too. What it makes of NaN is one code without a
sign: the signs are put in their place here, as `quant.encode` keeps them, and E5M2's NaN is made 0x7E.
"""

import triton
import triton.language as tl


# The sign of a code is its number's, NaN's too: of four numbers the upper bytes are gathered for it.
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

# No finite code has all five bits of its exponent set: adding 4 to a byte carries into its upper bit for NaN alone.
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

# Every number of both formats is one of float16, exactly.
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
    """The float32s of codes in a byte each; NaN is any NaN."""
    text: tl.constexpr = _E4M3_VALUES if KIND == "e4m3" else _E5M2_VALUES
    return tl.inline_asm_elementwise(text, "=r,=r,=r,=r,r", [code], dtype=tl.float32, is_pure=True, pack=4)


@triton.jit
def converted(bits, KIND: tl.constexpr):
    """The codes of float32 bits, in a byte each: KIND is e4m3 or e5m2."""
    text: tl.constexpr = _E4M3 if KIND == "e4m3" else _E5M2
    return tl.inline_asm_elementwise(text, "=r,r,r,r,r", [bits], dtype=tl.uint8, is_pure=True, pack=4)


# Of numbers that are no NaN; 0 where the mask is.
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
    """The codes of float32 bits, in a byte each, by masks in a byte each: only where one is 0 may there be NaN."""
    text: tl.constexpr = _E4M3_NUMBERS if KIND == "e4m3" else _E5M2_NUMBERS
    return tl.inline_asm_elementwise(text, "=r,r,r,r,r,r", [bits, keep], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def words_converted(a, b, c, d, keep, KIND: tl.constexpr):
    """The same of four numbers and a mask of a word: a word, the first one's code lowest."""
    text: tl.constexpr = _E4M3_NUMBERS if KIND == "e4m3" else _E5M2_NUMBERS
    return tl.inline_asm_elementwise(text, "=r,r,r,r,r,r", [a, b, c, d, keep], dtype=tl.uint32, is_pure=True, pack=1)


_LARGER: tl.constexpr = tl.constexpr("max.NaN.xorsign.abs.KINDx2 $0, $1, $2;")
_LARGER_BF16: tl.constexpr = tl.constexpr(_LARGER.value.replace("KIND", "bf16"))
_LARGER_FP16: tl.constexpr = tl.constexpr(_LARGER.value.replace("KIND", "f16"))


@triton.jit
def larger(a, b, SOURCE: tl.constexpr):
    """Of two tensors of bf16 or fp16, as int16, the numbers of larger magnitude, with any sign; NaN where one is."""
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
    """The float32 bits of bf16 or fp16, as int16; NaN is any NaN."""
    text: tl.constexpr = _WIDE_BF16 if SOURCE == "bfloat16" else _WIDE_FP16
    return tl.inline_asm_elementwise(text, "=r,=r,r", [stored], dtype=tl.uint32, is_pure=True, pack=2)
