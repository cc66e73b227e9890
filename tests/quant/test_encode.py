"""encode and decode: every code of every format, every 16-bit value, published code tables and errors."""

import itertools

import numpy as np
import pytest
import torch

from families import for_each, in_turn, slow_unless
from halfstep import formats
from halfstep.errors import QuantizationError
from halfstep.quant import decode, encode
from oracles import formats as oracle
from oracles.numbers import every_16_bit_value, hard_inputs, same_bits


every_listed = pytest.mark.parametrize("name", oracle.LISTED)
HALF = [torch.bfloat16, torch.float16]


def as_int64(codes):
    """Codes of any dtype as int64."""
    return codes.to(torch.int64)


def code_dtype(name):
    bits = oracle.listed(name).bits
    return torch.uint8 if bits <= 8 else torch.uint16


def every_code(name):
    return torch.arange(2 ** oracle.listed(name).bits).to(code_dtype(name))


@pytest.mark.quick("float8_e5m2", "float8_e3m4", "int4", "nf4", "af4", "dynamic8")
@pytest.mark.parametrize(
    "name", slow_unless(lambda name: formats.get(name).bits != 16 or name == "bf16", oracle.LISTED)
)
def test_every_code_decodes_to_its_value(name):
    expected = torch.from_numpy(oracle.listed(name).decoded)
    codes = every_code(name)
    same_bits(decode(codes, name, torch.float64), expected)
    same_bits(decode(codes, name), expected.float())


@pytest.mark.quick("fp16")
@every_listed
def test_every_code_round_trips(name):
    """But for second codes of one value: NaNs, the two zeros of bnb_fp4, and -128, which symmetric integers skip."""
    format, codes = oracle.listed(name), every_code(name)
    number = torch.from_numpy(~np.isnan(format.decoded))
    own = torch.from_numpy(np.isinf(format.decoded) | np.isin(format.decoded, format.values))
    if name == "bnb_fp4":
        own[8] = False
    back = encode(decode(codes, name, torch.float64), name, overflow="ieee") if format.not_a_number else None
    if back is None:
        back = torch.zeros_like(codes)
        back[number] = encode(decode(codes[number], name, torch.float64), name)
    assert back.dtype == codes.dtype
    torch.testing.assert_close(as_int64(back)[own], as_int64(codes)[own], rtol=0, atol=0)
    assert own.sum() >= len(format.values)
    left = as_int64(back)[~own & number]
    assert left.tolist() == {"bnb_fp4": [0], "int8": [0x81], "int4": [0x9], "ocp_int8": [0x81]}.get(name, [])
    if format.not_a_number:
        assert decode(back, name)[~number].isnan().all()


@pytest.mark.quick(
    "dtype0-saturate-fp16", "dtype0-saturate-posit8_0", "dtype3-ieee-float6_e3m2fn", "dtype3-ieee-dynamic8_unsigned"
)
@every_listed
@pytest.mark.parametrize(
    ("dtype", "overflow"),
    slow_unless(in_turn(HALF, oracle.OVERFLOWS).__contains__, itertools.product(HALF, oracle.OVERFLOWS)),
)
def test_every_16_bit_value_has_the_code_of_its_rounded_value(name, dtype, overflow):
    format, x = oracle.listed(name), every_16_bit_value(dtype)
    if not format.not_a_number:
        x = x[~x.isnan()]
    for rounding in ("nearest_even", "up"):  # the codes of the values that test_round_exactly.py compares in every mode
        expected = format.encode(format.round(x.double().numpy(), rounding, overflow))
        found = encode(x, name, rounding, overflow)
        number = torch.from_numpy(expected >= 0)
        torch.testing.assert_close(as_int64(found)[number], torch.from_numpy(expected)[number], rtol=0, atol=0)
        assert decode(found, name)[~number].isnan().all()


@pytest.mark.quick(
    "float32-float8_e5m2",
    "float32-ocp_int8",
    "float64-float8_e4m3b11fnuz",
    "float64-float6_e3m2fn",
    "float64-int4",
    "float64-uint4",
)
@every_listed
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
def test_codes_at_boundaries_equal_the_oracles(name, dtype):
    format, x = oracle.listed(name), hard_inputs(name, dtype)
    expected = format.encode(format.round(x.astype(np.float64), "nearest_even", "saturate"))
    number = expected >= 0 if format.not_a_number else ~np.isnan(x)
    found = as_int64(encode(torch.from_numpy(x[number]), name))
    torch.testing.assert_close(found, torch.from_numpy(expected[number]), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "infinity", "nans"),
    [
        ("bf16", 0x7F80, [0x7FC0]),
        ("fp16", 0x7C00, [0x7E00]),
        ("e5m2", 0x7C, [0x7D, 0x7E, 0x7F]),
        ("e4m3fn", None, [0x7F]),
        ("float8_e4m3", 0x78, None),
        ("e3m4", 0x70, None),
        ("float8_e5m2fnuz", None, [0x80]),
        ("float8_e4m3fnuz", None, [0x80]),
        ("float8_e4m3b11fnuz", None, [0x80]),
        ("e8m0", None, [0xFF]),
        ("posit8_2", None, [0x80]),
        ("posit16_1", None, [0x8000]),
    ],
)
def test_codes_of_nan_and_infinity(name, infinity, nans):
    f = formats.get(name)
    code = as_int64(encode(torch.tensor([torch.nan]), name)).item()
    assert nans is None or code & 2 ** (f.bits - 1) - 1 in {n & 2 ** (f.bits - 1) - 1 for n in nans}
    assert np.isnan(f.decode(code))
    if infinity:
        minus = infinity | 1 << f.bits - 1
        assert as_int64(encode(torch.tensor([torch.inf, -torch.inf]), name, overflow="ieee")).tolist() == [
            infinity,
            minus,
        ]


