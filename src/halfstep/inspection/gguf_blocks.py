"""GGUF's block types: the bytes of a block of values, and the float32 values they stand for.

A block is a few scales and the codes of 32 or 256 values. Every decoder maps (blocks, bytes) to (blocks, values).
Source: ggml, ggml-common.h (the layouts) and ggml-quants.c (dequantize_row_...).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halfstep.inspection import gguf_iq


Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Decoder = Callable[[Bytes], Floats]


@dataclass(frozen=True)
class BlockType:
    """A type of GGUF: `values` of them fill `nbytes`. Without a decoder its tensors are listed, but not read."""

    name: str
    values: int
    nbytes: int
    decode: Decoder | None = None


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block, as a column of float32."""
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)


def _nibbles(codes: Bytes, width: int) -> Bytes:
    """4-bit codes: of each group of `width` bytes first the low halves, then the high ones."""
    groups = codes.reshape(len(codes), -1, 1, width)
    return np.concatenate([groups & 15, groups >> 4], axis=2).reshape(len(codes), -1)


def _fields(codes: Bytes, width: int, bits: int, count: int) -> Bytes:
    """`count` fields of `bits` bits a byte, lowest first, each over a whole group of `width` bytes."""
    shifts = np.arange(count, dtype=np.uint8).reshape(1, 1, count, 1) * np.uint8(bits)
    groups = codes.reshape(len(codes), -1, 1, width) >> shifts
    return (groups & np.uint8((1 << bits) - 1)).reshape(len(codes), -1)


def _spread(scales: Floats, each: int) -> Floats:
    return np.repeat(scales, each, axis=1)


def _fifth(blocks: Bytes, at: int) -> Bytes:
    """The fifth bits of 32 codes, from the four bytes at `at`."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: Bytes) -> Floats:
    codes = _nibbles(blocks[:, 6:], 16) | _fifth(blocks, 2)
    return _half(blocks, 0) * (codes.astype(np.float32) - 16)


def _q2_k(blocks: Bytes) -> Floats:
    scales, codes = blocks[:, :16], _fields(blocks[:, 16:80], 32, 2, 4)
    factor, least = _half(blocks, 80) * (scales & 15), _half(blocks, 82) * (scales >> 4)
    return _spread(factor, 16) * codes - _spread(least, 16)


def _q3_k(blocks: Bytes) -> Floats:
    high, packed = _fields(blocks[:, :32], 32, 1, 8), blocks[:, 96:108]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    top = _fields(packed[:, 8:], 4, 2, 4)
    scales = (low | top << 4).astype(np.float32) - 32
    codes = _fields(blocks[:, 32:96], 32, 2, 4).astype(np.float32) - 4 + 4 * high
    return _spread(_half(blocks, 108) * scales, 16) * codes


def _scales_k4(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight scales and eight minima of 6 bits each, from 12 bytes."""
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (last & 15) | (first >> 6) << 4], axis=1)
    least = np.concatenate([second & 63, (last >> 4) | (second >> 6) << 4], axis=1)
    return scales, least


def _k4(blocks: Bytes, codes: Bytes) -> Floats:
    scales, least = _scales_k4(blocks[:, 4:16])
    return _spread(_half(blocks, 0) * scales, 32) * codes - _spread(_half(blocks, 2) * least, 32)


def _q6_k(blocks: Bytes) -> Floats:
    codes = _nibbles(blocks[:, :128], 64) | _fields(blocks[:, 128:192], 32, 2, 4) << 4
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return _spread(scales, 16) * (codes.astype(np.float32) - 32)


_TWICE_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _mxfp4(blocks: Bytes) -> Floats:
    half = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)  # 255 is 2^128 here, not OCP's NaN
    return half * _TWICE_E2M1[_nibbles(blocks[:, 1:], 16)]


_IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_POWERS_OF_3 = np.array([1, 3, 9, 27, 81], np.uint8)


def _iq4_xs(blocks: Bytes) -> Floats:
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    high = _fields(blocks[:, 2:4], 1, 2, 4)
    scales = (low | high << 4).astype(np.float32) - 32
    return _spread(_half(blocks, 0) * scales, 32) * _IQ4_NL[_nibbles(blocks[:, 8:], 16)]


def _trits(codes: Bytes, width: int, count: int) -> Floats:
    """`count` digits of base 3 a byte, the highest first, each over a whole group of `width` bytes; less one."""
    groups = codes.reshape(len(codes), -1, 1, width) * _POWERS_OF_3[:count].reshape(1, 1, count, 1)
    return ((groups.astype(np.uint16) * 3) >> 8).astype(np.float32).reshape(len(codes), -1) - 1


def _tq1_0(blocks: Bytes) -> Floats:
    parts = [_trits(blocks[:, :32], 32, 5), _trits(blocks[:, 32:48], 16, 5), _trits(blocks[:, 48:52], 4, 4)]
    return _half(blocks, 52) * np.concatenate(parts, axis=1)


def _nvfp4(blocks: Bytes) -> Floats:
    bits = blocks[:, :4].astype(np.int32)
    exponent, fraction = bits >> 3 & 15, (bits & 7).astype(np.float32)
    half = np.where(exponent == 0, fraction * 2.0**-10, np.ldexp(1 + fraction / 8, exponent - 8)).astype(np.float32)
    half = np.where((bits == 0) | (bits == 127), np.float32(0), half)  # unsigned; ggml takes the NaN for zero
    return _spread(half, 16) * _TWICE_E2M1[_nibbles(blocks[:, 4:], 8)]


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
    16: BlockType("iq2_xxs", 256, 66, gguf_iq.iq2_xxs),
    17: BlockType("iq2_xs", 256, 74, gguf_iq.iq2_xs),
    18: BlockType("iq3_xxs", 256, 98, gguf_iq.iq3_xxs),
    19: BlockType("iq1_s", 256, 50, gguf_iq.iq1_s),
    20: BlockType("iq4_nl", 32, 18, lambda b: _half(b, 0) * _IQ4_NL[_nibbles(b[:, 2:], 16)]),
    21: BlockType("iq3_s", 256, 110, gguf_iq.iq3_s),
    22: BlockType("iq2_s", 256, 82, gguf_iq.iq2_s),
    23: BlockType("iq4_xs", 256, 136, _iq4_xs),
    29: BlockType("iq1_m", 256, 56, gguf_iq.iq1_m),
    34: BlockType("tq1_0", 256, 54, _tq1_0),
    35: BlockType("tq2_0", 256, 66, lambda b: _half(b, 64) * (_fields(b[:, :64], 32, 2, 4).astype(np.float32) - 1)),
    39: BlockType("mxfp4", 32, 17, _mxfp4),
    40: BlockType("nvfp4", 64, 36, _nvfp4),
    41: BlockType("q1_0", 128, 18),
}
"""Every block type by its number in the file; `b` are blocks."""

UNREAD = frozenset(kind.name for kind in BLOCKS.values() if not kind.decode)
"""The names of the types that are listed only."""

DECODED = frozenset(kind.name for kind in BLOCKS.values() if kind.decode)
"""The names of the types that come decoded to float32."""
