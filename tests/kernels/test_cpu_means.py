"""The CPU kernel for means of coded messages equals the reference: decoded, summed in order and encoded by torch."""

import pytest
import torch

from halfstep import formats
from halfstep.kernels.cpu import means as kernel
from halfstep.kernels.cpu.compiled import CHUNK
from halfstep.quant import Quantizer, Scales, Tile
from halfstep.quant.scaling import get_scaling
from kernels.test_cpu_blocks import hard
from oracles.numbers import same_bits


SIZE = CHUNK + 3 * 128
AT = 16 * (SIZE // 16 + 1)
"""The offset of the scales: after the codes and a gap."""
TILES = {"float8_e4m3fn": 128, "float8_e5m2": 64, "float4_e2m1fn": 32, "float6_e3m2fn": 32, "int8": 16}


def quantizer_of(name):
    return Quantizer(formats.get(name), scales=Scales(Tile(1, TILES[name]), get_scaling("rceil")))


def values(count):
    """Rows with special values of different magnitudes, with zero blocks and with NaN and infinity."""
    generator = torch.Generator().manual_seed(0)
    found = torch.stack([hard(512).flatten().roll(512 * rank)[:SIZE] for rank in range(count)])
    found = torch.where(found.abs() < 1e38, found, 1.0) * torch.exp(8 * torch.randn(count, SIZE, generator=generator))
    found[:, 256:512] = 0
    found[-1, 700], found[0, CHUNK + 1] = torch.nan, -torch.inf
    return found


def message(x, quantizer):
    """The codes of x followed by the scales, as bytes, and the decoded values."""
    made, found = quantizer.quantize(x[None]), torch.full((AT + SIZE // quantizer.scales.tile.columns,), 7).byte()
    codes = made.tensors["codes"].view(-1).view(torch.uint8)
    found[: len(codes)], found[AT:] = codes, made.tensors["scale"].view(-1)
    return found, made.dequantize(torch.float32)[0]


@pytest.mark.slow  # more formats than test_mean.py, which compiles kernels for two
@pytest.mark.parametrize("name", TILES)
def test_means_equal_the_reference(name):
    quantizer = quantizer_of(name)
    for count in (1, 2, 3, 8):
        made = [message(x, quantizer) for x in values(count)]
        expected = made[0][1].clone()
        for _, other in made[1:]:
            expected += other
        expected /= count
        messages = torch.stack([bytes_ for bytes_, _ in made])
        out, total = torch.full_like(messages[0], 7), torch.empty(SIZE)
        assert kernel.run(messages, quantizer, SIZE, AT, out, total)
        same_bits(total, expected)
        same_bits(out, message(expected, quantizer)[0])
        alone, again = torch.full_like(out, 7), torch.empty(SIZE)
        kernel.run(messages, quantizer, SIZE, AT, alone, None)
        kernel.run(messages, quantizer, SIZE, AT, None, again)
        same_bits(alone, out)
        same_bits(again, total)


def test_unsupported_messages_are_refused():
    known, messages = quantizer_of("float8_e4m3fn"), torch.zeros(2, AT + 200, dtype=torch.uint8)
    absmax = Quantizer(known.format, scales=Scales(Tile(1, 128), get_scaling("absmax")))
    assert not kernel.run(messages, absmax, SIZE, AT, None, None)  # its scales are not powers of two
    assert not kernel.run(messages, known, SIZE + 1, AT, None, None)
    assert not kernel.run(messages[:, ::2], known, SIZE, AT, None, None)
    assert not kernel.run(messages.to("meta"), known, SIZE, AT, None, None)
