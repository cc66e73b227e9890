"""Formats have the properties that standards and vendors define."""

import math
from statistics import NormalDist

import gfloat.formats as gf
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import decode_float
from hypothesis import given, strategies as st

import halfstep
from families import slow_unless
from halfstep import formats
from halfstep.errors import FormatError
from halfstep.formats import Float
from oracles import formats as oracle


# name: exponent bits, mantissa bits, bias, max, min normal, min subnormal, eps, infinity, NaN, -0, finite values
TABLE = {
    "fp32": (8, 23, 127, (2 - 2.0**-23) * 2.0**127, 2.0**-126, 2.0**-149, 2.0**-23, True, True, True, None),
    "tf32": (8, 10, 127, (2 - 2.0**-10) * 2.0**127, 2.0**-126, 2.0**-136, 2.0**-10, True, True, True, None),
    "bf16": (8, 7, 127, 3.3895313892515355e38, 2.0**-126, 2.0**-133, 2.0**-7, True, True, True, 65279),
    "fp16": (5, 10, 15, 65504.0, 2.0**-14, 2.0**-24, 2.0**-10, True, True, True, 63487),
    "float8_e5m2": (5, 2, 15, 57344.0, 2.0**-14, 2.0**-16, 2.0**-2, True, True, True, 247),
    "float8_e4m3fn": (4, 3, 7, 448.0, 2.0**-6, 2.0**-9, 2.0**-3, False, True, True, 253),
    "float8_e4m3": (4, 3, 7, 240.0, 2.0**-6, 2.0**-9, 2.0**-3, True, True, True, 239),
    "float8_e5m2fnuz": (5, 2, 16, 57344.0, 2.0**-15, 2.0**-17, 2.0**-2, False, True, False, 255),
    "float8_e4m3fnuz": (4, 3, 8, 240.0, 2.0**-7, 2.0**-10, 2.0**-3, False, True, False, 255),
    "float8_e4m3b11fnuz": (4, 3, 11, 30.0, 2.0**-10, 2.0**-13, 2.0**-3, False, True, False, 255),
    "float8_e3m4": (3, 4, 3, 15.5, 2.0**-2, 2.0**-6, 2.0**-4, True, True, True, 223),
    "float6_e3m2fn": (3, 2, 3, 28.0, 2.0**-2, 2.0**-4, 2.0**-2, False, False, True, 63),
    "float6_e2m3fn": (2, 3, 1, 7.5, 1.0, 2.0**-3, 2.0**-3, False, False, True, 63),
    "float4_e2m1fn": (2, 1, 1, 6.0, 1.0, 0.5, 0.5, False, False, True, 15),
}
# Codes of infinities, and how many codes are NaN.
SPECIALS = {
    "bf16": ([0x7F80, 0xFF80], 254),
    "fp16": ([0x7C00, 0xFC00], 2046),
    "float8_e5m2": ([0x7C, 0xFC], 6),
    "float8_e4m3fn": ([], 2),
    "float8_e4m3": ([0x78, 0xF8], 14),
    "float8_e5m2fnuz": ([], 1),
    "float8_e4m3fnuz": ([], 1),
    "float8_e4m3b11fnuz": ([], 1),
    "float8_e3m4": ([0x70, 0xF0], 30),
    "float6_e3m2fn": ([], 0),
    "float6_e2m3fn": ([], 0),
    "float4_e2m1fn": ([], 0),
    "float8_e8m0fnu": ([], 1),
    "posit8_2": ([], 1),
    "posit16_1": ([], 1),
    "nf4": ([], 0),
    "int8": ([], 0),
}
# The dtypes of ml_dtypes and numpy, whose codes must equal halfstep's; narrow ones use the low bits of a byte.
CODES = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e4m3": ml_dtypes.float8_e4m3,
    "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e4m3b11fnuz": ml_dtypes.float8_e4m3b11fnuz,
    "float8_e3m4": ml_dtypes.float8_e3m4,
    "float6_e3m2fn": ml_dtypes.float6_e3m2fn,
    "float6_e2m3fn": ml_dtypes.float6_e2m3fn,
    "float4_e2m1fn": ml_dtypes.float4_e2m1fn,
    "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
}
GFLOAT = {
    "float8_e5m2": gf.format_info_ocp_e5m2,
    "float8_e4m3fn": gf.format_info_ocp_e4m3,
    "float6_e3m2fn": gf.format_info_ocp_e3m2,
    "float6_e2m3fn": gf.format_info_ocp_e2m3,
    "float4_e2m1fn": gf.format_info_ocp_e2m1,
    "float8_e8m0fnu": gf.format_info_ocp_e8m0,
    "fp16": gf.format_info_binary16,
    "bf16": gf.format_info_bfloat16,
}
NAMES = {
    "fp32": ["float32", "float", "FP32", "e8m23", torch.float32, torch.float],
    "tf32": ["TF32", "e8m10"],
    "fp16": ["half", "float16", "e5m10", torch.float16, torch.half],
    "bf16": ["bfloat16", "torch.bfloat16", "e8m7", torch.bfloat16],
    "float8_e4m3fn": ["e4m3fn", torch.float8_e4m3fn],
    "float8_e5m2": ["e5m2", "E5M2", torch.float8_e5m2],
    "float8_e4m3": ["e4m3"],
    "float8_e3m4": ["e3m4"],
    "float8_e5m2fnuz": ["e5m2fnuz", torch.float8_e5m2fnuz],
    "float8_e4m3fnuz": ["e4m3fnuz", torch.float8_e4m3fnuz],
    "float8_e8m0fnu": ["e8m0", "e8m0fnu", torch.float8_e8m0fnu],
    "float6_e3m2fn": ["e3m2fn", "e3m2", "fp6_e3m2"],
    "float6_e2m3fn": ["e2m3fn", "e2m3", "fp6_e2m3"],
    "float4_e2m1fn": ["e2m1fn", "e2m1", "fp4"],
}
every_listed = pytest.mark.parametrize("name", oracle.LISTED)


