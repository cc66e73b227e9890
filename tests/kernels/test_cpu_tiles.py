"""Tiles of any shape with power-of-two or absmax scales: equal to the reference, bit for bit."""

import pytest
import torch

from halfstep import formats
from halfstep.kernels.cpu import tiles
from halfstep.quant import Quantizer, Tile
from halfstep.quant.scaling import get_scaling
from tiny import assert_same


TILES = [Tile(1, 0), Tile(0, 1), Tile(0, 0), Tile(16, 16), Tile(8, 1), Tile(4, 32)]
RULES = ["floor", "ceil", "even", "rceil", "rceil margin=3", "absmax"]


def numbers(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 16, 64, generator=generator) * torch.randn(3, 16, 1, generator=generator).mul(20).exp2()
    x[0, :8] = 0
    x[1, 0, 0], x[1, 9, 40], x[2, 3, 5] = torch.inf, torch.nan, -0.0
    x[2, 8:] *= 2.0**-120
    return x.to(dtype)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("format", ["e4m3fn", "e5m2", "e2m1fn", "e4m3fnuz", "ocp_int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_equals_the_reference(tile, rule, format, dtype, rounding):
    quantizer = Quantizer(formats.get(format), rounding, tile=tile, scaling=get_scaling(rule))
    x = numbers(dtype)
    for target in (dtype, torch.float32):
        out = torch.empty(x.shape, dtype=target)
        assert tiles.supports(x, out, quantizer)
        tiles.run(x, out, quantizer, 7)
        assert_same(out, quantizer.quantize(x, 7).dequantize(target))


def test_leaves_the_rest_to_the_reference():
    row = Quantizer(formats.get("e4m3fn"), tile=Tile(1, 0), scaling=get_scaling("rceil"))
    square = Quantizer(formats.get("e4m3fn"), tile=Tile(16, 16), scaling=get_scaling("rceil"))
    levels = Quantizer(formats.get("e2m1fn"), tile=Tile(1, 16), scaling=get_scaling("two_level"))
    x = torch.ones(16, 16)
    assert tiles.supports(x, x.clone(), row)
    assert not tiles.supports(x, x.clone(), levels)
    assert not tiles.supports(x.double(), x.double(), row)
    assert not tiles.supports(x[:15], x[:15].clone(), square)
    assert not tiles.supports(x[:0], x[:0].clone(), row)
