"""The CPU kernels for encoding and decoding equal the reference, code for code."""

import itertools

import pytest
import torch

from families import slow_unless
from halfstep import formats, quantize
from halfstep.errors import QuantizationError
from halfstep.kernels.cpu import codes as kernel, element_codes
from halfstep.kernels.cpu.compiled import CHUNK
from halfstep.quant.cast import CONTAINERS, decode, encode, pack
from halfstep.quant.quantizer import Quantizer
from kernels.inputs import OVERFLOWS, ROUNDINGS, all_formats, inputs
from oracles.numbers import same_bits


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NARROW = [f for f in all_formats() if f.bits <= 16]
NARROW_INPUTS = {torch.bfloat16: ("int8", "nf4"), torch.float16: ()}
"""Formats tested fast with bfloat16 too, each another compilation; the rest and float16 are slow tests."""
every_format_and_dtype = pytest.mark.parametrize(
    ("format", "dtype"),
    slow_unless(
        lambda case: case[1] == torch.float32 or case[0].name in NARROW_INPUTS[case[1]],
        itertools.product(NARROW, DTYPES),
    ),
    ids=lambda part: getattr(part, "name", str(part)),
)


def assert_encodes(x, format, rounding, overflow):
    out = torch.empty(x.shape, dtype=CONTAINERS[format.storage_bits])
    seed = 99 if rounding == "stochastic" else None
    assert kernel.run(x, out, format, rounding, overflow, seed)
    assert torch.equal(out.int(), encode(x, format, rounding, overflow, seed).int())


@pytest.mark.quick("float8_e4m3-torch.float32", "nf4-torch.float32", "e2m0-torch.float32")
@every_format_and_dtype
def test_every_format_rounding_and_overflow_encodes_like_the_reference(format, dtype):
    x = inputs(format, dtype)
    x = x if format.has_nan else x[~x.isnan()]
    for rounding in ROUNDINGS:
        for overflow in OVERFLOWS:
            if element_codes.scalars(format, "nearest_even", "saturate") is not None:
                assert_encodes(x, format, rounding, overflow)


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e2m1fn", "e3m2fn", "fp16", "bf16", "int8", "ocp_int8", "uint4"])
@pytest.mark.parametrize("size", [0, 1, 17, CHUNK + 1, 3 * CHUNK])
def test_common_formats_are_encoded_at_any_size(name, size):
    assert_encodes(torch.randn(size), formats.get(name), "nearest_even", "saturate")


@pytest.mark.parametrize("name", ["e2m1fn", "int8"])
@pytest.mark.parametrize("where", [0, 2 * CHUNK + 3])
def test_nan_without_a_code_is_reported(name, where):
    x = torch.ones(2 * CHUNK + 4)
    out = torch.empty(x.shape, dtype=torch.uint8)
    assert kernel.run(x, out, formats.get(name), "nearest_even", "saturate", None)
    x[where] = torch.nan
    assert not kernel.run(x, out, formats.get(name), "nearest_even", "saturate", None)


@pytest.mark.quick(
    "float8_e3m4-torch.float32",
    "float8_e4m3b11fnuz-torch.float32",
    "float8_e4m3fnuz-torch.float32",
    "float8_e5m2fnuz-torch.float32",
    "int8-torch.float32",
    "nf4-torch.bfloat16",
)
@every_format_and_dtype
def test_every_code_decodes_like_the_reference(format, dtype):
    codes = torch.arange(1 << format.bits).to(CONTAINERS[format.storage_bits])
    out = torch.empty(codes.shape, dtype=dtype)
    done = kernel.run_decode(codes, out, format)
    assert done is (True if format.bits <= 16 else None)
    if done:
        same_bits(out, decode(codes, format, dtype))


@pytest.mark.parametrize("name", ["e4m3fn", "e2m1fn", "nf4", "posit8_2", "posit16_2", "e8m0fnu", "int8", "fp16"])
def test_common_formats_are_decoded(name):
    format = formats.get(name)
    codes = torch.arange(2 * CHUNK + 5).remainder(1 << format.bits).to(CONTAINERS[format.storage_bits])
    out = torch.empty(codes.shape)
    assert kernel.run_decode(codes, out, format)
    same_bits(out, decode(codes, format))


@pytest.mark.parametrize("name", ["e2m1fn", "nf4", "e3m2fn"])
def test_an_invalid_code_is_reported(name):
    codes = torch.zeros(CHUNK + 3, dtype=torch.uint8)
    assert kernel.run_decode(codes, torch.empty(codes.shape), formats.get(name))
    codes[-1] = 1 << formats.get(name).bits
    assert not kernel.run_decode(codes, torch.empty(codes.shape), formats.get(name))