def decoded_values(name):
    f = formats.get(name)
    return np.array([f.decode(code) for code in range(2**f.bits)])


@pytest.mark.parametrize("name", TABLE)
def test_float_formats_have_the_properties_of_the_table(name):
    f = formats.get(name)
    found = (f.exponent_bits, f.mantissa_bits, f.bias, f.max, f.min_normal, f.min_subnormal, f.eps)
    assert (*found, f.has_infinity, f.has_nan, f.has_negative_zero) == TABLE[name][:10]
    assert (f.min, f.smallest, f.signed) == (-f.max, f.min_subnormal, True)
    if distinct := TABLE[name][10]:
        assert len(f.values()) == distinct


def test_the_scale_format_has_neither_sign_nor_zero():
    f = formats.get("e8m0")
    assert (f.max, f.min, f.smallest, f.eps, f.signed, f.has_infinity, f.has_nan, f.has_negative_zero) == (
        *(2.0**127, 2.0**-127, 2.0**-127, 1.0, False, False, True, False),
    )
    assert (len(f.values()), f.decode(0xFE), f.decode(0)) == (255, 2.0**127, 2.0**-127)


@pytest.mark.quick("float8_e5m2", "float8_e5m2fnuz", "float8_e3m4", "float6_e2m3fn", "float4_e2m1fn", "float8_e8m0fnu")
@pytest.mark.parametrize("name", SPECIALS)
def test_codes_of_infinities_and_the_count_of_nans(name):
    infinities, nans = SPECIALS[name]
    values = decoded_values(name)
    assert np.flatnonzero(np.isinf(values)).tolist() == infinities
    assert np.isnan(values).sum() == nans


@pytest.mark.quick("float8_e5m2", "float8_e4m3b11fnuz", "float8_e3m4", "int8", "int4", "bnb_fp4")
@pytest.mark.parametrize("name", slow_unless(lambda name: formats.get(name).bits <= 8 or name == "fp16", oracle.LISTED))
def test_values_and_boundaries_equal_the_oracles(name):
    f, expected = formats.get(name), oracle.listed(name)
    np.testing.assert_array_equal(decoded_values(name), expected.decoded)
    np.testing.assert_array_equal(f.values(), expected.values)
    np.testing.assert_array_equal(f.boundaries(), expected.cuts)
    assert (f.bits, f.max, f.min, f.signed) == (expected.bits, expected.max, expected.min, expected.signed)
    assert f.smallest == expected.values[expected.values > 0][0]
    assert (f.has_infinity, f.has_nan) == (expected.infinity, expected.not_a_number)
    assert f.has_negative_zero == expected.negative_zero


