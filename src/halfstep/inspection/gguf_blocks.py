"""GGUF's block types: decoders from the bytes of a block to float32 values.

A block has a few scales and the codes of 32 or 256 values. Every decoder maps (blocks, bytes) to (blocks, values). The
IQ types of 1 to 3 bits are rows of codebooks, with signs or an offset, times scales of 4 or 3 bits. Source: ggml,
ggml-common.h (the layouts) and ggml-quants.c (dequantize_row_...).
"""

from base64 import b85decode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class BlockType:
    """A block type of GGUF: `values` values in `nbytes` bytes. Without a decoder its tensors are listed, but not
    read."""

    name: str
    values: int
    nbytes: int
    decode: Callable[[Bytes], Floats] | None = None


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block, as a column of float32."""
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)


def _nibbles(codes: Bytes, width: int) -> Bytes:
    """4-bit codes: for each group of `width` bytes first the low halves, then the high ones."""
    groups = codes.reshape(len(codes), -1, 1, width)
    return np.concatenate([groups & 15, groups >> 4], axis=2).reshape(len(codes), -1)


def _fields(codes: Bytes, width: int, bits: int, count: int) -> Bytes:
    """`count` fields of `bits` bits per byte, lowest first, each over a whole group of `width` bytes."""
    shifts = np.arange(count, dtype=np.uint8).reshape(1, 1, count, 1) * np.uint8(bits)
    return ((codes.reshape(len(codes), -1, 1, width) >> shifts) & np.uint8((1 << bits) - 1)).reshape(len(codes), -1)


def _spread(scales: Floats, each: int) -> Floats:
    return np.repeat(scales, each, axis=1)


def _fifth(blocks: Bytes, at: int) -> Bytes:
    """The fifth bits of 32 codes, from the four bytes at `at`."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * ((_nibbles(blocks[:, 6:], 16) | _fifth(blocks, 2)).astype(np.float32) - 16)


def _q2_k(blocks: Bytes) -> Floats:
    scales, codes = blocks[:, :16], _fields(blocks[:, 16:80], 32, 2, 4)
    factor, least = _half(blocks, 80) * (scales & 15), _half(blocks, 82) * (scales >> 4)
    return _spread(factor, 16) * codes - _spread(least, 16)


def _q3_k(blocks: Bytes) -> Floats:
    high, packed = _fields(blocks[:, :32], 32, 1, 8), blocks[:, 96:108]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    scales = (low | _fields(packed[:, 8:], 4, 2, 4) << 4).astype(np.float32) - 32
    codes = _fields(blocks[:, 32:96], 32, 2, 4).astype(np.float32) - 4 + 4 * high
    return _spread(_half(blocks, 108) * scales, 16) * codes


