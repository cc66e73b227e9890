"""The CPU kernel for multi-row tiles equals the reference's values, bit for bit, for any matrix."""

import itertools
from dataclasses import replace

import pytest
import torch

from families import for_each, in_turn
from halfstep import formats
from halfstep.kernels.cpu import blocks, panels as kernel
from halfstep.kernels.cpu.compiled import CHUNK
from halfstep.ops.casts import values, values_noted
from halfstep.quant import Scales
from halfstep.quant.quantizer import Quantizer
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import Tile
from kernels.test_cpu_blocks import hard
from oracles.numbers import same_bits


SMALLEST = torch.finfo(torch.bfloat16).smallest_normal
LEVELS = ("two_level", "two_level_up")
TILES = [Tile(16, 1), Tile(16, 16), Tile(32, 32), Tile(5, 8), Tile(1, 16)]
FORMATS, RULES = ["e4m3fn", "e5m2", "e4m3fnuz", "ocp_int8"], ["two_level", "rceil"]
every_tile = pytest.mark.parametrize("tile", TILES, ids=str)
every_rounding = for_each("rounding", ["nearest_even", "stochastic"])


def quantizer_of(tile, rule, rounding="nearest_even", format="e2m1fn"):
    return Quantizer(formats.get(format), rounding, scales=Scales(tile, get_scaling(rule)))


def without_tensor_scale(quantized):
    """The quantized tensor with a tensor scale of 1."""
    tensors = quantized.tensors | {"tensor_scale": torch.ones(())}
    return replace(quantized, tensors=tensors)


def assert_rounds(x, quantizer, seed=3, dtypes=(torch.float32, torch.bfloat16)):
    """With and, for two-level scales, without the tensor scale, in each of the dtypes, the values equal the
    reference's."""
    seed = seed if quantizer.rounding == "stochastic" else None
    expected = quantizer.quantize(x, seed)
    for dtype in dtypes:
        out = torch.full(x.shape, 7.0, dtype=dtype)
        noted = kernel.run_values(x, out, quantizer, seed)
        assert noted is not None
        same_bits(out, expected.dequantize(dtype))
        assert noted or not ((out != 0) & (out.abs() < SMALLEST)).any()
        if quantizer.scales.rule.two_level:
            scale = torch.empty(())
            kernel.run_values(x, out, quantizer, seed, scale)
            same_bits(out, without_tensor_scale(expected).dequantize(dtype))
            same_bits(scale, expected.tensors["tensor_scale"])


BOTH = torch.float32, torch.bfloat16
PATHS = [(torch.float32, BOTH), (torch.bfloat16, [torch.bfloat16])]
WIDENED = [(torch.bfloat16, [torch.float32])]  # used by no recipe


@pytest.mark.quick("stochastic-32x32", "stochastic-5x8")
@every_tile
@pytest.mark.parametrize(
    ("rounding", "paths"),  # each input dtype, output dtype and rounding is another compilation
    [
        pytest.param("nearest_even", PATHS, id="to nearest"),
        pytest.param("stochastic", [(torch.float32, [torch.float32])], id="stochastic"),
        pytest.param("stochastic", PATHS, marks=pytest.mark.slow, id="stochastic, narrow"),
        pytest.param("nearest_even", WIDENED, marks=pytest.mark.slow, id="to nearest, widened"),
        pytest.param("stochastic", WIDENED, marks=pytest.mark.slow, id="stochastic, widened"),
    ],
)
@for_each("rule", [*LEVELS, "rceil", "floor"])
def test_special_values_equal_the_reference(tile, rule, rounding, paths):
    quantizer = quantizer_of(tile, rule, rounding)
    for dtype, into in paths:
        assert_rounds(hard(512, dtype), quantizer, dtypes=into)
        normal = torch.nn.functional.layer_norm(hard(512), (512,)).nan_to_num(1.0)
        assert_rounds(normal.to(dtype), quantizer, dtypes=into)


@pytest.mark.slow  # another compilation
@for_each("rule", [*LEVELS, "even"])
@every_rounding
def test_float16_equals_the_reference(rule, rounding):
    assert_rounds(hard(512, torch.float16), quantizer_of(Tile(16, 16), rule, rounding))


@for_each("format, rule", itertools.product(FORMATS, RULES), fast=in_turn(FORMATS, RULES))
def test_other_formats_equal_the_reference(format, rule):
    quantizer = quantizer_of(Tile(16, 16), rule, format=format)
    x = hard(512)
    out = torch.empty(x.shape)
    assert kernel.run_values(x, out, quantizer, None) is not None
    same_bits(out, quantizer.quantize(x).dequantize())


SHAPES = [(1, 1), (31, 33), (17, 513), (100, 50), (3, 5, 7), (40,), (2, CHUNK + 40)]


