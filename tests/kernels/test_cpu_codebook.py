"""The CPU kernel for 8-bit codebooks in blocks equals the reference at every decision boundary."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from families import in_turn, slow_unless
from halfstep import formats, quantize
from halfstep.formats import Codebook
from halfstep.kernels.cpu import blocks as kernel
from halfstep.kernels.cpu.divided import search
from halfstep.kernels.cpu.element_codes import cut_points
from halfstep.quant import Quantizer, Scales, Tile
from halfstep.quant.scaling import get_scaling
from kernels.test_cpu_blocks import hard
from oracles.numbers import same_bits


MAPS = ("dynamic8", "dynamic8_unsigned")


def blocked(name, columns=256):
    return Quantizer(formats.get(name), scales=Scales(Tile(1, columns), get_scaling("absmax")))


def assert_quantizes(x, quantizer):
    expected = quantizer.quantize(x)
    found = {name: torch.full_like(part, 7) for name, part in expected.tensors.items()}
    assert kernel.run(x, found, quantizer, None)
    for name, part in expected.tensors.items():
        same_bits(found[name], part)
    same_bits(quantize(x, quantizer).dequantize(torch.float32), expected.dequantize(torch.float32))


@pytest.mark.parametrize("name", MAPS)
def test_every_boundary_and_its_neighbours_equal_the_reference(name):
    cuts = np.array(cut_points(formats.get(name), False), np.float32)
    points = [cuts, np.nextafter(cuts, np.float32(9)), np.nextafter(cuts, np.float32(-9)), [0.0, -0.0, 1e-30, -1e-30]]
    values = np.concatenate([*points, formats.get(name).values()]).astype(np.float32)
    blocks = np.concatenate([np.ones((-(-len(values) // 255), 1)), np.resize(values, (-(-len(values) // 255), 255))], 1)
    assert_quantizes(torch.from_numpy(blocks.astype(np.float32)), blocked(name))


FAMILIES = MAPS, (torch.float32, torch.bfloat16, torch.float16), (16, 256)


@pytest.mark.quick("dynamic8_unsigned-dtype9-256")
@pytest.mark.parametrize(
    ("name", "dtype", "columns"), slow_unless(in_turn(*FAMILIES).__contains__, itertools.product(*FAMILIES))
)
def test_special_values_equal_the_reference(name, dtype, columns):
    assert_quantizes(hard(512, dtype), blocked(name, columns))


def test_unsupported_codebooks_use_the_reference():
    backwards = Codebook("backwards", formats.get("dynamic8").table[::-1], source="none")
    near = Codebook("near", (0.0, *(1 - i * 2.0**-20 for i in range(254, 0, -1)), 1.0), source="none")
    assert search(near) is None
    assert kernel.code_constants(replace(blocked("dynamic8"), rounding="stochastic"), 256) is None
    x = torch.randn(4, 256)
    for format in (backwards, near):
        quantizer = Quantizer(format, scales=blocked("dynamic8").scales)
        assert kernel.code_constants(quantizer, 256) is None
        same_bits(quantize(x, quantizer).dequantize(), quantizer.quantize(x).dequantize())
