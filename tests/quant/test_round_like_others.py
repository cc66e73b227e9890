"""round_to, encode and decode compared with gfloat, ml_dtypes, numpy and torch's casts; differences are asserted."""

import gfloat
import gfloat.formats as gf
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import RoundMode
from packaging.version import Version

from halfstep import formats
from halfstep.quant import decode, encode, round_to
from oracles.numbers import every_16_bit_value, hard_inputs, same_bits


GFLOAT = {
    "fp32": gf.format_info_binary32,
    "fp16": gf.format_info_binary16,
    "bf16": gf.format_info_bfloat16,
    "float8_e4m3fn": gf.format_info_ocp_e4m3,
    "float8_e5m2": gf.format_info_ocp_e5m2,
    "float6_e3m2fn": gf.format_info_ocp_e3m2,
    "float6_e2m3fn": gf.format_info_ocp_e2m3,
    "float4_e2m1fn": gf.format_info_ocp_e2m1,
}
# ml_dtypes overflows to infinity or NaN.
NUMPY = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e4m3": ml_dtypes.float8_e4m3,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e3m4": ml_dtypes.float8_e3m4,
    "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e4m3b11fnuz": ml_dtypes.float8_e4m3b11fnuz,
}
# ... and saturates in formats that have neither.
FINITE = {
    "float6_e3m2fn": ml_dtypes.float6_e3m2fn,
    "float6_e2m3fn": ml_dtypes.float6_e2m3fn,
    "float4_e2m1fn": ml_dtypes.float4_e2m1fn,
}
MODES = {
    "nearest_even": RoundMode.TiesToEven,
    "nearest_away": RoundMode.TiesToAway,
    "toward_zero": RoundMode.TowardZero,
    "up": RoundMode.TowardPositive,
    "down": RoundMode.TowardNegative,
}
TORCH = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "float8_e5m2fnuz": torch.float8_e5m2fnuz,
}
ignore_overflow = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in cast:RuntimeWarning")