@pytest.mark.quick("1x16")
@every_tile
@for_each("shape", SHAPES)
@for_each("rule", ["two_level_up", "floor"])
@every_rounding
def test_odd_sizes_equal_the_reference(tile, shape, rule, rounding):
    """Short tiles, partial registers, rows that start in one chunk of noise and end in the next."""
    for seed in (1, 1 << 40):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        assert_rounds(x, quantizer_of(tile, rule, rounding), seed, BOTH if rounding == "nearest_even" else BOTH[:1])


@pytest.mark.slow  # each needs a parallel compilation; test_cpu_cast.py and test_cpu_optimizer.py test threads
@pytest.mark.parametrize(
    ("rule", "rounding"), [("two_level", "nearest_even"), ("two_level_up", "stochastic"), ("rceil", "stochastic")]
)
def test_two_threads_give_the_values_of_one(rule, rounding):
    x, found = torch.randn(100, 1000), {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found[threads] = values(x, quantizer_of(Tile(16, 16), rule, rounding), 3)
    same_bits(found[1], found[2])


@for_each("view", [lambda x: x.t(), lambda x: x[::2, 1::3], lambda x: x[:1].expand(40, -1)])
@for_each("tile", [Tile(16, 1), Tile(16, 16)])
@every_rounding
def test_strided_views_equal_the_reference(view, tile, rounding):
    x, quantizer = view(hard(512)), quantizer_of(tile, "two_level", rounding)
    same_bits(values(x, quantizer, 9), quantizer.quantize(x, 9).dequantize())


@pytest.mark.parametrize("tile", [Tile(16, 1), Tile(1, 16)], ids=str)
def test_a_matrix_of_nan_gives_nan_and_a_tensor_scale_of_1(tile):
    x, quantizer = torch.full((32, 32), torch.nan), quantizer_of(tile, "two_level")
    scale = torch.zeros(())
    out, _ = values_noted(x, quantizer, tensor_scale=scale)
    assert out.isnan().all()
    assert scale == 1


def test_subnormal_results_are_reported_but_not_zeros():
    quantizer, x = quantizer_of(Tile(32, 32), "rceil"), torch.ones(64, 64)
    x[:32, :32], x[32, 32] = 0.0, torch.nan
    for rounding in ("nearest_even", "stochastic"):
        how, out = (replace(quantizer, rounding=rounding), 5), torch.empty_like(x)
        assert kernel.run_values(x, out, *how) is False
        assert kernel.run_values(torch.where(x == 0, 2.0**-126, x), out, *how)


def test_stochastic_values_are_unbiased():
    """Scaled magnitudes up to 6, which are not clipped: four standard errors of 500 seeds."""
    quantizer, x = quantizer_of(Tile(16, 16), "two_level_up", "stochastic"), torch.linspace(-1, 1, 256).view(16, 16)
    drawn = torch.stack([values(x, quantizer, seed).double() for seed in range(500)])
    error = (drawn.mean(0) - x.double()).abs()
    assert (error <= 4 * drawn.std(0) / 500**0.5 + 1e-6).all()


def test_unsupported_calls_are_refused():
    x, square = torch.ones(32, 32), quantizer_of(Tile(16, 16), "two_level")
    assert kernel.run_values(x, x.clone(), square, None) is not None
    assert kernel.run_values(x, x, square, None) is None
    assert kernel.run_values(x.double(), x.double(), square, None) is None
    assert kernel.run_values(x[:0], x[:0].clone(), square, None) is None
    assert kernel.run_values(x.t()[1:], x[1:].clone(), square, None) is None
    for tile in (Tile(0, 16), Tile(16, 0), Tile(512, 1), Tile(16, 12)):
        assert kernel.run_values(x, x.clone(), quantizer_of(tile, "two_level"), None) is None
    for rule in ("absmax", "four_over_six"):
        assert kernel.run_values(x, x.clone(), quantizer_of(Tile(16, 16), rule), None) is None
    assert kernel.run_values(x, x.clone(), quantizer_of(Tile(16, 16), "floor", format="nf4"), None) is None
    assert kernel.run_values(x, x.clone(), quantizer_of(Tile(16, 16), "floor", "toward_zero"), None) is None
    odd = quantizer_of(Tile(12, 12), "two_level")
    same_bits(values(x, odd), odd.quantize(x).dequantize())


@pytest.mark.parametrize(
    "paths",  # (input dtype, output dtype)
    [[(each, each) for each in BOTH], pytest.param([BOTH, BOTH[::-1]], marks=pytest.mark.slow)],
    ids=["alike", "another"],
)
@for_each("rule", LEVELS)
@every_rounding
def test_blocks_along_rows_without_the_tensor_scale_equal_the_reference(rule, rounding, paths):
    quantizer, seed = quantizer_of(Tile(1, 16), rule, rounding), 4 if rounding == "stochastic" else None
    for dtype, into in paths:
        x, scale = hard(512, dtype), torch.empty(())
        expected, out = quantizer.quantize(x, seed), torch.empty(x.shape, dtype=into)
        blocks.run_values(x, out, quantizer, seed, scale)
        same_bits(out, without_tensor_scale(expected).dequantize(into))
        same_bits(scale, expected.tensors["tensor_scale"])
