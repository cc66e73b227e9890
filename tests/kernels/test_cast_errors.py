"""CastErrors, which rounds and compares in one pass, gives the reference's errors for every supported quantizer."""

import numpy as np
import pytest
import torch

from families import slow_unless
from halfstep import formats
from halfstep.formats import Float
from halfstep.kernels.cpu.arrays import array
from halfstep.kernels.cpu.cast_errors import CastErrors, Rows, supports
from halfstep.kernels.cpu.compiled import CHUNK
from halfstep.quant import Quantizer, Scales, get_quantizer
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import ROW, TENSOR, Tile, block


COLUMNS = 256
BLOCKS = [get_quantizer(name) for name in formats.block_names()]
SCALED = [
    Quantizer(formats.get(name), scales=Scales(tile, get_scaling("absmax")))
    for name in formats.names()
    for tile in (ROW, TENSOR)
]
MARGIN = Quantizer(formats.get("e4m3fn"), scales=Scales(Tile(1, 32), get_scaling("rceil", margin=3)))
PLAIN = [
    Quantizer(format, overflow="ieee") for format in map(formats.get, formats.names()) if isinstance(format, Float)
]
SLOW_TO_COMPILE = [formats.get(name) for name in ("dynamic8", "dynamic8_unsigned")]  # 511 constants
KNOWN = [q for q in (*BLOCKS, *SCALED, MARGIN, *PLAIN) if supports(q, COLUMNS)]


def values():
    """Three decades, multiples of a power of two that reach the ends of ranges, zeros and tiny values."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 32, COLUMNS, generator=generator)
    x[0] *= torch.logspace(-2, 1, COLUMNS)
    x[1] = (x[1] * 64).round() / 32
    x[2, :, ::7] = 0
    x[3, 5] *= 1e-41
    return x.view(-1, COLUMNS)


@pytest.mark.quick(
    "ocp_int8-floor, 1x32",
    "af4-absmax, 1x64",
    "bnb_fp4-absmax, 1x64",
    "float4_e2m1fn-two_level, 1x16",
    "ocp_int8-absmax, whole tensor",
    "float8_e4m3fnuz-None",
    "float4_e2m1fn-None",
)
@pytest.mark.parametrize(
    "quantizer",
    slow_unless(lambda quantizer: quantizer.format not in SLOW_TO_COMPILE, KNOWN),
    ids=lambda q: f"{q.format.name[:24]}-{q.scales}",
)
def test_cast_errors_equal_the_reference(quantizer):
    x = values()
    cast, rows = CastErrors(quantizer, float(x.abs().max())), Rows(array(x), COLUMNS)
    cast.add(rows)
    found = cast.errors(rows.squares(float(x.abs().max())), int((x != 0).sum()))
    x, y = x.double(), quantizer(x).double()
    kept = y.isfinite()
    assert (found.zeroed, found.infinite) == (int(((y == 0) & (x != 0)).sum()), int((~kept).sum()))
    assert found.noise == pytest.approx(float((y - x)[kept].square().sum()), rel=1e-5)
    assert found.signal == pytest.approx(float(x.square().sum()), rel=1e-5)
    share = ((y - x).abs() / x.abs())[kept & (y != 0)].numpy()
    assert found.largest == pytest.approx(np.max(share, initial=0.0), rel=1e-5)


ABSMAX = Quantizer(formats.get("e4m3fn"), scales=Scales(block(32), get_scaling("absmax")))


@pytest.mark.slow  # each needs a parallel compilation; test_cpu_cast.py and test_cpu_optimizer.py test threads
@pytest.mark.parametrize(
    "quantizer", [get_quantizer("mxfp8"), ABSMAX, get_quantizer("nvfp4")], ids=["mxfp8", "absmax", "nvfp4"]
)
def test_two_threads_give_the_errors_of_one(quantizer):
    """With so many blocks that the scales are split between threads too."""
    x = values().repeat(18, 1)
    assert x.numel() // quantizer.scales.tile.columns > CHUNK
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        cast = CastErrors(quantizer, float(x.abs().max()))
        cast.add(Rows(array(x), COLUMNS))
        found.append(cast.errors(0.0, 0))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["uint4", "uint8"])
def test_asymmetric_formats_are_not_supported(name):
    format = formats.get(name)
    assert format.max != -format.min
    assert not supports(Quantizer(format, scales=Scales(ROW, get_scaling("absmax"))), COLUMNS)