def test_overflow_to_nan_keeps_the_sign_of_e4m3fn():
    assert as_int64(encode(torch.tensor([500.0, -500.0]), "e4m3fn", overflow="ieee")).tolist() == [0x7F, 0xFF]


# x: codes of posit8_0, posit8_1, posit8_2, posit16_1, posit16_2, posit32_2
POSITS = ["posit8_0", "posit8_1", "posit8_2", "posit16_1", "posit16_2", "posit32_2"]
POSIT_CODES = {
    0.1: (0x06, 0x15, 0x25, 0x14CD, 0x24CD, 0x24CCCCCD),
    1 / 3: (0x15, 0x25, 0x33, 0x2555, 0x32AB, 0x32AAAAAB),
    np.pi: (0x69, 0x59, 0x4D, 0x5922, 0x4C91, 0x4C90FDAA),
    -1.5: (0xB0, 0xB8, 0xBC, 0xB800, 0xBC00, 0xBC000000),
    100.0: (0x7F, 0x79, 0x6A, 0x7920, 0x6A40, 0x6A400000),
    1e-5: (0x01, 0x01, 0x04, 0x0035, 0x03A8, 0x03A7C5AC),
    1e5: (0x7F, 0x7F, 0x7C, 0x7FC8, 0x7C43, 0x7C435000),
    1.0: (0x40, 0x40, 0x40, 0x4000, 0x4000, 0x40000000),
}


@for_each("x", POSIT_CODES)
@for_each("column", range(6), ids=POSITS.__getitem__)
def test_posit_codes_equal_universals(x, column):
    code = encode(torch.tensor([x], dtype=torch.float64), POSITS[column])
    assert as_int64(code).item() == POSIT_CODES[x][column]


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (4194303.0, 0x7E),
        (4194304.0, 0x7E),  # a tie on the bit string, and 0x7E is even
        (4194305.0, 0x7F),
        (9437184.0, 0x7F),
        (5e6, 0x7F),  # 2^20 is nearer
        (2.0**30, 0x7F),
        (2.0**-25, 0x01),
        (2.0**-22, 0x02),
        (2.0**-22 * (1 - 2.0**-20), 0x01),
    ],
)
def test_posits_round_on_the_bit_string(x, code):
    assert as_int64(encode(torch.tensor([x, -x]), "posit8_2")).tolist() == [code, 256 - code]


@pytest.mark.parametrize(
    ("name", "one", "largest"),
    [("posit8_0", 0x40, 2.0**6), ("posit16_1", 0x4000, 2.0**28), ("posit32_2", 0x40000000, 2.0**120)],
)
def test_largest_and_smallest_posits(name, one, largest):
    found = as_int64(encode(torch.tensor([1.0, 1e300, 1e-300, -1e300, torch.nan], dtype=torch.float64), name)).tolist()
    assert found == [one, 2 * one - 1, 1, 2 * one + 1, 2 * one]
    assert (formats.get(name).max, formats.get(name).smallest) == (largest, 1 / largest)


def test_posit32_codes_round_trip():
    random = torch.from_numpy(np.random.default_rng(0).integers(-(2**31), 2**31, 20000).astype(np.int32))
    random = torch.cat([random, torch.arange(-200, 200, dtype=torch.int32)])
    values = decode(random.view(torch.uint32), "posit32_2", torch.float64)
    torch.testing.assert_close(as_int64(encode(values, "posit32_2")), random.long() & 0xFFFFFFFF, rtol=0, atol=0)
    exact = [oracle.posit_closed_form(code, 32, 2) for code in (random.long() & 0xFFFFFFFF)[::20].tolist()]
    expected = torch.tensor([torch.nan if v is None else float(v) for v in exact], dtype=torch.float64)
    same_bits(values[::20], expected)


def test_fp32_codes_are_the_float32_bits():
    bits = np.random.default_rng(1).integers(-(2**31), 2**31, 20000).astype(np.int32)
    x = torch.from_numpy(bits.view(np.float32))
    number = ~x.isnan()
    codes = encode(x, "fp32", overflow="ieee")
    torch.testing.assert_close(
        as_int64(codes)[number], torch.from_numpy(bits).long()[number] & 0xFFFFFFFF, rtol=0, atol=0
    )
    same_bits(decode(codes, "fp32"), x)


@pytest.mark.parametrize("name", ["int8", "uint4", "float4_e2m1fn", "float6_e3m2fn", "nf4", "dynamic8"])
def test_encoding_nan_in_a_format_without_nan_raises(name):
    with pytest.raises(QuantizationError, match="NaN"):
        encode(torch.tensor([0.5, torch.nan]), name)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (7,), (2, 3, 4)])
@pytest.mark.parametrize("name", ["e4m3fn", "bf16", "posit16_2", "nf4"])
def test_codes_keep_shape_and_ignore_strides(name, shape):
    x = torch.randn(shape)
    codes = encode(x, name)
    assert codes.shape == x.shape
    assert decode(codes, name).shape == x.shape
    if x.dim():
        turned = encode(x.transpose(0, -1), name)
        torch.testing.assert_close(as_int64(turned), as_int64(codes).transpose(0, -1), rtol=0, atol=0)