@pytest.mark.quick("bf16")
@every_listed
def test_eps_is_the_gap_above_one(name):
    above = [v for v in oracle.listed(name).values if v > 1]
    expected = above[0] - 1 if above and 1 in oracle.listed(name).values else None
    assert formats.get(name).eps == expected


@pytest.mark.parametrize("name", CODES)
def test_every_code_decodes_as_in_ml_dtypes_and_numpy(name):
    bits = formats.get(name).bits
    codes = np.arange(2**bits, dtype=np.uint16 if bits > 8 else np.uint8)
    with np.errstate(invalid="ignore"):  # NaN codes
        expected = codes.view(CODES[name]).astype(np.float64)
    found = decoded_values(name)
    np.testing.assert_array_equal(found, expected)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(found[number]), np.signbit(expected[number]))


@pytest.mark.parametrize("name", GFLOAT)
def test_every_code_decodes_as_in_gfloat(name):
    f = formats.get(name)
    for code in range(0, 2**f.bits, 1 if f.bits <= 8 else 97):
        expected = decode_float(GFLOAT[name], code).fval
        assert f.decode(code) == expected or (math.isnan(expected) and math.isnan(f.decode(code)))


@pytest.mark.parametrize(
    ("name", "positive"),
    [
        ("e2m1", [0.5, 1, 1.5, 2, 3, 4, 6]),
        ("fp6_e2m3", [*np.arange(1, 16) / 8, *np.arange(8, 16) / 4, *np.arange(8, 16) / 2]),
        (
            "fp6_e3m2",
            [k / 16 for k in (*range(1, 9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 65, 8))]
            + [*range(5, 9), *range(10, 17, 2), *range(20, 29, 4)],
        ),
        ("bnb_fp4", list(np.array([0.0625, 2, 3, 4, 6, 8, 12], np.float32) / np.float32(12))),
        ("int4", [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_values_of_small_formats(name, positive):
    assert list(formats.get(name).values()) == [-v for v in reversed(positive)] + [0] + positive


@pytest.mark.parametrize(
    ("name", "largest"),
    [
        ("e4m3fn", 0.013671875),
        ("e5m2", 4.57763671875e-5),
        ("e4m3fnuz", 0.0068359375),
        ("e5m2fnuz", 2.288818359375e-5),
        ("e3m4", 0.234375),
    ],
)
def test_largest_subnormals_of_fp8_formats(name, largest):
    f = formats.get(name)
    assert max(v for v in f.values() if v < f.min_normal) == largest


@pytest.mark.parametrize(
    ("bits", "es", "largest", "ulp"),
    [(8, 0, 6, 5), (8, 1, 12, 4), (8, 2, 24, 3), (16, 1, 28, 12), (16, 2, 56, 11), (32, 2, 120, 27)],
)
def test_properties_of_posits(bits, es, largest, ulp):
    f = formats.get(f"posit{bits}_{es}")
    assert (f.bits, f.max, f.min, f.smallest) == (bits, 2.0**largest, -(2.0**largest), 2.0**-largest)
    assert (f.eps, f.has_nan, f.has_infinity, f.has_negative_zero) == (2.0**-ulp, True, False, False)
    assert (f.decode(1 << bits - 2), f.decode(1), f.decode(0)) == (1.0, 2.0**-largest, 0.0)
    assert math.isnan(f.decode(1 << bits - 1))


@given(data=st.data(), bits=st.integers(2, 32), es=st.integers(0, 5))
def test_posit_codes_decode_alike_by_two_methods(data, bits, es):
    """Two readings of the standard, over every size: by the magnitude, and the closed form on the bits as they are."""
    code = data.draw(st.integers(0, 2**bits - 1))
    first, second = oracle.posit_by_magnitude(code, bits, es), oracle.posit_closed_form(code, bits, es)
    assert first == second
    found = formats.get(f"posit{bits}_{es}").decode(code)
    assert math.isnan(found) if first is None else found == first


@pytest.mark.parametrize(("bits", "es"), [(8, 0), (8, 1), (8, 2), (9, 3), (10, 1)])
def test_the_oracles_two_methods_agree_on_every_posit_code(bits, es):
    for code in range(2**bits):
        assert oracle.posit_by_magnitude(code, bits, es) == oracle.posit_closed_form(code, bits, es)


@pytest.mark.parametrize("name", ["posit8_0", "posit8_2", "posit16_1"])
def test_posits_are_ordered_and_negated_like_signed_integers(name):
    f = formats.get(name)
    values = decoded_values(name)
    middle = 2 ** (f.bits - 1)
    ordered = np.concatenate([values[middle + 1 :], values[:middle]])
    assert (np.diff(ordered) > 0).all()
    np.testing.assert_array_equal(values[1:middle], -values[:middle:-1])


@pytest.mark.slow
def test_posits_that_bfloat16_float16_and_float32_represent():
    """Every 8-bit posit is exact in bfloat16; of posit8_2, 8 values are too large for float16."""
    for name in ("posit8_0", "posit8_1", "posit8_2"):
        values = torch.tensor(formats.get(name).values(), dtype=torch.float64)
        assert (values.bfloat16().double() == values).all()
        assert (values.half().double() != values).sum() == (8 if name == "posit8_2" else 0)
    for name in ("posit16_1", "posit16_2"):
        values = torch.tensor(formats.get(name).values(), dtype=torch.float64)
        assert (values.float().double() == values).all()


@pytest.mark.parametrize(
    ("name", "bits", "storage", "bytes"),
    [
        ("fp32", 32, 32, 4),
        ("tf32", 19, 32, 4),
        ("bf16", 16, 16, 2),
        ("e5m2", 8, 8, 1),
        ("fp6_e3m2", 6, 8, 0.75),
        ("fp4", 4, 8, 0.5),
        ("nf4", 4, 8, 0.5),
        ("int4", 4, 8, 0.5),
        ("posit16_1", 16, 16, 2),
        ("posit32_2", 32, 32, 4),
        ("e6m3", 10, 16, 2),
    ],
)
def test_bits_used_and_bytes_stored(name, bits, storage, bytes):
    f = formats.get(name)
    assert (f.bits, f.storage_bits, f.bytes) == (bits, storage, bytes)


@pytest.mark.parametrize("name", oracle.WIDE)
def test_listing_the_values_of_a_wide_format_raises(name):
    with pytest.raises(FormatError, match=r"has \d+ bits.* at most 16"):
        formats.get(name).values()
    with pytest.raises(FormatError, match=r"has \d+ bits.* at most 16"):
        formats.get(name).boundaries() if name != "posit32_2" else formats.get(name).values()


@pytest.mark.parametrize("name", ["e4m3fn", "int8", "posit8_2", "nf4", "e8m0", "fp32"])
@pytest.mark.parametrize("past", [-1, 0])
def test_decoding_a_code_out_of_range_raises(name, past):
    f = formats.get(name)
    with pytest.raises(FormatError, match=f"{f.name} has codes 0 to "):
        f.decode(past or 2**f.bits)


@pytest.mark.parametrize(("name", "alias"), [(n, a) for n, aliases in NAMES.items() for a in aliases])
def test_formats_are_found_by_name_alias_and_dtype(name, alias):
    assert formats.get(alias) is formats.get(name)


def test_get_returns_a_given_format():
    assert formats.get(formats.get("bf16")) is formats.get("bf16")


@pytest.mark.parametrize(
    ("name", "words"),
    [("bf61", "'bf61'; nearest: bf16"), ("e9", "Known: "), (None, "None"), ("mxfp4", "block format"), ("e1m2", "e1m2")],
)
def test_unknown_names_raise_and_suggest_the_nearest(name, words):
    with pytest.raises(FormatError, match=words) as caught:
        formats.get(name)
    assert isinstance(caught.value, ValueError)


def test_names_are_listed_from_the_widest():
    sizes = [formats.get(name).bytes for name in formats.names()]
    assert sizes == sorted(sizes, reverse=True)
    assert formats.names()[0] == "fp32"


@pytest.mark.parametrize("name", oracle.NAMES)
def test_every_format_names_its_source(name):
    assert formats.get(name).source


@given(exponent=st.integers(2, 8), mantissa=st.integers(0, 4))
def test_any_exponent_and_mantissa_bits_name_an_ieee_format(exponent, mantissa):
    """`e5m2`, `e6m3` ...: IEEE style, unless the name is that of a format (`e2m1` is OCP's, without infinities)."""
    f = formats.get(f"e{exponent}m{mantissa}")
    if f.name in formats.names():
        return
    expected = oracle.make_float(f.name, exponent, mantissa, 2 ** (exponent - 1) - 1, "ieee")
    np.testing.assert_array_equal(f.values(), expected.values)
    assert (f.bits, f.max, f.min_normal) == (1 + exponent + mantissa, expected.max, 2.0 ** (2 - 2 ** (exponent - 1)))
    x = torch.linspace(-2 * min(f.max, 1e30), 2 * min(f.max, 1e30), 501)
    for overflow in oracle.OVERFLOWS:
        wanted = torch.from_numpy(expected.round(x.double().numpy(), "nearest_even", overflow))
        torch.testing.assert_close(
            halfstep.round_to(x, f, overflow=overflow, dtype=torch.float64), wanted, rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("e1m2", 1, 2, 1), "at least 2|2 to 10 exponent bits"),
        (("wide", 8, 24, 127), "at most 32 bits"),
        (("negative", 4, -1, 7), "-1 mantissa bits"),
        (("odd", 4, 3, 7, "weird"), "specials 'weird'"),
        (("far", 4, 3, 700), "bias 700"),
    ],
)
def test_invalid_floats_raise(arguments, words):
    with pytest.raises(FormatError, match=words):
        Float(*arguments, source="made up")


@pytest.mark.parametrize(("bits", "es"), [(1, 0), (33, 2), (8, 6), (8, -1)])
def test_invalid_posits_raise(bits, es):
    with pytest.raises(FormatError, match=r"2 to 32 bits and es from 0 to 5"):
        formats.posit(bits, es)


@pytest.mark.parametrize(
    ("table", "words"),
    [((0.0, 1.0, 2.0), "3 entries"), ((0.0, 1.0, 2.0, math.inf), "finite"), ((0.0, -1.0, -2.0, -3.0), "positive")],
)
def test_invalid_codebooks_raise(table, words):
    with pytest.raises(FormatError, match=words):
        formats.Codebook("made", table, source="made up")


@pytest.mark.parametrize(("low", "high"), [(1, 3), (-9, 7), (0, 0), (0, 2**16)])
def test_invalid_integers_raise(low, high):
    with pytest.raises(FormatError, match=f"range {low} to {high}"):
        formats.Integer("made", low, high, source="made up")


def test_round_to_takes_a_custom_float():
    e8m3 = formats.ieee("e8m3", 8, 3, "made up")
    x = torch.tensor([1.0, 1.06, 1.07, -1.1875, 3e38, 2.0**-128])
    expected = torch.tensor([1.0, 1.0, 1.125, -1.25, 14 * 2.0**124, 2.0**-128])
    torch.testing.assert_close(halfstep.round_to(x, e8m3), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_to_and_encode_take_a_custom_codebook(dtype):
    book = formats.Codebook("cubes", (-1.0, -0.125, 0.125, 1.0), source="made up")
    x = torch.tensor([-3.0, -0.5, -0.1, 0.0, 0.25, 0.5625, 0.57, 2.0]).to(dtype)
    expected = torch.tensor([-1.0, -0.125, -0.125, -0.125, 0.125, 0.125, 1.0, 1.0]).to(dtype)
    torch.testing.assert_close(halfstep.round_to(x, book), expected, rtol=0, atol=0)
    assert halfstep.encode(x, book).tolist() == [0, 1, 1, 1, 2, 2, 3, 3]


def test_nf4_values_are_quantiles_of_the_normal_distribution():
    """The construction of QLoRA: quantiles at 8 and 9 evenly spaced points, with zero, divided by the largest."""
    inverse = NormalDist().inv_cdf
    positive = [inverse(p) for p in np.linspace(0.9677083, 0.5, 9)[:-1]]
    negative = [-inverse(p) for p in np.linspace(0.9677083, 0.5, 8)[:-1]]
    made = sorted([*positive, 0.0, *negative])
    np.testing.assert_allclose(np.array(made) / max(made), formats.get("nf4").values(), rtol=0, atol=2e-7)
