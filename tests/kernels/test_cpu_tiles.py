"""The CPU kernel for tiles of any shape with power-of-two or absmax scales equals the reference, bit for bit."""

import itertools
from dataclasses import replace

import pytest
import torch

from families import for_each, in_turn, slow_unless
from halfstep import formats
from halfstep.kernels.cpu import tiles
from halfstep.ops.casts import values
from halfstep.quant import Quantizer, Scales, Tile
from halfstep.quant.scaling import get_scaling
from tiny import assert_same


TILES = [Tile(1, 0), Tile(0, 1), Tile(0, 0), Tile(16, 16), Tile(8, 1), Tile(4, 32)]
RULES = ["floor", "ceil", "even", "rceil", get_scaling("rceil", margin=3), "absmax"]


def numbers(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 16, 64, generator=generator) * torch.randn(3, 16, 1, generator=generator).mul(20).exp2()
    x[0, :8] = 0
    x[1, 0, 0], x[1, 9, 40], x[2, 3, 5] = torch.inf, torch.nan, -0.0
    x[2, 8:] *= 2.0**-120
    return x.to(dtype)


@pytest.mark.quick("even-whole tensor", "absmax-4x32")
@pytest.mark.parametrize(
    ("rule", "tile"),
    slow_unless(
        [*in_turn(RULES, TILES), *in_turn(RULES, TILES[1:] + TILES[:1])].__contains__, itertools.product(RULES, TILES)
    ),
    ids=str,
)
@for_each("format", ["e4m3fn", "e5m2", "e2m1fn", "e4m3fnuz", "ocp_int8"])
@for_each("dtype", [torch.float32, torch.bfloat16])
@for_each("rounding", ["nearest_even", "stochastic"])
def test_tiles_equal_the_reference(tile, rule, format, dtype, rounding):
    quantizer = Quantizer(formats.get(format), rounding, scales=Scales(tile, get_scaling(rule)))
    x = numbers(dtype)
    for target in (dtype, torch.float32):
        out = torch.empty(x.shape, dtype=target)
        noted = tiles.run(x, out, quantizer, 7)
        assert noted is not None
        assert_same(out, quantizer.quantize(x, 7).dequantize(target))
        assert noted or not ((out != 0) & (out.abs() < 2.0**-126)).any()


def test_subnormal_results_are_reported_but_not_zeros():
    quantizer = Quantizer(formats.get("e4m3fn"), scales=Scales(Tile(16, 16), get_scaling("rceil")))
    x = torch.ones(32, 32)
    x[:16, :16], x[16, 16] = 0.0, torch.nan
    out = torch.empty_like(x)
    assert tiles.run(x, out, quantizer, None) is False
    x[16:, :16] = 2.0**-110
    assert tiles.run(x, out, quantizer, None)


@pytest.mark.parametrize("tile", [*TILES, Tile(5, 48)], ids=str)
@pytest.mark.parametrize("rule", ["floor", get_scaling("rceil", margin=3), "absmax", "current"], ids=str)
@for_each("format", ["e4m3fn", "e5m2", "e2m1fn", "ocp_int8", "nf4"])
def test_tiles_decode_like_the_reference(tile, rule, format):
    quantizer = Quantizer(formats.get(format), scales=Scales(tile, get_scaling(rule)))
    quantized = quantizer.quantize(numbers(torch.float32))
    for target in (torch.float32, torch.bfloat16):
        out = torch.empty(quantized.shape, dtype=target)
        if target == torch.float32 or (quantizer.scales.rule.exact and quantizer.format.significant_bits <= 8):
            assert tiles.run_decode(quantized, out, quantizer.scales)
            assert_same(out, quantized.dequantize(target))
        else:
            assert not tiles.run_decode(quantized, out, quantizer.scales)


def test_a_margin_applies_in_a_traced_graph():
    rows = Quantizer(formats.get("e4m3fn"), scales=Scales(Tile(1, 0), replace(get_scaling("rceil"), margin=2)))
    x = torch.randn(4, 32)
    compiled = torch.compile(lambda x: values(x, rows), backend="aot_eager", fullgraph=True)
    assert_same(compiled(x), values(x, rows))
    without = Quantizer(rows.format, scales=Scales(Tile(1, 0), get_scaling("rceil")))
    assert not torch.equal(rows.quantize(x).scale, without.quantize(x).scale)


def test_unsupported_calls_are_refused():
    row = Quantizer(formats.get("e4m3fn"), scales=Scales(Tile(1, 0), get_scaling("rceil")))
    square = Quantizer(formats.get("e4m3fn"), scales=Scales(Tile(16, 16), get_scaling("rceil")))
    levels = Quantizer(formats.get("e2m1fn"), scales=Scales(Tile(1, 16), get_scaling("two_level")))
    x = torch.ones(16, 16)
    assert tiles.run(x, x.clone(), row, None) is not None
    assert tiles.run(x, x.clone(), levels, None) is None
    assert tiles.run(x.double(), x.double(), row, None) is None
    assert tiles.run(x[:15], x[:15].clone(), square, None) is None
    assert tiles.run(x[:0], x[:0].clone(), row, None) is None
