"""GGUF's IQ types of 1 to 3 bits: rows of codebooks, with signs or an offset, times scales of 4 or 3 bits.

Source: ggml, ggml-common.h (the layouts) and ggml-quants.c (dequantize_row_iq...). Blocks are 256 values.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep.inspection.gguf_grids import codebook


Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_OFFSET = np.float32(0.125)
_SEVEN = np.arange(128, dtype=np.uint8)
_SIGNS = _SEVEN | (np.array([int(n).bit_count() & 1 for n in _SEVEN], np.uint8) << np.uint8(7))
"""Eight signs of seven bits: the last one makes their number even (ksigns_iq2xs)."""


def _half(blocks: Bytes) -> Floats:
    return blocks[:, :2].copy().view("<f2").astype(np.float32)


def _words(codes: Bytes, kind: str) -> NDArray[np.uint32]:
    return codes.copy().view(kind).astype(np.uint32)


def _fields(values: NDArray[Any], width: int, count: int) -> NDArray[np.uint32]:
    """`count` fields of `width` bits of each number, the lowest first, one after the other."""
    shifts = np.arange(count, dtype=np.uint32) * np.uint32(width)
    found = values.astype(np.uint32)[..., None] >> shifts & np.uint32((1 << width) - 1)
    return found.reshape(len(values), -1)


def _negative(bits: NDArray[Any]) -> Floats:
    """-1 for a bit that is set, 1 for others, of bytes, the lowest bit first."""
    return (1 - 2 * _fields(bits, 1, 8).astype(np.float32)).astype(np.float32)


def _spread(scales: Floats, values: Floats) -> Floats:
    """Values, each run of them times a scale of its own."""
    found: Floats = (scales[:, :, None] * values.reshape(*scales.shape, -1)).reshape(len(values), -1)
    return found


def _rows(name: str, codes: NDArray[Any]) -> Floats:
    found: Floats = codebook(name)[codes].reshape(len(codes), -1)
    return found


def iq2_xxs(blocks: Bytes) -> Floats:
    """Of 32 values four codes of a byte; a word of four times seven signs, and a scale in its last four bits."""
    words = _words(blocks[:, 2:], "<u4").reshape(len(blocks), -1, 2)
    codes = _fields(words[..., 0], 8, 4)
    signs = _negative(_SIGNS[_fields(words[..., 1], 7, 4)])
    scales = _half(blocks) * (np.float32(0.5) + (words[..., 1] >> 28).astype(np.float32)) * np.float32(0.25)
    return _spread(scales, _rows("iq2_xxs", codes)) * signs


def iq2_xs(blocks: Bytes) -> Floats:
    """Of eight values a code of nine bits and seven signs; of 16 a scale."""
    words = _words(blocks[:, 2:66], "<u2")
    scales = _quarters(blocks, blocks[:, 66:])
    return _spread(scales, _rows("iq2_xs", words & np.uint32(511))) * _negative(_SIGNS[words >> 9])


def iq2_s(blocks: Bytes) -> Floats:
    """Of eight values a code of ten bits, of which two lie apart, and eight signs; of 16 a scale."""
    codes = blocks[:, 2:34] | _fields(blocks[:, 66:74], 2, 4) << 8
    scales = _quarters(blocks, blocks[:, 74:])
    return _spread(scales, _rows("iq2_s", codes)) * _negative(blocks[:, 34:66])


def _quarters(blocks: Bytes, scales: Bytes) -> Floats:
    return _half(blocks) * (np.float32(0.5) + _fields(scales, 4, 2).astype(np.float32)) * np.float32(0.25)


def iq3_xxs(blocks: Bytes) -> Floats:
    """Of four values a code of a byte; of 32 a word of four times seven signs, and a scale in its last four bits."""
    words = _words(blocks[:, 66:], "<u4")
    scales = _half(blocks) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.5)
    signs = _negative(_SIGNS[_fields(words, 7, 4)])
    return _spread(scales, _rows("iq3_xxs", blocks[:, 2:66].astype(np.uint32))) * signs


def iq3_s(blocks: Bytes) -> Floats:
    """Of four values a code of nine bits, of which one lies apart, and four signs; of 32 a scale."""
    codes = blocks[:, 2:66] | _fields(blocks[:, 66:74], 1, 8) << 8
    scales = _half(blocks) * (1 + 2 * _fields(blocks[:, 106:], 4, 2).astype(np.float32))
    return _spread(scales, _rows("iq3_s", codes)) * _negative(blocks[:, 74:106])


def iq1_s(blocks: Bytes) -> Floats:
    """Of eight values a code of eleven bits, of which three lie apart; of 32 a scale, and the sign of the offset."""
    high = _words(blocks[:, 34:], "<u2")
    codes = blocks[:, 2:34] | _fields(high & np.uint32(0xFFF), 3, 4) << 8
    scales = _half(blocks) * (2 * (high >> 12 & np.uint32(7)) + 1).astype(np.float32)
    offset = np.where(high >> 15, -_OFFSET, _OFFSET).astype(np.float32)
    return _spread(scales, _rows("iq1", codes) + np.repeat(offset, 32, axis=1))


def iq1_m(blocks: Bytes) -> Floats:
    """Of eight values a code of eleven bits and the sign of the offset; of 16 a scale. The block's own float16 is the
    last four bits of four words of scales.
    """
    words = _words(blocks[:, 48:], "<u2")
    whole = ((words >> 12) << np.arange(0, 16, 4, dtype=np.uint32)).sum(1, dtype=np.uint32).astype("<u2")
    scales = whole.view("<f2").astype(np.float32)[:, None] * (2 * _fields(words, 3, 4) + 1).astype(np.float32)
    high = _fields(blocks[:, 32:48], 4, 2)
    codes = blocks[:, :32] | (high & np.uint32(7)) << 8
    offset = np.where(high >> 3, -_OFFSET, _OFFSET).astype(np.float32)
    return _spread(scales, _rows("iq1", codes) + np.repeat(offset, 8, axis=1))
