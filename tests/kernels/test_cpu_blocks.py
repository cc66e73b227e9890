"""The CPU kernel for quantizing blocks equals the reference: codes, scales and values, bit for bit."""

import itertools
import math

import pytest
import torch

from families import slow_unless
from halfstep import formats
from halfstep.kernels.cpu import blocks as kernel, dequantize
from halfstep.kernels.cpu.compiled import CHUNK
from halfstep.ops.casts import values
from halfstep.quant import Scales
from halfstep.quant.quantizer import Quantizer, get_quantizer
from halfstep.quant.scaling import get_scaling
from halfstep.quant.scaling.absmax import Absmax
from halfstep.quant.scaling.power_of_two import PowerOfTwoScaling
from halfstep.quant.tile import Tile
from oracles.numbers import same_bits


def hard(columns, dtype=torch.float32):
    """Blocks with zeros, subnormals, the largest values, infinities, NaN, powers of two, and random bits."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, columns, generator=generator)
    sizes = torch.randint(-40, 40, (40, columns // 16), generator=generator)
    x *= torch.exp2(sizes.float()).repeat_interleave(16, 1)
    x[1], x[8], x[11] = 0, -0.0, 1.175e-38
    x[2] *= 0
    x[3, 5], x[4, 6] = math.nan, -math.inf
    x[5], x[6] = 1e-44, 3.4e38 * torch.rand(columns, generator=generator)
    patterns = torch.randint(-(2**31), 2**31, (columns,), generator=generator, dtype=torch.int64)
    x[7] = patterns.to(torch.int32).view(torch.float32)
    x[9] = torch.exp2(torch.randint(-149, 128, (columns,), generator=generator).float())
    x[10] *= 1e-38
    x[12], x[12, ::3] = -7.0, 6.99
    return x.to(dtype)


BOTH = (torch.float32, torch.bfloat16)


def assert_quantizes(x, quantizer, seed=None, dtypes=BOTH):
    """Codes, scales, values and decoded codes, in each of the dtypes, equal the reference's."""
    expected = quantizer.quantize(x, seed)
    tensors = {name: torch.full_like(tensor, 1) for name, tensor in expected.tensors.items()}
    assert kernel.run(x, tensors, quantizer, seed)
    for name, tensor in expected.tensors.items():
        if tensor.is_floating_point():
            same_bits(tensors[name], tensor)
        else:
            assert torch.equal(tensors[name], tensor), name
    for dtype in dtypes:
        out = torch.empty(x.shape, dtype=dtype)
        assert kernel.run_values(x, out, quantizer, seed) is not None
        same_bits(out, expected.dequantize(dtype))
        back = torch.empty(x.shape, dtype=dtype)
        assert dequantize.run(tensors, back, quantizer)
        same_bits(back, out)


CASES = [
    (name, rule)
    for name in ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8")
    for rule in formats.get_block(name).rules
]
CASES += [
    ("nvfp4", None),
    ("nvfp4", "two_level_up"),
    ("nf4", None),
    ("bnb_fp4", None),
    ("af4", None),
    ("fp8_1x128", None),
    ("fp8_1x128", "rceil"),
]
CASES += [("int4_64", None)]


EVERY_CASE = list(itertools.product(CASES, BOTH, BOTH))
INTO_BFLOAT16 = {"mxfp8_e4m3", "nvfp4"}
"""Formats whose values recipes make in bfloat16; the others would need another compilation."""


def is_compiled(case):
    """Whether the fast tests compile this case: each bfloat16 input and each codebook is another kernel, so one of
    each."""
    (name, rule), dtype, into = case
    if dtype == torch.bfloat16:
        return (name, rule, into) == ("mxfp8_e4m3", "rceil", torch.bfloat16)
    return name in INTO_BFLOAT16 if into == torch.bfloat16 else name != "bnb_fp4"


@pytest.mark.quick(
    "('mxfp8_e5m2', 'ceil')-torch.float32-torch.float32",
    "('nvfp4', None)-torch.float32-torch.float32",
    "('af4', None)-torch.float32-torch.float32",
)
@pytest.mark.parametrize(("case", "dtype", "into"), slow_unless(is_compiled, EVERY_CASE), ids=str)
def test_every_block_format_equals_the_reference(case, dtype, into):
    name, rule = case
    assert_quantizes(hard(512, dtype), get_quantizer(name, scale=rule), dtypes=(into,))


class Halved(Absmax):
    """A scaling that overrides `scale`."""

    def scale(self, x, tile, element):
        scale = super().scale(x, tile, element)[1] / 2
        return {"scale": scale}, scale


OWN = PowerOfTwoScaling("own", lambda element: 0.75)
MARGINS = [get_scaling("rceil", margin=3), get_scaling("floor", margin=-2), get_scaling("ceil", margin=60)]


@pytest.mark.parametrize("rule", [*MARGINS, OWN], ids=str)
def test_power_of_two_scales_with_a_margin_or_another_threshold(rule):
    assert_quantizes(hard(512), Quantizer(formats.get("e4m3fn"), scales=Scales(Tile(1, 32), rule)))


@pytest.mark.parametrize("name", ["uint4", "uint8", "int8"])
def test_signed_and_unsigned_integers(name):
    quantizer = Quantizer(formats.get(name), scales=Scales(Tile(1, 64), get_scaling("absmax")))
    assert_quantizes(hard(512), quantizer, dtypes=BOTH[:1])


@pytest.mark.slow  # another compilation
@pytest.mark.parametrize("name", ["mxfp4", "mxfp6_e3m2", "nf4", "uint4", "uint8", "int8"])
def test_other_formats_in_bfloat16(name):
    scales = Scales(Tile(1, 64), get_scaling("absmax"))
    assert_quantizes(hard(512), Quantizer(formats.get(name), scales=scales) if "int" in name else get_quantizer(name))