def inputs(name, dtype=np.float32, most=6000):
    """Values of all magnitudes, and (a sample, for 16-bit formats) the hard inputs of the format."""
    random = np.random.default_rng(1).standard_normal(4096) * 2.0 ** np.random.default_rng(2).integers(-20, 20, 4096)
    hard = hard_inputs(name, dtype)
    return np.concatenate([hard[:: len(hard) // most + 1], hard[-1000:], random.astype(dtype)])


@pytest.mark.parametrize("name", GFLOAT)
@pytest.mark.parametrize("overflow", ["saturate", "ieee"])
@pytest.mark.filterwarnings("ignore:overflow encountered in ldexp:RuntimeWarning")  # at float64's own end
def test_round_to_equals_gfloat(name, overflow):
    x = inputs(name, np.float64)
    f = formats.get(name)
    if not f.has_nan:
        x, overflow = x[~np.isnan(x)], "saturate"  # gfloat raises for NaN, and for infinities unless it saturates
    for rounding, mode in MODES.items():
        expected = gfloat.round_ndarray(GFLOAT[name], x, mode, sat=overflow == "saturate")
        same_bits(round_to(torch.from_numpy(x), name, rounding, overflow), torch.from_numpy(expected))


def test_only_gfloat_rounds_to_minus_two_in_ocp_int8():
    x = np.array([-1.99, -2.5, 1.99, 0.3, 1 / 128, 3 / 128])
    theirs = gfloat.round_ndarray(gf.format_info_ocp_int8, x, RoundMode.TiesToEven, sat=True)
    ours = round_to(torch.from_numpy(x), "ocp_int8")
    assert theirs[:2].tolist() == [-127 / 64, -2.0]
    assert ours[:2].tolist() == [-127 / 64, -127 / 64]
    same_bits(ours[2:], torch.from_numpy(theirs[2:]))


@pytest.mark.parametrize("name", NUMPY)
@ignore_overflow
def test_ieee_overflow_equals_numpy_and_ml_dtypes(name):
    x = inputs(name)
    expected = x.astype(NUMPY[name])
    same_bits(round_to(torch.from_numpy(x), name, overflow="ieee"), torch.from_numpy(expected.astype(np.float32)))
    codes = encode(torch.from_numpy(x), name, overflow="ieee")
    theirs = expected.view(f"uint{8 * expected.itemsize}")
    number = ~np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(codes.numpy()[number], theirs[number])
    same_bits(decode(torch.from_numpy(theirs), name), torch.from_numpy(expected.astype(np.float32)))


@pytest.mark.parametrize("name", FINITE)
@ignore_overflow
def test_ml_dtypes_saturates_formats_without_infinity_and_nan(name):
    x = inputs(name)
    x = x[~np.isnan(x)]
    expected = x.astype(FINITE[name])
    for overflow in ("saturate", "ieee"):
        found = round_to(torch.from_numpy(x), name, overflow=overflow)
        same_bits(found, torch.from_numpy(expected.astype(np.float32)))
    np.testing.assert_array_equal(encode(torch.from_numpy(x), name).numpy(), expected.view(np.uint8))


@pytest.mark.parametrize(("name", "code"), [("float6_e3m2fn", 0x20), ("float6_e2m3fn", 0x20), ("float4_e2m1fn", 0x8)])
@ignore_overflow
def test_only_ml_dtypes_turns_nan_into_minus_zero(name, code):
    theirs = np.array([np.nan], np.float32).astype(FINITE[name])
    assert theirs.view(np.uint8)[0] == code
    assert round_to(torch.tensor(torch.nan), name).isnan()


@ignore_overflow
def test_e8m0_agrees_with_ml_dtypes_but_for_subnormals():
    """Equal for normal values; between 2^-127 and 1.5 * 2^-127 (subnormal) ml_dtypes takes the upper neighbor."""
    x = inputs("float8_e8m0fnu")
    theirs = x.astype(ml_dtypes.float8_e8m0fnu)
    number = ~np.isinf(x) & ((x <= 0) | (x >= 2.0**-126) | np.isnan(x))
    found = round_to(torch.from_numpy(x), "e8m0", overflow="ieee")
    same_bits(found[number], torch.from_numpy(theirs.astype(np.float32)[number]))
    low = np.array([2.0**-127 * 1.25], np.float32)
    assert low.astype(ml_dtypes.float8_e8m0fnu).astype(np.float32)[0] == 2.0**-126
    assert round_to(torch.from_numpy(low), "e8m0").item() == 2.0**-127
    same_bits(found[torch.from_numpy(np.isinf(x))], torch.full((int(np.isinf(x).sum()),), torch.nan))


@ignore_overflow
def test_ml_dtypes_rounds_float64_twice_and_numpy_does_not():
    trap = np.array([17 + 2.0**-30])
    assert float(trap.astype(ml_dtypes.float8_e4m3fn)[0]) == 16
    assert round_to(torch.from_numpy(trap), "e4m3fn").item() == 18
    x = inputs("fp16", np.float64)
    expected = torch.from_numpy(x.astype(np.float16).astype(np.float64))
    same_bits(round_to(torch.from_numpy(x), "fp16", overflow="ieee"), expected)


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_round_to_equals_torch_casts_within_the_range(name, source):
    """torch's casts agree wherever nothing overflows; e4m3fn overflows to max or to NaN by torch's version."""
    x = torch.from_numpy(inputs(name)) if source.itemsize == 4 else every_16_bit_value(source)
    fits = (x.double().abs() <= formats.get(name).max) | x.isnan()
    x = torch.where(fits, x, 0)
    cast = x.to(TORCH[name])
    same_bits(round_to(x, name, overflow="ieee"), cast.to(source))
    number = ~x.isnan()
    codes = cast.view(torch.uint8 if cast.element_size() == 1 else torch.uint16).to(torch.int64)
    torch.testing.assert_close(encode(x, name).to(torch.int64)[number], codes[number], rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in TORCH if name != "float8_e4m3fn"])
def test_ieee_overflow_equals_torch_casts(name):
    x = torch.from_numpy(inputs(name))
    same_bits(round_to(x, name, overflow="ieee"), x.to(TORCH[name]).float())


def test_torchs_e4m3fn_cast_equals_one_of_the_two_overflow_modes():
    """Versions before 2.13 gave NaN, later ones saturate (infinities too)."""
    x = torch.from_numpy(inputs("float8_e4m3fn"))
    cast = x.to(torch.float8_e4m3fn).float()
    saturates = cast[x == torch.inf].isfinite().all()
    same_bits(round_to(x, "e4m3fn", overflow="saturate" if saturates else "ieee"), cast)


def test_torchs_e8m0_cast_drops_signs_and_clamps_zero():
    x = torch.tensor([-1.0, 0.0, -3.0])
    assert x.to(torch.float8_e8m0fnu).float().tolist() == [1.0, 2.0**-127, 4.0]
    assert round_to(x, "e8m0").isnan().all()


def test_torch_before_2_15_misstates_the_eps_of_e5m2fnuz():
    values = formats.get("e5m2fnuz").values()
    assert min(v for v in values if v > 1) - 1 == formats.get("e5m2fnuz").eps == 0.25
    assert torch.finfo(torch.float8_e5m2fnuz).eps == (0.125 if Version(torch.__version__) < Version("2.15.0") else 0.25)


def test_torch_rounds_float64_twice():
    trap = torch.tensor(2049 + 1e-9, dtype=torch.float64)
    assert trap.half().item() == 2048
    assert round_to(trap, "fp16").item() == 2050


def test_tf32_equals_rounding_by_integer_arithmetic():
    """To 10 mantissa bits: add 0xFFF and the last kept bit, clear the low 13."""
    bits = np.random.default_rng(3).integers(0, 0x7F7F0000, 65536, dtype=np.uint32)
    expected = (bits + 0xFFF + (bits >> 13 & 1)) & np.uint32(0xFFFFE000)
    x = torch.from_numpy(bits.view(np.float32))
    same_bits(round_to(x, "tf32"), torch.from_numpy(expected.view(np.float32)))


def test_truncation_to_bfloat16_equals_masking_the_low_bits():
    bits = np.random.default_rng(4).integers(0, 0x7F800000, 65536, dtype=np.uint32)
    x = torch.from_numpy(bits.view(np.float32))
    same_bits(round_to(x, "bf16", "toward_zero"), torch.from_numpy((bits & np.uint32(0xFFFF0000)).view(np.float32)))