PACKED = ("e2m1fn", "e3m2fn", "e2m3fn", "int4", "uint4")


def packed_format_and_dtype(*more):
    """Parametrizes packed formats and dtypes; float32 and `more` (name, dtype) are fast, since each dtype is another
    compilation."""
    return pytest.mark.parametrize(
        ("format", "dtype"),
        slow_unless(
            lambda case: case[1] == torch.float32 or (case[0].name, case[1]) in more,
            itertools.product(map(formats.get, PACKED), DTYPES),
        ),
        ids=lambda part: getattr(part, "name", str(part)),
    )


packed_format = pytest.mark.parametrize("format", [formats.get(name) for name in PACKED], ids=lambda f: f.name)


@pytest.mark.quick("int4-torch.float32")
@packed_format_and_dtype()
def test_codes_are_packed_by_the_kernel(format, dtype):
    x = inputs(format, dtype)
    x = x[~x.isnan()]
    x = x[: len(x) // 4 * 4].view(1, -1)
    for rounding in ROUNDINGS:
        for overflow in OVERFLOWS:
            expected = pack(encode(x, format, rounding, overflow, 99), format.bits)
            out = torch.full((expected.numel() + 1,), 7, dtype=torch.uint8)  # one element more than is written
            assert kernel.run(x, out[:-1], format, rounding, overflow, 99, packed=True)
            assert torch.equal(out[:-1], expected[0])
            assert out[-1] == 7


@packed_format_and_dtype(("float4_e2m1fn", torch.bfloat16))
def test_packed_codes_are_decoded_by_the_kernel(format, dtype):
    codes = torch.arange(3 * CHUNK + 8).remainder(1 << format.bits).byte().view(1, -1)
    stored, out = pack(codes, format.bits), torch.empty(codes.shape, dtype=dtype)
    assert kernel.run_decode(stored, out, format, packed=True)
    same_bits(out, decode(codes, format, dtype))


@pytest.mark.quick("1-shape1-uint4", "1-shape5-int4", "1-shape5-uint4")
@packed_format
@pytest.mark.parametrize(
    "shape",
    [(), (0,), (1,), (5,), (8,), (0, 4), (3, 0), (3, 5), (2, 6), (7, 4), (2, 3, 12), (3, CHUNK + 4), (3, CHUNK + 1)],
)
@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_any_shape_is_packed_like_the_reference(format, shape, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
        for given in (x, x.mT if x.dim() > 1 else x):
            for rounding in ("nearest_even", "stochastic"):
                expected = Quantizer(format, rounding).quantize(given, 5)
                found = quantize(given, format, rounding=rounding, generator=5)
                assert torch.equal(found.codes, expected.codes)
                same_bits(found.dequantize(), expected.dequantize())
                same_bits(found.dequantize(torch.bfloat16), expected.dequantize(torch.bfloat16))
    finally:
        torch.set_num_threads(before)


@packed_format
@pytest.mark.parametrize("where", [0, CHUNK + 3])
def test_nan_in_a_packed_format_is_reported(format, where):
    x = torch.zeros(1, 2 * CHUNK)
    x[0, where] = torch.nan
    with pytest.raises(QuantizationError, match="1 of 32768 elements are NaN"):
        quantize(x, format)


def test_rows_that_do_not_fill_their_bytes_are_refused():
    format, stored = formats.get("e2m1fn"), torch.zeros(3, 3, dtype=torch.uint8)
    assert kernel.run(torch.zeros(3, 6), stored, format, "nearest_even", "saturate", None, packed=True)
    assert kernel.run(torch.zeros(3, 5), stored, format, "nearest_even", "saturate", None, packed=True) is None
    assert kernel.run(torch.zeros(3, 8), stored, format, "nearest_even", "saturate", None, packed=True) is None
    assert kernel.run_decode(stored, torch.zeros(3, 5), format, packed=True) is None
    assert kernel.run(torch.zeros(3, 3), stored, formats.get("e4m3fn"), "up", "saturate", None, packed=True) is None


def test_unsupported_tensors_are_refused():
    x, format = torch.zeros(4), formats.get("e4m3fn")
    assert kernel.run(x, torch.empty(4, dtype=torch.uint16), format, "nearest_even", "saturate", None) is None
    assert kernel.run(x, torch.empty(5, dtype=torch.uint8), format, "nearest_even", "saturate", None) is None
    assert kernel.run(x.double(), torch.empty(4, dtype=torch.uint8), format, "nearest_even", "saturate", None) is None
    assert kernel.run_decode(x, x, format) is None
    assert kernel.run_decode(torch.zeros(4, dtype=torch.uint8), torch.empty(4, 1), format) is None