@pytest.mark.parametrize(
    ("columns", "dtype"),
    slow_unless((16, torch.float32).__eq__, itertools.product((16, 128), BOTH)),  # each is compiled anew
)
def test_scales_in_bfloat16(columns, dtype):
    rule = Scales(Tile(1, columns), get_scaling("absmax_bf16"))
    assert_quantizes(hard(512, dtype), Quantizer(formats.get("e4m3fn"), scales=rule))


@pytest.mark.quick("mxfp4")
@pytest.mark.parametrize(
    "name",
    slow_unless({"mxfp4", "nvfp4"}.__contains__, ["mxfp8_e4m3", "mxfp4", "nvfp4", "fp8_1x128"]),  # compiled anew
)
def test_stochastic_rounding_equals_the_reference(name):
    assert_quantizes(hard(512), get_quantizer(name, rounding="stochastic"), seed=5, dtypes=BOTH[1:])


@pytest.mark.parametrize("name", ["mxfp4", "mxfp6_e3m2", "nvfp4", "nf4"])
@pytest.mark.parametrize("shape", [(64,), (3, 1, 64), (1, CHUNK + 64), (3, CHUNK)])
def test_shapes_around_the_chunk_size(name, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    assert_quantizes(x, get_quantizer(name), dtypes=BOTH if name in INTO_BFLOAT16 else BOTH[:1])


def test_unsupported_calls_are_refused():
    x = torch.zeros(4, 64)
    assert not kernel.run(x, {}, get_quantizer("e4m3fn"), None)
    assert not kernel.run(x[:, :48], {}, get_quantizer("mxfp4"), None)
    assert not kernel.run(torch.zeros(4, 48), {}, get_quantizer("mxfp4"), None)
    assert not kernel.run(x.double(), {}, get_quantizer("mxfp4"), None)
    assert not kernel.run(torch.tensor(1.0), {}, get_quantizer("mxfp4"), None)
    for name, rule in (("nvfp4", "four_over_six"), ("nf4", "double_absmax"), ("fp8_128x128", None), ("uint4_64", None)):
        assert not kernel.run(torch.zeros(128, 128), {}, get_quantizer(name, scale=rule), None)
    assert not kernel.run(x, {}, get_quantizer("mxfp4", rounding="toward_zero"), None)
    for rule in (Halved("absmax"), get_scaling("rceil", margin=126), get_scaling("fixed"), get_scaling("current")):
        assert not kernel.run(x, {}, Quantizer(formats.get("e2m1fn"), scales=Scales(Tile(1, 32), rule)), None)
    assert kernel.run_values(x, x, get_quantizer("mxfp4"), None) is None
    listed = Quantizer(formats.get("nf4"), scales=Scales(Tile(1, 32), get_scaling("rceil")))
    assert not kernel.run(x, {}, listed, None)
    same_bits(values(x + 0.3, listed), listed.quantize(x + 0.3).dequantize())


def test_every_8_bit_code_is_decoded_like_the_reference():
    """Alone in its block, so that no other code decides the block's path; infinities and NaN included."""
    for name, scale in itertools.product(("e4m3fn", "e5m2", "e4m3fnuz"), (1e-40, 1e-30, 1.0, 1e30, 1e36)):
        quantizer = Quantizer(formats.get(name), scales=Scales(Tile(1, 16), get_scaling("absmax")))
        quantized = quantizer.quantize(torch.ones(256, 16))
        quantized.tensors["codes"].view(torch.uint8)[:, 3] = torch.arange(256, dtype=torch.uint8)
        quantized.tensors["scale"].fill_(scale)
        out = torch.empty(256, 16)
        assert dequantize.run(quantized.tensors, out, quantizer)
        same_bits(out, quantized.dequantize(torch.float32))


def test_finite_codes_with_any_scale_are_decoded_like_the_reference():
    """Chunks whose scales are normal or 0, include subnormal and huge ones, include NaN, or end in a special code."""
    generator = torch.Generator().manual_seed(0)
    usual, others = [0.0, 1e-30, 2.0**-7, 3.3, 1e25], [1e30, 1e36, 1e-38, 1e-40]
    for name in ("e4m3fn", "e5m2", "e3m4", "e2m1"):
        format = formats.get(name)
        quantizer = Quantizer(format, scales=Scales(Tile(1, 16), get_scaling("absmax")))
        quantized = quantizer.quantize(torch.ones(4 * CHUNK // 64, 64))
        is_finite = torch.tensor([math.isfinite(format.decode(code)) for code in format.codes()])
        finite, special = is_finite.nonzero().view(-1), (~is_finite).nonzero().view(-1)
        codes = finite[torch.randint(len(finite), (4 * CHUNK,), generator=generator)].to(torch.uint8)
        codes[-1:] = special[:1] if len(special) else codes[-1:]
        packed = codes if format.bits == 8 else codes[::2] | codes[1::2] << 4
        quantized.tensors["codes"].view(-1).view(torch.uint8).copy_(packed)
        scale = quantized.tensors["scale"].view(4, -1)
        for part, kinds in zip(scale, (usual, usual + others, [*usual, math.nan], usual), strict=True):
            part.copy_(torch.tensor(kinds)[torch.randint(len(kinds), part.shape, generator=generator)])
        scale[-1, -1] = 1
        for dtype in (torch.float32, torch.bfloat16):
            out = torch.empty(quantized.shape, dtype=dtype)
            assert dequantize.run(quantized.tensors, out, quantizer)
            same_bits(out, quantized.dequantize(dtype))
