"""The formats are the ones that the standards and the vendors define."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import halfstep
from halfstep import formats
from halfstep.errors import FormatError


# name: exponent bits, mantissa bits, bias, max, min normal, min subnormal, eps, infinity, distinct finite values
TABLE = {
    "fp32": (8, 23, 127, (2 - 2.0**-23) * 2.0**127, 2.0**-126, 2.0**-149, 2.0**-23, True, None),
    "tf32": (8, 10, 127, (2 - 2.0**-10) * 2.0**127, 2.0**-126, 2.0**-136, 2.0**-10, True, None),
    "bf16": (8, 7, 127, 3.3895313892515355e38, 2.0**-126, 2.0**-133, 2.0**-7, True, None),
    "fp16": (5, 10, 15, 65504.0, 2.0**-14, 2.0**-24, 2.0**-10, True, None),
    "float8_e5m2": (5, 2, 15, 57344.0, 2.0**-14, 2.0**-16, 2.0**-2, True, 247),
    "float8_e4m3fn": (4, 3, 7, 448.0, 2.0**-6, 2.0**-9, 2.0**-3, False, 253),
}
# The dtypes of ml_dtypes and numpy, whose finite codes must be exactly values().
CODES = {
    "bf16": (ml_dtypes.bfloat16, np.uint16),
    "fp16": (np.float16, np.uint16),
    "float8_e5m2": (ml_dtypes.float8_e5m2, np.uint8),
    "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, np.uint8),
}
NAMES = {
    "fp32": ["float32", "float", "FP32", torch.float32, torch.float],
    "tf32": ["TF32"],
    "fp16": ["half", "float16", torch.float16, torch.half],
    "bf16": ["bfloat16", "torch.bfloat16", torch.bfloat16],
    "float8_e4m3fn": ["e4m3fn", torch.float8_e4m3fn],
    "float8_e5m2": ["e5m2", "E5M2", torch.float8_e5m2],
}


def test_every_format_is_in_the_table():
    assert sorted(formats.names()) == sorted(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_numbers_of_the_table(name):
    f = formats.get(name)
    found = (f.exponent_bits, f.mantissa_bits, f.bias, f.max, f.min_normal, f.min_subnormal, f.eps, f.has_infinity)
    assert found == TABLE[name][:8]


@pytest.mark.parametrize(("name", "bits", "bytes"), [("fp32", 32, 4), ("tf32", 19, 4), ("bf16", 16, 2), ("e5m2", 8, 1)])
def test_bits_used_and_bytes_stored(name, bits, bytes):
    assert (formats.get(name).bits, formats.get(name).bytes) == (bits, bytes)


@pytest.mark.parametrize("name", CODES)
def test_values_are_the_finite_codes(name):
    dtype, code = CODES[name]
    with np.errstate(invalid="ignore"):  # NaN codes
        codes = np.arange(2 ** (np.dtype(code).itemsize * 8), dtype=code).view(dtype).astype(np.float64)
    expected = np.unique(np.abs(codes[np.isfinite(codes)]))
    values = [float(v) for v in formats.get(name).values()]
    np.testing.assert_array_equal(values, expected)
    if distinct := TABLE[name][8]:
        assert 2 * len(values) - 1 == distinct


@pytest.mark.parametrize("name", ["fp32", "tf32"])
def test_values_of_a_wide_format_are_not_listed(name):
    with pytest.raises(FormatError, match=r"has \d+ bits; values\(\) lists formats of at most 16"):
        next(formats.get(name).values())


@pytest.mark.parametrize(("name", "alias"), [(n, a) for n, aliases in NAMES.items() for a in aliases])
def test_found_by_name_alias_and_dtype(name, alias):
    assert formats.get(alias) is formats.get(name)


def test_a_format_is_its_own_name():
    assert formats.get(formats.get("bf16")) is formats.get("bf16")


@pytest.mark.parametrize(("name", "words"), [("bf61", "'bf61'; nearest: bf16"), ("e9", "Known: "), (None, "None")])
def test_an_unknown_name_shows_the_nearest(name, words):
    with pytest.raises(FormatError, match=words) as caught:
        formats.get(name)
    assert isinstance(caught.value, ValueError)


def test_names_are_widest_first():
    sizes = [formats.get(name).bytes for name in formats.names()]
    assert sizes == sorted(sizes, reverse=True)
    assert formats.names()[0] == "fp32"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("e1m2", 1, 2, 1, 3.0, True, ""), "at least 2 exponent bits"),
        (("wide", 8, 24, 127, 2.0, True, ""), "at most 32 bits"),
        (("negative", 4, -1, 7, 2.0, True, ""), "-1 mantissa bits"),
        (("e4m3x", 4, 3, 7, 449.0, False, ""), "max 449.0 is no value with 3 mantissa bits"),
    ],
)
def test_an_impossible_format_is_refused(arguments, words):
    with pytest.raises(FormatError, match=words):
        formats.Format(*arguments)


@given(exponent=st.integers(2, 8), mantissa=st.integers(0, 4))
def test_ieee_formats_list_their_values_in_order(exponent, mantissa):
    made = formats.ieee("made", exponent, mantissa, "made up")
    values = list(made.values())
    assert values == sorted(set(values))
    assert len(values) == (2**exponent - 1) * 2**mantissa
    assert float(values[-1]) == made.max
    assert values[0] == 0
    assert made.min_normal in values
    if mantissa:
        assert float(values[1]) == made.min_subnormal
        assert 1 + made.eps in values


def test_a_made_up_format_works_as_it_is():
    e8m3 = formats.ieee("e8m3", 8, 3, "made up")
    x = torch.tensor([1.0, 1.06, 1.07, -1.1875, 3e38, 2.0**-128])
    expected = torch.tensor([1.0, 1.0, 1.125, -1.25, 14 * 2.0**124, 2.0**-128])
    torch.testing.assert_close(halfstep.round_to(x, e8m3), expected, rtol=0, atol=0)
