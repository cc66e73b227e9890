"""The kernels as operators: the reference's results, in one piece with what torch.compile makes around them."""

import pytest
import torch

from halfstep import formats
from halfstep.formats import Float
from halfstep.kernels.cpu import operators
from halfstep.quant.cast import decode, encode, round_to
from halfstep.quant.quantizer import get_quantizer
from oracles.numbers import same_bits


X = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["e4m3fn", "posit8_2", "nf4", "fp32"])
def test_scalar_operators_take_a_kernel_or_the_reference(name):
    out = torch.empty_like(X)
    torch.ops.halfstep.round_to(X, out, name, "nearest_even", "saturate", None)
    same_bits(out, round_to(X, name))
    if name != "fp32":
        stored = torch.empty(X.shape, dtype=torch.uint8)
        torch.ops.halfstep.encode(X, stored, name, "nearest_even", "saturate", None)
        assert torch.equal(stored, encode(X, name))
        torch.ops.halfstep.decode(stored, out, name)
        same_bits(out, decode(stored, name))


@pytest.mark.parametrize(("name", "scale"), [("mxfp4", "rceil"), ("nvfp4", "four_over_six")])
def test_block_operators_take_a_kernel_or_the_reference(name, scale):
    out = torch.empty_like(X)
    torch.ops.halfstep.round_blocks(X, out, name, scale, "nearest_even", None)
    same_bits(out, get_quantizer(name, scale=scale).quantize(X).dequantize())


def test_a_seed_is_a_signed_number():
    out = torch.empty_like(X)
    torch.ops.halfstep.round_to(X, out, "e4m3fn", "stochastic", "saturate", -5)
    same_bits(out, round_to(X, "e4m3fn", "stochastic", generator=2**64 - 5))


def test_compiled_in_one_graph():
    def step(x):
        out = torch.empty_like(x)
        torch.ops.halfstep.round_to(x * 2, out, "e4m3fn", "nearest_even", "saturate", None)
        return out + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    same_bits(compiled(X), round_to(X * 2, "e4m3fn") + 1)


def test_named():
    assert operators.named(formats.get("e4m3fn"))
    assert operators.named(formats.get("e5m7"))
    assert not operators.named(Float("made_up", 3, 3, 1, source="made up"))
    assert not operators.named(Float("float8_e4m3fn", 3, 3, 1, source="not the one of that name"))