def _scales_k4(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight scales and eight minima of 6 bits each, from 12 bytes."""
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (last & 15) | (first >> 6) << 4], axis=1)
    return scales, np.concatenate([second & 63, (last >> 4) | (second >> 6) << 4], axis=1)


def _k4(blocks: Bytes, codes: Bytes) -> Floats:
    scales, least = _scales_k4(blocks[:, 4:16])
    return _spread(_half(blocks, 0) * scales, 32) * codes - _spread(_half(blocks, 2) * least, 32)


def _q6_k(blocks: Bytes) -> Floats:
    codes = _nibbles(blocks[:, :128], 64) | _fields(blocks[:, 128:192], 32, 2, 4) << 4
    return _spread(_half(blocks, 208) * blocks[:, 192:208].view(np.int8), 16) * (codes.astype(np.float32) - 32)


_TWICE_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _mxfp4(blocks: Bytes) -> Floats:
    # 255 is 2^128 here, not OCP's NaN
    return np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128) * _TWICE_E2M1[_nibbles(blocks[:, 1:], 16)]


_IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_POWERS_OF_3 = np.array([1, 3, 9, 27, 81], np.uint8)


def _iq4_xs(blocks: Bytes) -> Floats:
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    scales = (low | _fields(blocks[:, 2:4], 1, 2, 4) << 4).astype(np.float32) - 32
    return _spread(_half(blocks, 0) * scales, 32) * _IQ4_NL[_nibbles(blocks[:, 8:], 16)]


def _trits(codes: Bytes, width: int, count: int) -> Floats:
    """`count` base-3 digits per byte, the highest first, each over a whole group of `width` bytes; minus one."""
    groups = codes.reshape(len(codes), -1, 1, width) * _POWERS_OF_3[:count].reshape(1, 1, count, 1)
    return ((groups.astype(np.uint16) * 3) >> 8).astype(np.float32).reshape(len(codes), -1) - 1


def _tq1_0(blocks: Bytes) -> Floats:
    parts = [_trits(blocks[:, :32], 32, 5), _trits(blocks[:, 32:48], 16, 5), _trits(blocks[:, 48:52], 4, 4)]
    return _half(blocks, 52) * np.concatenate(parts, axis=1)


def _nvfp4(blocks: Bytes) -> Floats:
    bits = blocks[:, :4].astype(np.int32)
    exponent, fraction = bits >> 3 & 15, (bits & 7).astype(np.float32)
    half = np.where(exponent == 0, fraction * 2.0**-10, np.ldexp(1 + fraction / 8, exponent - 8)).astype(np.float32)
    half = np.where((bits == 0) | (bits == 127), np.float32(0), half)  # unsigned; ggml decodes NaN as zero
    return _spread(half, 16) * _TWICE_E2M1[_nibbles(blocks[:, 4:], 8)]


_OFFSET = np.float32(0.125)
_SEVEN = np.arange(128, dtype=np.uint8)
_SIGNS = _SEVEN | (np.array([int(n).bit_count() & 1 for n in _SEVEN], np.uint8) << np.uint8(7))
"""Eight signs from seven bits: the last one makes the number of minus signs even (ksigns_iq2xs)."""


def _words(codes: Bytes, kind: str) -> NDArray[np.uint32]:
    return codes.copy().view(kind).astype(np.uint32)


def _bit_fields(values: NDArray[Any], width: int, count: int) -> NDArray[np.uint32]:
    """`count` fields of `width` bits of each integer, the lowest first."""
    shifts = np.arange(count, dtype=np.uint32) * np.uint32(width)
    return (values.astype(np.uint32)[..., None] >> shifts & np.uint32((1 << width) - 1)).reshape(len(values), -1)


def _negative(bits: NDArray[Any]) -> Floats:
    """-1 for each set bit of the bytes and 1 for the others, the lowest bit first."""
    return (1 - 2 * _bit_fields(bits, 1, 8).astype(np.float32)).astype(np.float32)


def _scaled(scales: Floats, values: Floats) -> Floats:
    """Values, with a scale for each run of them."""
    return (scales[:, :, None] * values.reshape(*scales.shape, -1)).reshape(len(values), -1)


def _rows(name: str, codes: NDArray[Any]) -> Floats:
    return codebook(name)[codes].reshape(len(codes), -1)


def iq2_xxs(blocks: Bytes) -> Floats:
    """Per 32 values four one-byte codes, and a word with four times seven signs and a scale in its last four bits."""
    words = _words(blocks[:, 2:], "<u4").reshape(len(blocks), -1, 2)
    codes = _bit_fields(words[..., 0], 8, 4)
    signs = _negative(_SIGNS[_bit_fields(words[..., 1], 7, 4)])
    scales = _half(blocks, 0) * (np.float32(0.5) + (words[..., 1] >> 28).astype(np.float32)) * np.float32(0.25)
    return _scaled(scales, _rows("iq2_xxs", codes)) * signs


def iq2_xs(blocks: Bytes) -> Floats:
    """Per eight values a code of nine bits and seven signs; per 16 a scale."""
    words = _words(blocks[:, 2:66], "<u2")
    scales = _quarters(blocks, blocks[:, 66:])
    return _scaled(scales, _rows("iq2_xs", words & np.uint32(511))) * _negative(_SIGNS[words >> 9])


def iq2_s(blocks: Bytes) -> Floats:
    """Per eight values a code of ten bits, two of them stored separately, and eight signs; per 16 a scale."""
    codes = blocks[:, 2:34] | _bit_fields(blocks[:, 66:74], 2, 4) << 8
    return _scaled(_quarters(blocks, blocks[:, 74:]), _rows("iq2_s", codes)) * _negative(blocks[:, 34:66])


def _quarters(blocks: Bytes, scales: Bytes) -> Floats:
    return _half(blocks, 0) * (np.float32(0.5) + _bit_fields(scales, 4, 2).astype(np.float32)) * np.float32(0.25)


def iq3_xxs(blocks: Bytes) -> Floats:
    """Per four values a one-byte code; per 32 a word with four times seven signs and a scale in its last four bits."""
    words = _words(blocks[:, 66:], "<u4")
    scales = _half(blocks, 0) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.5)
    signs = _negative(_SIGNS[_bit_fields(words, 7, 4)])
    return _scaled(scales, _rows("iq3_xxs", blocks[:, 2:66].astype(np.uint32))) * signs


def iq3_s(blocks: Bytes) -> Floats:
    """Per four values a code of nine bits, one of them stored separately, and four signs; per 32 a scale."""
    codes = blocks[:, 2:66] | _bit_fields(blocks[:, 66:74], 1, 8) << 8
    scales = _half(blocks, 0) * (1 + 2 * _bit_fields(blocks[:, 106:], 4, 2).astype(np.float32))
    return _scaled(scales, _rows("iq3_s", codes)) * _negative(blocks[:, 74:106])


def iq1_s(blocks: Bytes) -> Floats:
    """Per eight values a code of eleven bits, three of them stored separately; per 32 a scale, and the offset's
    sign."""
    high = _words(blocks[:, 34:], "<u2")
    codes = blocks[:, 2:34] | _bit_fields(high & np.uint32(0xFFF), 3, 4) << 8
    scales = _half(blocks, 0) * (2 * (high >> 12 & np.uint32(7)) + 1).astype(np.float32)
    offset = np.where(high >> 15, -_OFFSET, _OFFSET).astype(np.float32)
    return _scaled(scales, _rows("iq1", codes) + np.repeat(offset, 32, axis=1))


def iq1_m(blocks: Bytes) -> Floats:
    """Per eight values a code of eleven bits and the offset's sign; per 16 a scale. The block's float16 scale is in the
    last four bits of four words of scales."""
    words = _words(blocks[:, 48:], "<u2")
    whole = ((words >> 12) << np.arange(0, 16, 4, dtype=np.uint32)).sum(1, dtype=np.uint32).astype("<u2")
    scales = whole.view("<f2").astype(np.float32)[:, None] * (2 * _bit_fields(words, 3, 4) + 1).astype(np.float32)
    high = _bit_fields(blocks[:, 32:48], 4, 2)
    codes = blocks[:, :32] | (high & np.uint32(7)) << 8
    offset = np.where(high >> 3, -_OFFSET, _OFFSET).astype(np.float32)
    return _scaled(scales, _rows("iq1", codes) + np.repeat(offset, 8, axis=1))


@cache
def codebook(name: str) -> NDArray[np.float32]:
    """A codebook: (codes, values per code)."""
    levels, columns, text = _PACKED[name]
    packed = np.frombuffer(b85decode(text), np.uint8)
    bits = 2 if len(levels) == 3 else 4
    digits = packed[:, None] >> np.arange(0, 8, bits, dtype=np.uint8) & np.uint8((1 << bits) - 1)
    found: NDArray[np.float32] = np.array(levels, np.float32)[digits].reshape(-1, columns)
    found.flags.writeable = False
    return found


BLOCKS = {
    2: BlockType("q4_0", 32, 18, lambda b: _half(b, 0) * (_nibbles(b[:, 2:], 16).astype(np.float32) - 8)),
    3: BlockType("q4_1", 32, 20, lambda b: _half(b, 0) * _nibbles(b[:, 4:], 16) + _half(b, 2)),
    6: BlockType("q5_0", 32, 22, _q5_0),
    7: BlockType("q5_1", 32, 24, lambda b: _half(b, 0) * (_nibbles(b[:, 8:], 16) | _fifth(b, 4)) + _half(b, 2)),
    8: BlockType("q8_0", 32, 34, lambda b: _half(b, 0) * b[:, 2:].view(np.int8)),
    9: BlockType("q8_1", 32, 40),
    10: BlockType("q2_k", 256, 84, _q2_k),
    11: BlockType("q3_k", 256, 110, _q3_k),
    12: BlockType("q4_k", 256, 144, lambda b: _k4(b, _nibbles(b[:, 16:], 32))),
    13: BlockType(
        "q5_k", 256, 176, lambda b: _k4(b, _nibbles(b[:, 48:], 32) | _fields(b[:, 16:48], 32, 1, 8) << np.uint8(4))
    ),
    14: BlockType("q6_k", 256, 210, _q6_k),
    15: BlockType("q8_k", 256, 292, lambda b: b[:, :4].copy().view("<f4") * b[:, 4:260].view(np.int8)),
    16: BlockType("iq2_xxs", 256, 66, iq2_xxs),
    17: BlockType("iq2_xs", 256, 74, iq2_xs),
    18: BlockType("iq3_xxs", 256, 98, iq3_xxs),
    19: BlockType("iq1_s", 256, 50, iq1_s),
    20: BlockType("iq4_nl", 32, 18, lambda b: _half(b, 0) * _IQ4_NL[_nibbles(b[:, 2:], 16)]),
    21: BlockType("iq3_s", 256, 110, iq3_s),
    22: BlockType("iq2_s", 256, 82, iq2_s),
    23: BlockType("iq4_xs", 256, 136, _iq4_xs),
    29: BlockType("iq1_m", 256, 56, iq1_m),
    34: BlockType("tq1_0", 256, 54, _tq1_0),
    35: BlockType("tq2_0", 256, 66, lambda b: _half(b, 64) * (_fields(b[:, :64], 32, 2, 4).astype(np.float32) - 1)),
    39: BlockType("mxfp4", 32, 17, _mxfp4),
    40: BlockType("nvfp4", 64, 36, _nvfp4),
    41: BlockType("q1_0", 128, 18),
}
"""Every block type by its number in the file; decoders take blocks `b`."""

UNREAD = frozenset(kind.name for kind in BLOCKS.values() if not kind.decode)
"""The types that are listed but not read."""

DECODED = frozenset(kind.name for kind in BLOCKS.values() if kind.decode)
"""The types that are decoded to float32."""


_PACKED: dict[str, tuple[Sequence[int], int, str]] = {
    "iq2_xxs": (
        (8, 25, 43), 8,
        "000621po*D3IGuR6aXLqA^<1=DgZ$ML;z3#SO8%FWB`Bwf&hvDq5uH_1OX5M6#+m2gaMcV00II6A_9T}0R#jD5CkCvBm_VNLIg+zU<82#gan"
        "WTqyzv30tE;KAO%JRX$61<kp&3`5C%X7ga)Jr00;#L2nZAiC<s9aL<mp_QV56$1PMS10tyrg0T2Wb5D*~{KoDRMgb<Jrl@I_C2oWF=P!U=Yf"
        "Dt4TMG^oM2oxX`B@{^%fD{-NVif=u78U^*1Q-w)Kp24-02u`tpczpb03ZS&3Lr!vVIY7Yf*>g&NFe|s0wMt<1SAk7KqOWq03|^sWF?R$2q+*"
        "Zlqf_h0YC&m5I`6}AwVQRKtM=9RzP4tfk1>nkU#)IAVFb4fI)>p0YVT$NJ3UZXhHx)2t*)6fJB)@5=A6M07d~w1V|7_KuASM07+O$VM&5XMM"
        "{uL08j`}5l|UWAW(o%h)@JkLQ$kqky4OUl2i&+0ajF209X-N8CYakKv@V{1Yi(gKwxNK0AW>O7-C>z0AvMZ5M>f&gk?f#0DuC33V=a?f`9~p"
        "7=b{65rP4P1cVTT6@);9V1xjLMun7x35Gz1V1@#S1c?!f1dtGrB#=Omp^z4lfRRO#0F)w>M3hmLftVnf0-#W!g`f$c0HPSAP^bi{"
    ),
    "iq2_xs": (
        (8, 25, 43), 8,
        "000621po*D3IGuR6aW?g82}&vA^;@-C;&kKL;ywrNdQm)QUFx|SO8%FWB`Bwf&hg8hyalQlmM9kpa1~@1OWyC2>}oR5&;zf7y%jqAps--Kmk"
        "GlMFB_wQ2|r|U;$_WfdPa8kO2S!0s;jB2m%oT6apXuK>|bqPy$r~fC7pF0R#jD1_TKN5Cjqg6$BUrAp|4@Km<YrMFdC$Q3O;3Rs>)KfdqsEk"
        "OTk)0tE#H2n7)Z6a^p!K?OtwPz7NHfCT{t1O^ZWCI&zTLI#8e00;sI1qcWT3J4Jh6bK*)B?v(XL<mp_SO|a!pa`l60SN>N5D7pDfeDET016-"
        "qC<>Mepb7yH1P}%g2@ntv5)c&-7!V;4BoIIlLJ&m|NDxsFR1jbgY7l`Cgb<Jr01*Na1rZ1l5fKy-AQ3?kL=jLCfDx1tmJtCG1QG@k5E4KVU="
        "jcn0u%)l2ow<%6civ7K@>z3Nfb~NWE6lD0Tl!l5EVcb02UM$NfrSZ1Q-w)5*R=jR2YUB02u`tW*Jc$sTu$v0w4t-2p|d|5g-&GARs{?L?BQg"
        "fFPhC0U-n-5FtPzNFik*03sqHfFh_O0VD(@5F{xiKqLSqK_yZpnI!=x8YZSD04NA33Me2bRVaukq9|x7kSPc%AS!|?h$@OI0YC&m20#fw5I_"
        "<@6+jq3AwVQRKtMu3ML<YEN<dLSR6t-rWk7*Igg}r$06_vl1wjZw5kV9|AVEPvL_ttNfI)>pqCo*d1VRu(5<)3LKtcdS0z?Hw2t*M?6hs+BA"
        "Vfh#L_|<TfJBr;0YwBw5Je<KKt-BG07eQ%L`G0X0Z0T$5J*5sMMzXgVn_f<5lKWzP)TV?1WEu<0#F4|2v8AF6i^^gC{RIAL{LyrfKUNZ1W^!"
        "C6;VJ@LQw!xL{h3!0aOH35L6*lKvZB<fmESX096Q8fK`Z9Ay#Nsp;iD`6j(u6P*|B*8d*SDLRp1c0bm4R5MV%HRA6FYhG3~+0AVCzN@9{?0A"
        "v<q5M@ARMP;OA0cdJyC20m~RBB>s0DuC31%L>E5r7ncAb=`>L4ZVnP=J7df`F)is(=B31c3&D5P?8}QGr>30D>TbfP#X8pn|A^0fYpE5QGwh"
        "6@);9V1$W;0EI+_rG*%VYK8!a2#6(!T8My%f{3Vy28kkyfQpEUmWrr~0gwcc5RgESR*-~{0Ffe*WRX^qiIM=61(ZaTP?T7dDV30wl9fT0QJA"
        "KfNtqRzV447+0-y+>3ZNjMDxjdCQK4C(rlA0$0-^|_Dx!d*prSyem84~+n5GJ-AgCg!D5#*QsHg;~gsFz9D5@%|k*cby"
    ),
    "iq2_s": (
        (8, 25, 43), 8,
        "000621po*D3IGuR6aW?g82}&vA^;@-C;&kKL;ywrNdQm)QUFx|SO8%FWB_IWX#ju#f&hg8hyalQlmMUrr2wh`0RaR71_22H5CIYa6#*ClAps"
        "--KmkGlMFB_wQ2|r|RsmT7U;$+TXaRu%gaMENk^z+gp#h`;00II61p){H5dstfAOb1^K>|bqMgmC!Py$r~fC7aAiUO1Zq5=T~1Ox^I2?P)X5"
        "(E_l7z7~%Bm^b|DFi?SLIgzwNCZj*Q3O;3Rs>lDU<6_WWdwl)gan2Ji3E@Yl?0dsp#-D^00jaC1qBEN3I!1b6a^Lq83iB(B?Tx2K?OtwMg>U"
        ")Pz6#2RRvfDVFhFbfCYjDg$0NOkp+|mpalU21O^5M2?h`b6$U^CMFvO)Q3g~7U<QE(ga(iX00;sI1qcWT5eO6r76=&#AP6N0DhNRcL<mL*Ne"
        "EB~QV3NDSO{SVWC(x=g$R@gst5rI1PKrc5(yOv7zrT>KnX<&NC{C1R0&`SfeDZa016Qb6bd2=C<-bHPzsp}0T2Wb1`r7l5D*d&6%ZH@ArK@G"
        "CJ;anLJ&m|NDxsFR1j7WSrA|lVi08zXb^!Agb;=hkPwv+m=K{5q!0iR0ucof2oVYq5fKy-77-Z{AQ2)FB@rkQK@mg|MiEI7P!UoQRS{SbVG("
        "2zfDwWbg%OAmkr9*;0TKif2@((z6%rv5BoaUpMG{dGR1$#_gc6Vv02Bfg1r!Jr5fl^@78Ds2AQUAOC=@{yL=;98Nfb~NQWRAbSQKFtWE6lDf"
        ")s@mh!l|&loX&80Tl!l1{Dbv5ET*?6%`m2Ar&MQKovq2MHNUDQ594bU=@KCgcXn#02T!n2o@0*6c!*BK^8<7P!@m|sulql1Q-Sw2^bI<6&M&"
        "8As9dyLKsCDNElHVR2X0wff$4s02u-q1sMn#5g8O2AQ?d!L>W*SX&Is!1R4+;KpIvW03ZS&1t16@5g-&G79bfQARr|mDj-21L?BQgQXo|zWF"
        "UYbiXfCAsvrR&1R)S15+M~KAt68^LLo&VQ6W?zU?G7agdvb203r$^A|favDk4N8P$GyTiXx~Y0VD(@1|$h25F`~O7$hMiBqTs2LL@~bNF-4t"
        "R3u;|fh2?^kR$*l1tkb25hWBQASFR1L?uuqW+i|n0VV_{5GFt-StbA|1t<|H6evL`L?}=wiYTfm0VxD25Gj=@3MwKhWGaX%iYfs>1V9Er2|y"
        "4)5<nF|7(g08AwVQRCO|+yLO?}8NI*(JQ9x8cRzO)mU_fF(Wk7*Igg}r$l|Yz4p+KZS06_vl1wjZw5kV9|7C{+7AVDHQB|$+!L_tPDNkLFSQ"
        "bAQgSV3VyWI=#If<c8rh(VD-ltG|D0YU^q5JD0{6+#$7Btk$!MM6kIQ9@KgU_yaHghBvB0z?Hw2t*1*5kwS37DO3DAVeZWB}6DhK}1AEMnp+"
        "OP()HhRYX`sVMJs^fJA~sg+z!%kwlb4phN*h1Vsi#2}KY^5=9k77)2pPBt<|)LPbSINJUXaR7GG#YDIxXghh}=07e2v1x5%)5k?e7AVxt(L`"
        "G0XfJUW80Z0T$2}lq~5=a$D7)T*VBuGF=LP$kONJvpgR7hY*gh-G`07(K#1xW}=5lIwDAW1<<L`hIdfJv4~0ZIf)5K2Hw08j!@1yBf35l|FR"
        "7El>bAW$MuB~U0(K~O|cMo>vmP*74(RZv(^VNhgHfKY-^g;0o4kx-OS0Z{}|22lx75K$6Q6;T*bAyFhzKv6<bMNvpmQBhP;U{Qflgi(-D08#"
        "}~2vQMJ6jC5kK~h9gP*Q19fKmZe1XKo82~-eN5>ypb7*rutBve3DLR3XmNK{c&R8(M8fmDQ4kW>Iw0#yZ72vreP6jdNqK~+RmP*s3c0agT75"
        "LPBuKvn=)0$2rD2v`wV6j&fwL0CjsP*_@6fLH-p1X&PSKv@7<8Cr!}s9FJF1YibW5MUBu6<`=(Az&n6Kww2+NMKQ5RA69WgkX?h0AT`Q1z`w"
        "b5n&WzAYnmaL}5^2fMJ<o1Y!_kKw?&6p<)1J1!M?h5o8o(AY?&gL}XB8fMfw>1Z5CqKxIm0Xl0UR0A`eC0cZqh5NKs+m}mfLDrrJ$p=tnt0)"
        "Pd82!IiQ6o46kAb=%+L4ZVnP=Hc^Re)H4VSs>ug@BQOlz;(&1c3>G5P=eb6@eImA%P@;K!HMmMS)0xQGrx}fq{g9kb$Xz0D=XA3W5=W6oNs5"
        "M1oL)0fYpE280QO5QGwh6@(asA%sALLWD(xNQ6;@RD@uJfrNyFkc0q*0)+*I2!#=a6onv#L4`zxP=$bniiH7&1cnfXDTY9X0Eh*M5r`CsL5M"
        "_%P>7<40f_{OK#66EB8pgwT8e^-qKW~K1ds`k5Rej(6_6N^B#=OmLXbs}NRUyGRFGhhfslldkdOe81(6Yv6p=xZM3GRDT9E;g1d<SvK$51C0"
        "F(lh1(XPs5tI~^Ae2FrM3hjJfRvV$0hI)m5S2icn3bWG0G39UWR?M#1eg$*CYV5&sh9wnNtsfakeUFX1)vI`6rduYDxg82M4(WhqM)jvK%r%"
        "!0-_3{BBCgwDx!j-h@y(3sG<R+1f&q8K%|MJq@)0)8KqIC3aBWkqNr4<hN%du3aTKgBC05=h^nfp"
    ),
    "iq3_xxs": (
        (4, 12, 20, 28, 36, 44, 52, 62), 4,
        "000621OO2L695+gAOIo&F#tjUa{zS!0RaO65CIYaAps=;Faa_FK><_&Z~*`U0s;gA5dt6rA_6f2GXggPQ36*2bpinc2LliT5(6aza03$rHv~"
        "ikR|Inebp!zg2L&<(QUx^zWCjoi6bBXuLkD380T2Ta5D*d&ArK=FFc2~jG!RD+P!IqS0ud1rAQ2)F0TKfe5E2p+ArdeWauNU&0uvw;F%w1;W"
        ")lGv1r$&eAQdDPMip@t1r{O~Ko<ZY0w56}6CfZUA|NIpF(5)90U-k+1tAb25+NZWFd<_hXCZJQ03re+5h52NAR;0nHzGhHRU!c+5F->La3gd"
        "hH6&9c10^RVK_zr00Ve||7AHj~0Wc6S5-=e!BQQ`fWiWCu05JkFATcp9L@`D&0Wt$J5Hck)QZjNf5i>J0Ff>Orax?%n1~nozRW%egHa256Gd"
        "Ey21V9%+H9$8&Q$SZhbU`3OH$p%{U_xd>2SY_e1Vm9pWJD!JLq%{!1xFA^5=Ssc5>P=<a8LkI22mzaRZ$dDGE#C<0#j2{5L6>nCscA&0#z|p"
        "P*x;YLRTbUL|{f>WMCm-VPO|yWMVL5He*C&1!YoYGiC#4A!h?{1#ky&5O6YZQg9}5KyeasMRHPd0CN>{Gjm{bA#_1>0CfU&By})$"
    ),
    "iq3_s": (
        (1, 3, 5, 7, 9, 11, 13, 15), 4,
        "000310ssX72LKQN5dabZ6aW?gAOIl%B>*!3KmbAjMF2+tQ2<i_U;ttOaR77xcK`qZ0RaL51OX5M5djqeAORx*Cjl`5H338cVF6_UasdDW0Rj"
        "aA2LccR69N_jAp#`=Fak6JLIOnsM*>j-Qvz@Ta{>bc5d#$iAOj);F#|ILHUmThPy<o}X9IBqbprqd69g9oAp|4@G6X;bLj+L-a0CJc1O*@kA"
        "_XP|GX+5fMFmF%W(9Kv1_luZ69zE`QU-Ab00#mG1P34oA_pc1GY3!yR0jYM0T2QZ1P~Aq5fBp)6%ZE?AP^!DF%UEmHV{-0RuEwjau5I!0TBZ"
        "c1`!Yu6cHg2FcC8mK@m_9QW0<wb`by)5)u^>7ZM;6BoZ<bKoUa|RT5wlauNX(1QQ1n5EBy<ArmJPFcUNrK@(yVa1#R*1r!n#6cjNOGZaD;Mi"
        "fvKR1^Uf5ET;@Ar&wcG8Iu3AQmJRCl*8&Miv1V0~Zh%5*HyCH5Wk_Vi#~103ZP%10V$;2Otn25+D>H79b%YBOoUrFd#A@K_EjQMIcZhQXpp_"
        "a3FIabszvC0wE9~6CoENA|WLqF(EV|LLpHh0U`t<2O=RNBO)*&HzGkIQzBO)aUygg03!k;1tSq7A|oUtF(Wf0LL*QkW+MS42P7aQBP22;H6%"
        "eKawK&m1SJtAA|*E^KqXTpa3ugH0wxD0AtqHOVI~D95ho@mFegJNP$vQ~5ik=l6)+btA}}#9GcYwULNG)yM=((^V=!?r0WkwH1u+ycAu%H{K"
        "rvu3axr!>05TFXATlyCG%`>!0W%OY6f+?+BQqy6Ff&0jLo-J+RWoxl12hpd7BnI>F*H&%U^HYj0W}ac5;Y|?GBrdsRyA`q7B)dP0XG9TAU7g"
        "6H8%i21V9o%AV4HQCqOblK|oMIa6ke<2SE`*6G0+DFhMmzLqSnNRY3tl140l&6+$6GGeST@S3+V!a6$w_5knJ0AVVTUF+(*&07L>rBt$nvKt"
        "ypw1w{u%Aw^<E6Gk*fU`7x}6-O{fLq}0Z0#Fc86i^~iKu|<bM^I8wW>9oc0Z{`{1yK@FAyG0>a!~+M5mF;kFj6*BQ&Iv`2U8GJCsRaIQB!48"
        "b5j9S1XLhYGE_!X5>+NuQB_k_LRJD-1Xm(g5nvNw6<{%7Ghkp~0AV0uCt+k^5@IxBLSj{7Vq$P&0AmzmA!9&eC1gWnVq^ei17$R2U}XhnKxP"
        "qV6K4Q$1aJp%AaEjZHgG_2RB&Q&0&x*>BymG=MR5Ug1ac5^7IGnSFmh3H0&_BRHFHyQ0dxg)6LcVSP;?@7LUjUmF?IlV"
    ),
    "iq1": (
        (-1, 0, 1), 8,
        "000621po*D3IGuR6#yUrA^<1=DgZ?QQ2<l`RsdxHfB=F3hyaQJl>ndsq5!A>ssIE51pyHO6af|i837srB>_PJMgd6yQUO%~S^;4JWC3OYXaR"
        ")*kpYwemI0*!00II62m%TM6#^gvA_6D^Dgs3UQ36>4WCCddfC7R7hyscNkph(hnF62!q5`M_ssa%N6a*FoB?LhPNd#2{S_EVSWdxA~nFOT-0"
        "R;pF1qB8L6$Kat8U-l@Km|nwN(E2_Q3X^5RRvZBSp{GPVg+RdXa#Bofd!ETl?9jungyW+qy?n~rUj`56b2avK?XzyPzF*4RR&lFU<P3ZW(H{"
        "ng$9uZlm?jw00;sI2nY%Y6$l^*A_yo5DhNdgQ3zHDWe9)>f(VERiU^empa`M}s0gYE1ql%e6bTs#Bnc%6K?zU^Q3+KEVF_djX$g@DlnIsznF"
        "*x{015&M2nq@c6$&5<A_^!9DhfpkQ3_cKVG3mmfC_>Ng$jrYiVBqqpbDZ2s0ykI5D*a%6c8B@BoHMKK@da`P!LrRSP)?lWDsQ#X%LYRln|B>"
        "p%A4I0TBcd1`!Dn5D^j)6%iN_ArT}IDG@~xN)b>IQ4vxRR1sAXRuNedU=d{zgb|Vvl@Xy4q!AGk6cQE^B@#dqMiNO9QW8}XSQ1(iWD;f)g%X"
        "hxloFN_r4j)Y1{4Vt6ciN{7!(;4ArvMQK@>$4MifXCN)%BPR1{SdRuowjViaW*XcUALi4>3&loXW|m=u{5niQcFq!gtTsT2Yg1r-Vv5fu~_6"
        "%`g085JNEA{8YSC>1IdK@~(5MHNOBQ58}ZR25YfRux$lS`}dxWEEu<W)*1_fE9ujgcXGqh!u(zkQI>?logc~mKB*5niZfGq7|hT0Tu)n1r`P"
        "t6&4m27#129Ar>YUKo&w4L>5IBNES*KQ5IDeRu)(mSr%ayWEN!>XclP}Y8HkTiWZU<l@_EHsTL6!78oTMK^R0BMi@yLP#9GhSQuIuU>IQ-WE"
        "f@`X&8kVkr<R1r5F$y5*Za48W|xOB^g2)L>WaHNEuNXR2fwnRvB3tS{Yy&Wf^K2i5Za@k{Oj5m>HoNrWvUj2^tm}BpN0fL>fjKNg7ZZQW{kn"
        "SQ=p(W*TW4g&L6>mKvHG03ZS&2p|d|6(ArWA|NFoC?F~zMIcciSs-B`Wgvhcf*^<>iXfFBpdg|kr68yvsvrd+5g`;I86hPhLLo#UNg-7sSRq"
        ";=VIgE8Wg%uEg&~k3mLZuTr6B<#2qFq15h4{LAR;0nC?YB%MIuomRw7v<Wg>whh$4z2ks_5Mpdz9os3NK&1tb(C79<%YB_u>7MI=TfNhDGvR"
        "U}v>S|ny9g(Q(Alq8uXp(Ldw2_+RJAtfm#KqW;bNF`AvR3%j<StVj6WhH1Oi6xLFlqHoVm?fGep(UgxrX{H*1tt(C5+)fYB_=^8NhVb$U?yQ"
        "EX(ogwh9;0EnkE1!0w@S53MdsQASfazC@3l@MJQ1yR48RAfGC0}h$xCEpeUj!s3@u^2`LdN6e$@gB`HQJNhwk(RViU9WGQATX(@#%kSUfanJ"
        "J_xr6~X^0xAe93MwEfA}S~<Dk?=PQ7Tp{St?~JfGUD2h$@OIl`5brqAI8=swxFQ5kM9|B|u3)Qb1KeSU_4pVL)U+W<ZocnLwdHra%Be0YL;o"
        "20;ly5<wL~7C{(68bKjJCP67dML|eGN<mRUR6$iiRzX=oT0vz&XhCX0fkA{phCz@)l0lV0ph2NQqCo{h5keF~7D6RLK|)eORYF=qWI|~|i9("
        "b@r9uHj6+{_CDMUp?NJL6RQAAWkRYX=qVMJm?WkhI1YD9rVhD3=(kVKM1l|-OKp+u=f0Yw5u1w{%)5k(Y56-5?B8ATvPB}FPlK}AGGMMXwMN"
        "kvdaQAJcmRYg`sSVdVyVMSy`WkqI1X+?rXghho#h((b_ltq<AmPMIGnnk5Ws70zp0Y(Kz2}Tq~6-F3F8b%>TBt|JlKt@7FMMg+QP)1QkQbtu"
        "qRz_JyVn$^~XhwlXg+_`-ltz_Cp+=-erbY!w5l9tC8b~EbLP$wSP)JosSV&<=WJqR6X-I`gkw}zCmPnaMrAPru1xW@;3P})26iF3H7)c>XBu"
        "OSoKuJYON=Z>kQb|-vRY_J!SxI0?Vo7C5W=U#EhDnJ@l1Y_GmPwdNp-H4krb($u7D_})MoLLaRZ3V&T1sR}X-bqzrAh%%1W*M~22cr55>ORT"
        "8c-onBv2_(Ku|?cNKjEwR8Un=R!~_`Wl(5PhER!6l~9;apirSurckL+1yKl52~i4B5m6LT6;T#Z7*QEfAW<bzCQ&F+Dp5gEL{UXiMo~#oP*G"
        "7)Qc+Y<RZ&(^SW#I~T2Wz9WKm^NW>INTf>DK0kx`UUl~I;anNgrorBSL;0a6B15>gdX8d4!rBvL|BMN&#qQBqV=RZ><`SyEzBWm1JwkW!LTl"
        "~S2fno^`v1XKl75mXdZ6;u{f7*rWlAyg$)C{!v`K~zLkMN~#qNmNQyP*hP=R8&<|R#aG2SyWn7VN_yNWK?BTW>jfZfK-T7id2zQlvI^emQ<N"
        "kp;V+)rBtd^0aXH31XTr922}}F5LFRX5>*sc6;&2h8C4opAyp(*B~>O>DOEsKK~+LkL{&vqMpZ~vNmWo)QB_h^R8>_~R#jM4Syft9U{zsNWL"
        "0HVW>siaX;o@ffmMW6g;j}FidB$RkyVscl~tBim{plop;e?+rB$X?sZ{`00agN51Xc!C2v!MJ5mppd6;>El8CD=xAyy(*BvvI>CRQj`DON#N"
        "MOH>uNLEQ!N>)%-QC3n`R9011R#sS6SyozBVOC^TWmaicf>woAhE|AHiB^hMkye#fnpUD#rB<d^s8*>~1Xu-F23QGL5Lgvh7+4`#Dp*BWNLW"
        "f(QCL)1RajP7SXfzDU|3>UWLRZbf>?=IkXVvfl~|Zqp;)O{0a*fB1z8GN5m^*j6<HQp8CfM+L0LpuMOj8!Nm)=?QCU)1R9RJ7R#{kCSy@_HV"
        "OeBZWm#rfX<30;g;|MNky(^km06Zqm|2-wrC9`82wD|d8d@M)C0Zt0DOyEZNLoo+QCd}6R$5qESz2ORWm;%jYFdF>idvFdm0Ffsm|B`zp;`r"
        "C6krx$8DJ$~L|{;0RbW<NSYTRUVPIrnW?*Sxfnb(krC<SJ1YrhY31Jdp6=5M^B4H+BDPcunNnuf8Rbf_PSz%>iW?^b!gkg$dl3|r$p<$+Bsb"
        "LXf7GfD<Kw?2+Mq*WBR$^FUU}A-0kz$r&rD73e5@Z!*7GxS^A!H_GDP%xoLS#i`NMuT6QDjtPRb*CVS!7ydU}R!sWn_e8g=C3jkYti%lw_4;"
        "mSmV@nq;A5q-3dN1!V|j3S|*x6=fD>8D&IeMP){1No7!FQDszRRb^IXS!H2mWMyS#W@Tw*hGmImie-^ym1UM?nPr+~qGhFJre&yQ0%i$j6=o"
        "o2CT1vRDP}-sMP^85N@h`JRAyCXR%TdcT4rEoWoBq*fM$Ybg=UIolxCJ@m}Z$~pk}0Ire>;U7HAo0C1^otQfO6ZT4-TtX=sILk!YA`rf30a1"
        "Zfay6=@-9BxxpTDQQ4yL1{&4MrlZCQE60ZRcTgfS!rNtWoc?@f@y?lifNT;p=qRPrD>^Y5o#7{7-~UkL~2QDP-<0bSZZ2oWNKw<X=;XQlxmo"
        "2nrfzM0DuC32!INJAb=u(D1a(}MSxI%QGir{R)AT6Wq^Qyf`EvCihz}Xpn#%)sDP?~1%VNP6oD3j8G$8%L4ibpNr6y-Qh`;0R)JW7S%GAMW`"
        "Sveg@K8Il!2CknSrH&0D=O72!aZN6@nmwB7!J_DuPjhRDxN8WrBc$f`W*Gih`Abpn{@;sDi436oeUsL4-tvQG`{5T7+SQWQ1vil!Tdt0fh;L"
        "5``6o8igi>DTP3VL4`$yNQF^_RE1TAR)txGT7_kWW`$^lYK4J?goTEMiG`4bl7*Fpn1!Z=5r!6q8HOc>L54(zNrp;>P=-~8S%zAMVTNXgYKD"
        "b|k%pRvq=o>90*DBR3WybmAc!J}D2OVEL5M|&QHWHCS%_tbX^4P`f{2KSiinknpopS~sEDeF1&IcU5s4Iu7KtT^L5W0(Mu|y@P>E8BRf$@OV"
        "Tojkg^8AlnTe%|0Ez;N2#N}d6^bB=B8n)ADvCvlQHoTGR*Ha%f{KWWii(wrpo*f3sEVqJ1&|St7LXW_8IUEAL6Am}Nsv{LSddzfX^?7=g^-b"
        "ul#rH?nUJNB0g(ie29XJo5Rny;7?B#0A(14JCXp$TK#@g}P?1rQRFPGYR*_keVv%K$gpr1kl982>n3188q>-kPsgVVe5t0;=8ImQEM3P35Ns"
        ">^KQj%4YSdwOvX_AGKl#-T`sgePd1e6Ap5R?^^7?dWIK$J?9QIu4aRg_kgSd>|mV3c8$Vw7c+gp`Jql9ZH`m6Vv2p_HkV0F?!m2$c$z5S0;?"
        "6qOZ~7L^&5A(bVSDU~XfL6t<6MU_UCNtIBQQI%4aRFzegR+U(lS(RFqVU=W+WtC=?X_bMMg_Vevk(H8_l$Dj0mX(>6nw6lHqLrnUsFkXf0hR"
        "=o5SA5|8I~ZHCYC9dMV3gGNtRKTQkGSgR+d?oWtM1`f|i7qiI$3%l9rT~m6oKIrk1Ie1(+6?8JH!QL6}CEP?%DfRhU+oT9{;*WtfGSk(id4n"
        "V6-R1epez37HU?5}6g57?~QGAekYVB$+0eK$$|BMVUyMN|{laRGC$oR+(9uVwq)`W|?Z4ftiGvkeQO1m6@8Ep_!(c1)3F_C7MK<Mw&^QP?}Y"
        "mSejv)g_@C?l$w>AmYM*d0-y+>3ZNCBAfO_kD4;5!MW9ijRG?O%S)hQRf}n_?ilCLCprE3lsGzE#1)&L{5up^J7NHrT8lgs^Nug1pRiRj+TA"
        "^W~WTAzjkfD;HmZ6!U0-^|_3Zf9A8KNShD55H&MWRunR-##=Wukzhf})6`ilUXGprWFpsG_Q(8KfnoL8L^aP^46(Ris#?TBKp5Wu#`LXryVR"
        "g`@_h38fIF5~UTT7^NnqDWyWCMWs=tRHap=R;5{`Wu<DRfu)3{g{6k2iKUXIm8F=a1*Q?E7N#1eA*Lm!M5acjN~Th#Ri;*^Sf*g6Vy1?skfx"
        "QUmZq7ep{As!rltU>0;mY63aB8cBB&^+DyUJYRH#;{S*U=hf~bh7il~*Sps1p#sHm!_1*sIN8L1(uC8<HFP^nd^TB%{FW~phZkg1lb0ICA22"
        "&xLIAgUs&D5@%|QL0p`R;qxif~ttBimH{WpsJ#(sH&=}"
    ),
}  # fmt: skip
"""For each codebook: the values of its digits (the lowest digits of a byte first), the values per row, the packed
rows."""
