"""Rounding errors as published in papers and by other libraries, to the digits given."""

import math

import numpy as np
import pytest
import torch

from halfstep import round_to
from halfstep.quant import Quantizer, Scales, Tile, get_quantizer
from halfstep.quant.scaling import get_scaling


def normal_numbers():
    return torch.from_numpy(np.random.default_rng(0).standard_normal(65536).astype(np.float32))


def relative_rms_error(result, x):
    return ((result.double() - x.double()).norm() / x.double().norm()).item()


def absmax_blocks(format, columns):
    return Quantizer(format=get_quantizer(format).format, scales=Scales(Tile(1, columns), get_scaling("absmax")))


@pytest.mark.parametrize(
    ("format", "error"),
    [
        ("bf16", 1.6578e-3),
        ("fp16", 2.0683e-4),
        ("tf32", 2.0683e-4),
        ("e4m3fn", 2.6527e-2),
        ("e5m2", 5.2727e-2),
        ("float8_e4m3fnuz", 2.6527e-2),
        ("e3m4", 1.3413e-2),
    ],
)
def test_relative_rms_error_of_normal_values(format, error):
    x = normal_numbers()
    assert relative_rms_error(round_to(x, format), x) == pytest.approx(error, rel=5e-5)


@pytest.mark.parametrize(
    ("format", "error"),
    [
        ("posit8_0", 9.597e-3),
        ("posit8_1", 1.3297e-2),
        ("posit8_2", 2.6724e-2),
        ("posit16_1", 5.212e-5),
        ("posit16_2", 1.0479e-4),
        ("posit32_2", 0.0),
    ],
)
def test_relative_rms_error_of_posits(format, error):
    x = normal_numbers()[:8192]
    assert relative_rms_error(round_to(x, format), x) == pytest.approx(error, rel=1e-4)


BLOCKS = {
    ("mxfp8_e4m3", "floor"): 2.9505e-2,
    ("mxfp8_e4m3", "rceil"): 2.6527e-2,
    ("mxfp8_e5m2", "floor"): 5.3945e-2,
    ("mxfp6_e3m2", "floor"): 5.3946e-2,
    ("mxfp6_e2m3", "floor"): 2.8388e-2,
    ("mxfp4", "floor"): 1.15598e-1,
    ("mxfp4", "rceil"): 1.15935e-1,
    ("mxint8", "floor"): 8.2959e-3,
    ("nvfp4", None): 9.4966e-2,
    ("nf4", None): 9.2094e-2,
    ("nf4", "double_absmax"): 9.2127e-2,
    ("bnb_fp4", None): 1.21770e-1,
    ("bnb_fp4", "double_absmax"): 1.21796e-1,
    ("af4", None): 9.5703e-2,
    ("int4_64", None): 1.08246e-1,
    ("int8_tensor", None): 1.0794e-2,
}


def error_of(format, rule=None):
    x = normal_numbers()
    return relative_rms_error(get_quantizer(format, scale=rule)(x), x)


@pytest.mark.parametrize(("format", "rule"), BLOCKS)
def test_relative_rms_error_of_block_formats(format, rule):
    assert error_of(format, rule) == pytest.approx(BLOCKS[format, rule], rel=6e-5)


@pytest.mark.parametrize(
    ("quantizer", "columns", "error"),
    [
        (absmax_blocks("nf4", 128), 65536, 9.5861e-2),
        (absmax_blocks("nf4", 4096), 65536, 1.1164e-1),
        (get_quantizer("int8_row"), 256, 6.9955e-3),
        (absmax_blocks("e4m3fn", 0), 65536, 2.6347e-2),
    ],
    ids=["nf4 in 128", "nf4 in 4096", "int8 per row of 256", "e4m3fn scaled to 448"],
)
def test_relative_rms_error_of_other_tiles(quantizer, columns, error):
    x = normal_numbers().view(-1, columns)
    assert relative_rms_error(quantizer(x), x) == pytest.approx(error, rel=6e-5)


def test_order_of_the_4_bit_formats_by_error_on_normal_values():
    order = ["nf4", "nvfp4", "af4", "int4_64", "mxfp4", "bnb_fp4"]
    errors = [error_of(name) for name in order]
    assert errors == sorted(errors)
    assert error_of("nf4", "double_absmax") == pytest.approx(error_of("nf4"), rel=5e-4)


def test_four_over_six_lowers_the_error_on_normal_values():
    assert error_of("nvfp4", "four_over_six") < error_of("nvfp4")


@pytest.mark.parametrize(
    ("rounding", "largest", "bias"),
    [("nearest_even", 2.0**-8 / (1 + 2.0**-8), 0.0), ("toward_zero", 2.0**-7, -2.81e-3)],
)
def test_bfloat16_study_relative_error_and_bias(rounding, largest, bias):
    """Truncation shrinks by 2.8e-3 on average, rounding to nearest not at all: the study's reason for the latter."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal(10**6).astype(np.float32))
    rounded = round_to(x, "bf16", rounding).double()
    relative = (rounded.abs() - x.double().abs()) / x.double().abs()
    assert 0.98 * largest < relative.abs().max() <= largest
    assert relative.mean().item() == pytest.approx(bias, abs=1e-5)


def test_bfloat16_study_dot_product_error_by_rounding_and_accumulator():
    """4096 values in U(0.5, 1.5): inputs rounded to nearest cost 1e-5, truncated ones 6e-3, a bf16 accumulator 83 %."""
    random = np.random.default_rng(0)
    a, b = (torch.from_numpy(random.uniform(0.5, 1.5, 4096).astype(np.float32)) for _ in range(2))
    true = (a.double() @ b.double()).item()

    def error(product: float) -> float:
        return product / true - 1

    nearest = error((round_to(a, "bf16") @ round_to(b, "bf16")).item())
    truncated = error((round_to(a, "bf16", "toward_zero") @ round_to(b, "bf16", "toward_zero")).item())
    total = torch.zeros(())
    for term in round_to(a, "bf16") * round_to(b, "bf16"):
        total = round_to(total + term, "bf16")
    assert abs(nearest) < 1e-4
    assert truncated == pytest.approx(-5.9e-3, abs=5e-4)
    assert error(total.item()) == pytest.approx(-0.83, abs=0.1)


@pytest.mark.parametrize(("scale", "lost"), [(1, 1 / 3), (8, 2 / 15), (2**10, 0.0)])
def test_share_of_fp16_gradients_that_underflow_by_loss_scale(scale, lost):
    """g = 2^U(-30, -15): fp16 rounds values below 2^-25, after scaling, to zero."""
    count = 100_000
    g = torch.from_numpy(2.0 ** np.random.default_rng(0).uniform(-30, -15, count))
    fraction = (round_to(g.float() * scale, "fp16") == 0).double().mean().item()
    assert abs(fraction - lost) <= 4 * math.sqrt(lost * (1 - lost) / count)


def test_half_the_smallest_fp16_value_rounds_to_zero():
    g = torch.tensor([2.0**-25, np.nextafter(np.float32(2.0**-25), np.float32(1))])
    torch.testing.assert_close(round_to(g, "fp16"), torch.tensor([0.0, 2.0**-24]), rtol=0, atol=0)
