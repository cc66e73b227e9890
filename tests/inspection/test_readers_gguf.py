"""GGUF: the header, and block types against decoders written from the layouts, one value at a time.

halfstep's decoders were also compared with those of the gguf package (0.19) on random blocks, with equal bits."""

import hashlib
import struct

import numpy as np
import pytest
from kinds import GGUF_TYPES, gguf, gguf_bytes, stored_bits, text

import halfstep
from halfstep.errors import CheckpointError
from halfstep.inspection import open_checkpoint
from halfstep.inspection.gguf_blocks import BLOCKS


def half(block, at):
    return float(np.frombuffer(block, "<f2", 1, at)[0])


def nibble(block, at, i, width=16):
    """The i-th 4-bit code after byte `at`: the low halves of `width` bytes come first, then their high halves."""
    return block[at + i % width] >> (4 if i >= width else 0) & 15


def bit(block, at, i):
    return block[at + i // 8] >> (i % 8) & 1


def signed(byte):
    return byte - 256 if byte > 127 else byte


def scale_k4(block, j):
    """The j-th scale and minimum of a q4_k or q5_k block: get_scale_min_k4 of ggml-quants.c."""
    q = block[4:16]
    if j < 4:
        return q[j] & 63, q[j + 4] & 63
    return (q[j + 4] & 15) | (q[j - 4] >> 6) << 4, (q[j + 4] >> 4) | (q[j] >> 6) << 4


def q2_k(b, i):
    part, rest = divmod(i, 128)
    shift, lane = 2 * (rest // 32), rest % 32
    scale = b[8 * part + rest // 16]
    return half(b, 80) * (scale & 15) * (b[16 + 32 * part + lane] >> shift & 3) - half(b, 82) * (scale >> 4)


def q3_k(b, i):
    part, rest = divmod(i, 128)
    lane, group = rest % 32, i // 16
    low = b[96 + group % 8] >> (4 if group >= 8 else 0) & 15
    scale = (low | (b[104 + group % 4] >> 2 * (group // 4) & 3) << 4) - 32
    code = (b[32 + 32 * part + lane] >> 2 * (rest // 32) & 3) - (0 if b[lane] >> (i // 32) & 1 else 4)
    return half(b, 108) * scale * code


def q4_k(b, i):
    scale, least = scale_k4(b, i // 32)
    code = b[16 + 32 * (i // 64) + i % 32] >> (4 if i % 64 >= 32 else 0) & 15
    return half(b, 0) * scale * code - half(b, 2) * least


def q5_k(b, i):
    scale, least = scale_k4(b, i // 32)
    code = b[48 + 32 * (i // 64) + i % 32] >> (4 if i % 64 >= 32 else 0) & 15
    return half(b, 0) * scale * (code + 16 * (b[16 + i % 32] >> i // 32 & 1)) - half(b, 2) * least


def q6_k(b, i):
    part, rest = divmod(i, 128)
    quarter, lane = divmod(rest, 32)
    low = b[64 * part + lane + 32 * (quarter % 2)] >> (4 if quarter >= 2 else 0) & 15
    code = (low | (b[128 + 32 * part + lane] >> 2 * quarter & 3) << 4) - 32
    return half(b, 208) * signed(b[192 + i // 16]) * code


IQ4_NL = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]  # ggml-common.h


def iq4_xs(b, i):
    group = i // 32
    low = b[4 + group // 2] >> (4 if group % 2 else 0) & 15
    high = b[2 + group // 4] >> 2 * (group % 4) & 3
    return half(b, 0) * ((low | high << 4) - 32) * IQ4_NL[nibble(b, 8 + 16 * group, i % 32)]


def tq1_0(b, i):
    """Base-3 digits; a byte holds five of them as a fraction of 256."""
    if i < 160:
        at, digit = i % 32, i // 32
    elif i < 240:
        at, digit = 32 + (i - 160) % 16, (i - 160) // 16
    else:
        at, digit = 48 + (i - 240) % 4, (i - 240) // 4
    return half(b, 52) * ((b[at] * 3**digit % 256) * 3 // 256 - 1)


def nvfp4(b, i):
    code, element = b[i // 16] & 127, nibble(b, 4 + 8 * (i // 16), i % 16, 8)
    scale = 0 if code == 127 else code % 8 * 2.0**-9 if code < 8 else (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7)
    return scale * E2M1[element & 7] * (-1 if element & 8 else 1)


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]

REFERENCE = {
    "q4_0": lambda b, i: half(b, 0) * (nibble(b, 2, i) - 8),
    "q4_1": lambda b, i: half(b, 0) * nibble(b, 4, i) + half(b, 2),
    "q5_0": lambda b, i: half(b, 0) * (nibble(b, 6, i) + 16 * bit(b, 2, i) - 16),
    "q5_1": lambda b, i: half(b, 0) * (nibble(b, 8, i) + 16 * bit(b, 4, i)) + half(b, 2),
    "q8_0": lambda b, i: half(b, 0) * signed(b[2 + i]),
    "q2_k": q2_k,
    "q3_k": q3_k,
    "q4_k": q4_k,
    "q5_k": q5_k,
    "q6_k": q6_k,
    "q8_k": lambda b, i: struct.unpack("<f", b[:4])[0] * signed(b[4 + i]),
    "iq4_nl": lambda b, i: half(b, 0) * IQ4_NL[nibble(b, 2, i)],
    "iq4_xs": iq4_xs,
    "tq1_0": tq1_0,
    "tq2_0": lambda b, i: half(b, 64) * ((b[32 * (i // 128) + i % 32] >> 2 * (i % 128 // 32) & 3) - 1),
    "nvfp4": nvfp4,
    "mxfp4": lambda b, i: 2.0 ** (b[0] - 127) * E2M1[nibble(b, 1, i) & 7] * (-1 if nibble(b, 1, i) & 8 else 1),
}


def tame(block, name):
    """The same block with scales between 1 and 2, so that float64 results are a close reference."""
    block = bytearray(block)
    if name == "q8_k":
        return struct.pack("<f", 1.25) + bytes(block[4:])
    places = {
        "iq4_nl": (0,),
        "iq4_xs": (0,),
        "tq1_0": (52,),
        "tq2_0": (64,),
        "nvfp4": (),
        "q2_k": (80, 82),
        "q3_k": (108,),
        "q6_k": (208,),
        "q4_1": (0, 2),
        "q5_1": (0, 2),
        "q4_k": (0, 2),
    }
    for at in {**places, "q5_k": (0, 2), "mxfp4": ()}.get(name, (0,)):
        block[at + 1] = block[at + 1] & 0x83 | 0x3C
    if name == "mxfp4":
        block[0] = 100 + block[0] % 60
    return bytes(block)


@pytest.mark.parametrize("name", REFERENCE)
def test_block_types_decode_like_reference_decoders(name, tmp_path):
    number, values, nbytes = GGUF_TYPES[name]
    random = np.random.default_rng(11)
    blocks = [tame(random.bytes(nbytes), name) for _ in range(6)]
    (tmp_path / "a.gguf").write_bytes(gguf_bytes([("w", (3, 2 * values), number, b"".join(blocks))]))
    checkpoint = open_checkpoint(tmp_path / "a.gguf")
    (tensor,) = checkpoint.tensors
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == (name, (3, 2 * values), 6 * nbytes)
    found = np.frombuffer(stored_bits(tensor), np.float32)
    wanted = np.array([REFERENCE[name](block, i) for block in blocks for i in range(values)])
    terms = np.abs(wanted) + (64 * 2 if "k" in name or name.endswith("1") else 0)  # differences lose digits
    assert (np.abs(found - wanted) <= terms * 2.0**-22).all()
    assert len(np.unique(wanted)) > (2 * 6 if name.startswith("tq") else values // 4)


ORACLE = {
    "q4_0": "498661c3696943db", "q4_1": "93f9bfe1c9ebfc61", "q5_0": "9838f6ced6d0805c",
    "q5_1": "810b17d1dd54fae1", "q8_0": "cb0ea3d7f6dc2884", "q2_k": "2b32a957b420d976",
    "q3_k": "a1d15f82c0de9d65", "q4_k": "11ece4d74d68260b", "q5_k": "8f8306c5852b837b",
    "q6_k": "3427db9c49ef668a", "iq2_xxs": "b08214d2bcdefccf", "iq2_xs": "589e1f8235c6dd68",
    "iq3_xxs": "40ee6f52d0711eeb", "iq1_s": "71a265c9fbb91355", "iq4_nl": "5bd57f9172b540b1",
    "iq3_s": "372095f8d49a9a27", "iq2_s": "405cd44f6bbf1765", "iq4_xs": "c17a75ddb45cb85c",
    "iq1_m": "d8a15f99aa77fac7", "tq1_0": "0495327759676316", "tq2_0": "abf95d447894f15c",
    "mxfp4": "c1d4989ab32c03f9", "nvfp4": "4c29ad87a06b43ea",
}  # fmt: skip
"""Digests of the values that `gguf.quants.dequantize` (package gguf 0.19.0) decodes from the blocks below; -0 counts as
0."""


def blocks_of(kind):
    return np.frombuffer(hashlib.shake_256(kind.name.encode()).digest(100 * kind.nbytes), np.uint8).reshape(100, -1)


def digest(values):
    plain = np.where(np.isnan(values), np.float32(np.nan), values) + np.float32(0)
    return hashlib.sha256(plain.astype(np.float32).tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("kind", [kind for kind in BLOCKS.values() if kind.name in ORACLE], ids=lambda kind: kind.name)
def test_random_blocks_decode_bit_for_bit_like_the_gguf_package(kind):
    with np.errstate(all="ignore"):  # scales are infinite or NaN
        assert digest(kind.decode(blocks_of(kind)).ravel()) == ORACLE[kind.name]


def test_all_decoders_but_q8_k_have_a_digest():
    """The package has no decoder for q8_k; only the one written here covers it."""
    assert {kind.name for kind in BLOCKS.values() if kind.decode} - set(ORACLE) == {"q8_k"}


@pytest.mark.parametrize("number", [number for number, kind in BLOCKS.items() if kind.name in ORACLE])
def test_digests_equal_the_installed_gguf_package(number):
    quants = pytest.importorskip("gguf.quants")
    kind, data = BLOCKS[number], blocks_of(BLOCKS[number])
    with np.errstate(all="ignore"):
        assert digest(quants.dequantize(data, number).ravel()) == ORACLE[kind.name]


def test_all_types_are_listed_and_undecoded_ones_are_named(tmp_path):
    """Sizes by ggml: types 40 and 41 are its newest; a q8_k block has a float32 scale and sixteen sums."""
    sizes = {15: (256, 292), 16: (256, 66), 19: (256, 50), 29: (256, 56), 35: (256, 66), 40: (64, 36), 41: (128, 18)}
    assert {number: (BLOCKS[number].values, BLOCKS[number].nbytes) for number in sizes} == sizes
    entries = [(kind.name, (2, kind.values), number, bytes(2 * kind.nbytes)) for number, kind in BLOCKS.items()]
    (tmp_path / "a.gguf").write_bytes(gguf_bytes(entries))
    report = halfstep.inspect(tmp_path / "a.gguf")
    assert {tensor.name for tensor in report.tensors if tensor.statistics is None} == {
        kind.name for kind in BLOCKS.values() if kind.decode is None
    }
    assert {tensor.layer.scheme for tensor in report.tensors} == {f"GGUF {kind.name}" for kind in BLOCKS.values()}
    assert report.verdict.confidence == "named"


def test_infinite_scales_decode_without_warnings(tmp_path):
    (tmp_path / "a.gguf").write_bytes(gguf_bytes([("w", (32,), 2, b"\x00\x7c" + b"\x08" * 16)]))
    checkpoint = open_checkpoint(tmp_path / "a.gguf")
    found = np.frombuffer(stored_bits(checkpoint.tensors[0]), np.float32)
    assert np.isnan(found[:16]).all()
    assert (found[16:] == -np.inf).all()


def test_header_plain_types_and_metadata(tmp_path):
    path = gguf(tmp_path)
    checkpoint = open_checkpoint(path)
    assert checkpoint.metadata == {
        "general.architecture": "llama", "scale": "0.5", "tokens": "[3 values]", "scores": "[2 values]",
    }  # fmt: skip
    dtypes = {tensor.name: tensor.dtype for tensor in checkpoint.tensors}
    assert dtypes == {
        name: {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}.get(name, name) for name in GGUF_TYPES
    }
    data = path.read_bytes()
    plain = [tensor for tensor in checkpoint.tensors if tensor.name in ("f32", "f16", "bf16")]
    assert all(stored_bits(tensor) in data for tensor in plain)


def test_version_2_and_alignment_64(tmp_path):
    pairs = [("general.alignment", 4, struct.pack("<I", 64))]
    entries = [
        ("a", (3,), 0, np.arange(3, dtype="<f4").tobytes()),
        ("b", (2,), 26, np.arange(2, dtype="<i4").tobytes()),
    ]
    (tmp_path / "a.gguf").write_bytes(gguf_bytes(entries, pairs, version=2, alignment=64))
    checkpoint = open_checkpoint(tmp_path / "a.gguf")
    assert [stored_bits(tensor) for tensor in checkpoint.tensors] == [data for *_, data in entries]


def test_type_without_a_decoder_is_listed_but_not_read(tmp_path):
    (tmp_path / "a.gguf").write_bytes(gguf_bytes([("w", (256,), 9, bytes(320))]))
    checkpoint = open_checkpoint(tmp_path / "a.gguf")
    assert (checkpoint.tensors[0].dtype, checkpoint.tensors[0].nbytes) == ("q8_1", 320)
    with pytest.raises(CheckpointError, match=r"q8_1 is not decoded.*q4_0"):
        list(checkpoint.tensors[0].chunks())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gguf_bytes([], version=1), "version 1; expected 2 or 3"),
        (b"GGUF\0\0\0\3" + bytes(16), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "tensors; expected at most"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "expected at most"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 62), "a name of"),
        (gguf_bytes([], [("k", 9, struct.pack("<IQ", 4, 1 << 61))]), "the header reaches"),
        (gguf_bytes([], [("k", 9, struct.pack("<IQ", 8, 1 << 61))]), "the header reaches"),
        (gguf_bytes([], [("k", 9, struct.pack("<IQ", 9, 1))]), "an array of type 9"),
        (gguf_bytes([], [("k", 13, b"")]), "a value of type 13"),
        (gguf_bytes([], [("k", 7, b"\1")] * 2), "there twice"),
        (gguf_bytes([], [("k", 8, struct.pack("<Q", 2) + b"\xff\xff")]), "not UTF-8"),
        (gguf_bytes([], [("general.alignment", 4, struct.pack("<I", 48))]), "power of two"),
        (gguf_bytes([], [("general.alignment", 8, text("٣٢"))]), "power of two"),
        (gguf_bytes([("w", (1,) * 5, 0, bytes(4))]), "5 dimensions"),
        (gguf_bytes([("w", (1 << 63, 1 << 63), 0, bytes(4))]), "truncated"),
        (gguf_bytes([("w", (33,), 2, bytes(18))]), "blocks have 32"),
        (gguf_bytes([("w", (), 2, bytes(18))]), "blocks have 32"),
        (gguf_bytes([("w", (1,), 99, bytes(4))]), "type 99"),
        (gguf_bytes([("w", (8,), 0, bytes(4))]), "truncated"),
        (gguf_bytes([("w", (1,), 0, bytes(4))] * 2), "called 'w'"),
        (gguf_bytes([("v", (10,), 0, bytes(4)), ("w", (1,), 0, bytes(100))]), "behind the tensor before"),
        (gguf_bytes([("v", (1,), 0, bytes(4)), ("w", (1,), 0, bytes(99))], alignment=4), "a multiple of 32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_broken_headers_raise(data, message, tmp_path):
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "a.gguf")
