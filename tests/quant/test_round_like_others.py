"""round_to beside gfloat, ml_dtypes, numpy and torch's casts; where one differs, the difference is stated."""

import gfloat
import gfloat.formats as gf
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import RoundMode

from halfstep import formats, round_to
from oracles.numbers import boundaries, every_16_bit_value, same_bits


GFLOAT = {
    "fp32": gf.format_info_binary32,
    "fp16": gf.format_info_binary16,
    "bf16": gf.format_info_bfloat16,
    "float8_e4m3fn": gf.format_info_ocp_e4m3,
    "float8_e5m2": gf.format_info_ocp_e5m2,
}
NUMPY = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
MODES = {
    "nearest_even": RoundMode.TiesToEven,
    "nearest_away": RoundMode.TiesToAway,
    "toward_zero": RoundMode.TowardZero,
}
TORCH = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
ignore_overflow = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in cast:RuntimeWarning")


def inputs(format, dtype=np.float32):
    random = np.random.default_rng(1).standard_normal(4096) * 2.0 ** np.random.default_rng(2).integers(-20, 20, 4096)
    return np.concatenate([np.array(boundaries(format, dtype), dtype), random.astype(dtype)])


@pytest.mark.parametrize("name", GFLOAT)
@pytest.mark.parametrize("rounding", MODES)
@pytest.mark.parametrize("overflow", ["saturate", "ieee"])
@pytest.mark.filterwarnings("ignore:overflow encountered in ldexp:RuntimeWarning")  # at float64's own end
def test_gfloat(name, rounding, overflow):
    x = inputs(formats.get(name), np.float64)
    expected = gfloat.round_ndarray(GFLOAT[name], x, MODES[rounding], sat=overflow == "saturate")
    same_bits(round_to(torch.from_numpy(x), name, rounding, overflow), torch.from_numpy(expected))


@pytest.mark.parametrize("name", NUMPY)
@ignore_overflow
def test_numpy_and_ml_dtypes_overflow_to_infinity_or_nan(name):
    x = inputs(formats.get(name))
    expected = x.astype(NUMPY[name]).astype(np.float32)
    same_bits(round_to(torch.from_numpy(x), name, overflow="ieee"), torch.from_numpy(expected))


@ignore_overflow
def test_ml_dtypes_rounds_float64_twice_and_numpy_does_not():
    trap = np.array([17 + 2.0**-30])
    assert float(trap.astype(ml_dtypes.float8_e4m3fn)[0]) == 16
    assert round_to(torch.from_numpy(trap), "e4m3fn").item() == 18
    x = inputs(formats.get("fp16"), np.float64)
    expected = torch.from_numpy(x.astype(np.float16).astype(np.float64))
    same_bits(round_to(torch.from_numpy(x), "fp16", overflow="ieee"), expected)


@pytest.mark.parametrize("dtype", TORCH, ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_torch_casts_of_what_fits(dtype, source):
    """torch's casts agree wherever nothing overflows; e4m3fn overflows to max or to NaN as torch's version has it."""
    x = torch.from_numpy(inputs(formats.get(dtype))).to(source) if source.itemsize == 4 else every_16_bit_value(source)
    fits = (x.double().abs() <= formats.get(dtype).max) | x.isnan()
    x = torch.where(fits, x, 0)
    cast = x.to(dtype)
    same_bits(round_to(x, dtype, overflow="ieee"), cast.to(source))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_torch_casts_overflow_to_infinity(dtype):
    x = torch.from_numpy(inputs(formats.get(dtype)))
    same_bits(round_to(x, dtype, overflow="ieee"), x.to(dtype).float())


def test_torch_rounds_float64_twice():
    trap = torch.tensor(2049 + 1e-9, dtype=torch.float64)
    assert trap.half().item() == 2048
    assert round_to(trap, "fp16").item() == 2050


def test_tf32_is_the_bit_trick():
    """Round to 10 mantissa bits: add 0xFFF and the last kept bit, clear the low 13."""
    bits = np.random.default_rng(3).integers(0, 0x7F7F0000, 65536, dtype=np.uint32)
    expected = (bits + 0xFFF + (bits >> 13 & 1)) & np.uint32(0xFFFFE000)
    x = torch.from_numpy(bits.view(np.float32))
    same_bits(round_to(x, "tf32"), torch.from_numpy(expected.view(np.float32)))


def test_truncation_to_bfloat16_is_the_bit_trick():
    bits = np.random.default_rng(4).integers(0, 0x7F800000, 65536, dtype=np.uint32)
    x = torch.from_numpy(bits.view(np.float32))
    same_bits(round_to(x, "bf16", "toward_zero"), torch.from_numpy((bits & np.uint32(0xFFFF0000)).view(np.float32)))
