"""The CPU kernel that rotates and rounds in one pass equals the two separate steps, bit for bit."""

import itertools
from dataclasses import replace

import pytest
import torch

from families import for_each, slow_unless
from halfstep import formats, get_recipe
from halfstep.kernels.cpu import rotated_tiles as kernel
from halfstep.ops import operand as room
from halfstep.ops.operand import operand
from halfstep.quant import Clamp, Hadamard, Quantizer, Scales
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import block
from kernels.test_cpu_blocks import hard
from oracles.numbers import same_bits


NVFP4 = get_recipe("nvfp4").rules[-1].linear.grad_weight
MXFP4 = get_recipe("mxfp4-rht").rules[-1].linear.grad_input
PRODUCTS = {
    "nvfp4 gradient": (NVFP4.lhs, Hadamard(), 0),
    "nvfp4 input": (NVFP4.rhs, Hadamard(), 0),
    "mxfp4-rht down": (MXFP4.rhs, Hadamard(64, 3), 0),
    "mxfp4-rht along": (MXFP4.lhs, Hadamard(64, 3), 1),
    "nearest down": (
        Quantizer(formats.get("e2m1fn"), scales=Scales(block(32), get_scaling("floor"))),
        Hadamard(32, 1),
        0,
    ),
    "nearest along": (Quantizer(formats.get("e2m1fn"), scales=Scales(block(16), get_scaling("rceil"))), Hadamard(), 1),
}
every_product = pytest.mark.parametrize("name", slow_unless("nearest down".__ne__, PRODUCTS))
"""Fast tests: stochastic rounding down columns, and also rounding to nearest along rows."""


def drawn(shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g) * torch.exp(torch.randn(shape, generator=g))


def assert_one_pass(x, name, monkeypatch, dtype=torch.bfloat16, expects=True):
    """The kernel equals the two steps, and draws the same numbers from torch's generator."""
    quantizer, hadamard, dim = PRODUCTS[name]
    quantizer, signs = quantizer.down if dim == 0 else quantizer, hadamard.signs()
    torch.manual_seed(11)
    found, after = operand(x, quantizer, dtype, signs=signs, dim=dim), torch.rand(())
    used = room._rotated(x.contiguous(), quantizer, dtype, signs, dim, None)
    assert (used is not None) == expects
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "constants", lambda *arguments: None)
        torch.manual_seed(11)
        expected = operand(x, quantizer, dtype, signs=signs, dim=dim)
        assert torch.equal(torch.rand(()), after)
    assert found.values.dtype == expected.values.dtype
    assert (
        found.values.stride() == expected.values.stride() or 1 in found.values.shape
    )  # the strides decide the order of a matmul's sums
    same_bits(found.values, expected.values)
    assert (found.scale is None) == (expected.scale is None)
    if found.scale is not None:
        same_bits(found.scale, expected.scale)


@pytest.mark.quick("nvfp4 gradient-dtype1")
@pytest.mark.parametrize(
    ("name", "dtype"),  # each is another compilation
    slow_unless(
        lambda case: case[0] in ("nvfp4 gradient", "mxfp4-rht along") and case[1] == torch.bfloat16,
        itertools.product(PRODUCTS, (torch.float32, torch.bfloat16)),
    ),
)
@for_each("shape", [(64, 128), (1, 1), (70, 33), (200, 530), (129, 700)])
def test_every_shape_equals_the_two_steps(name, shape, dtype, monkeypatch):
    """Short blocks, partial registers, a rest of a thread's part; more than one chunk of noise."""
    assert_one_pass(drawn(shape).to(dtype), name, monkeypatch)


@pytest.mark.slow  # recipes have them in bfloat16
@pytest.mark.parametrize("name", slow_unless("nvfp4 gradient".__eq__, PRODUCTS))  # another compilation
def test_float32_matmuls_equal_the_two_steps(name, monkeypatch):
    assert_one_pass(drawn((70, 50)), name, monkeypatch, torch.float32)


@pytest.mark.quick("mxfp4-rht down", "nearest along")
@every_product
@for_each("power", [-140, -120, -100, 0, 100, 120])
def test_every_magnitude_equals_the_two_steps(name, power, monkeypatch):
    """If values are subnormal in bf16, the rounding is repeated for float32."""
    assert_one_pass((drawn((70, 96)).double() * 2.0**power).float(), name, monkeypatch)


@every_product
def test_special_values_equal_the_two_steps(name, monkeypatch):
    x = hard(512)
    assert_one_pass(x, name, monkeypatch, expects="nvfp4" not in name)
    assert_one_pass(x.nan_to_num(1.0).clamp(-1e30, 1e30), name, monkeypatch)
    assert_one_pass(torch.zeros(40, 40), name, monkeypatch)
    assert_one_pass(drawn((80, 64)).t(), name, monkeypatch)
    assert_one_pass(torch.full((64, 64), -0.0), name, monkeypatch)


@pytest.mark.slow  # compiled in parallel
@every_product
def test_two_threads_equal_the_two_steps(name, monkeypatch):
    torch.set_num_threads(2)
    assert_one_pass(drawn((300, 300)), name, monkeypatch)


def test_unsupported_calls_take_the_two_steps():
    x, signs, down = torch.randn(64, 64), Hadamard(64, 1).signs(), MXFP4.rhs.inner.down
    assert kernel.constants(x, signs, 0, down, torch.bfloat16) is not None
    assert kernel.constants(x, signs, 1, down, torch.bfloat16) is None
    short = Hadamard().signs()  # a tile of 32 is two of its blocks
    assert kernel.constants(x, short, 0, down, torch.bfloat16) is None
    assert kernel.constants(x, signs, 0, down.down, torch.bfloat16) is None
    assert kernel.constants(x, signs, 0, down, torch.float16) is None
    assert kernel.constants(x.double(), signs, 0, down, torch.bfloat16) is None
    assert kernel.constants(x[:0], signs, 0, down, torch.bfloat16) is None
    assert kernel.constants(x, signs, 0, replace(down, rounding="toward_zero"), torch.bfloat16) is None
    assert kernel.constants(x, signs, 1, NVFP4.rhs, torch.bfloat16) is None
    assert kernel.constants(x, signs, 0, Quantizer(formats.get("e2m1fn")), torch.bfloat16) is None


def test_a_quantizer_with_a_clamp_takes_the_two_steps():
    quantizer = replace(NVFP4.rhs, scales=Scales(block(16), get_scaling("rceil")), clamp=Clamp(0.9, compensation=False))
    x, signs = drawn((64, 64)), Hadamard().signs()
    assert room._rotated(x, quantizer, torch.bfloat16, signs, 1, None) is None
    clamped = operand(x, quantizer, torch.bfloat16, signs=signs).values
    assert not torch.equal(clamped, operand(x, replace(quantizer, clamp=None), torch.bfloat16, signs=signs).values)
