"""The CPU kernel for random Hadamard transforms equals the reference's float32 values, bit for bit."""

import itertools

import pytest
import torch

from families import for_each, slow_unless
from halfstep.kernels.cpu import rotated as kernel
from halfstep.kernels.operators import rotate
from halfstep.quant import Hadamard, rotate as reference
from kernels.test_cpu_blocks import hard
from oracles.numbers import same_bits


SIZES = (2, 4, 8, 16, 32, 64)
SHAPES = [(1, 1), (3, 7), (16, 16), (100, 50), (33, 700), (5, 530), (129, 144)]


def assert_rotates(x, signs, dim):
    same_bits(kernel.run(x, signs, dim), reference(x, signs, dim))


@pytest.mark.parametrize(
    ("size", "dim"),  # each is another compilation
    slow_unless(lambda case: case[0] == 16, itertools.product(SIZES, (0, 1))),
)
@for_each("shape", SHAPES)
def test_every_size_and_shape_equals_the_reference(size, shape, dim):
    """Short blocks, partial registers, more than a thread's part; three seeds."""
    for seed in range(3):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        assert_rotates(x, Hadamard(size, seed).signs(), dim)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)],  # another compilation
)
@for_each("dim", [0, 1, -1])
def test_special_values_equal_the_reference(dtype, dim):
    """Zeros of both signs, subnormals, sums that overflow, infinities and NaN."""
    assert_rotates(hard(512, dtype), Hadamard().signs(), dim)
    assert_rotates(hard(512, dtype)[:, :77].contiguous(), Hadamard().signs(), dim)
    assert_rotates(torch.full((40, 40), -0.0, dtype=dtype), Hadamard().signs(), dim)


def test_higher_dimensional_tensors_equal_the_reference():
    assert_rotates(torch.randn(2, 3, 5, 40), Hadamard().signs(), -1)
    assert_rotates(torch.randn(40), Hadamard().signs(), 0)


@for_each("view", [lambda x: x.t(), lambda x: x[::2, 1::3], lambda x: x[:1].expand(40, -1)])
@for_each("dim", [0, 1])
def test_strided_views_equal_the_reference(view, dim):
    x = view(hard(512))
    same_bits(rotate(x, Hadamard().signs(), dim), reference(x, Hadamard().signs(), dim))


@pytest.mark.slow  # compiled in parallel: seconds for 0
@pytest.mark.parametrize("dim", [0, 1])
def test_two_threads_give_the_values_of_one(dim):
    x, signs, found = torch.randn(300, 300), Hadamard().signs(), {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found[threads] = kernel.run(x, signs, dim)
    same_bits(found[1], found[2])


def test_unsupported_calls_use_the_reference():
    x, signs = torch.randn(32, 32), Hadamard().signs()
    assert kernel.run(x, signs, 1) is not None
    assert kernel.run(x.double(), signs, 1) is None
    assert kernel.run(x[:0], signs, 1) is None
    assert kernel.run(x.t()[1:], signs, 1) is None
    assert kernel.run(x, Hadamard(128, 1).signs(), 1) is None
    assert kernel.run(torch.randn(2, 32, 32), signs, 1) is None
    for other in (x.double(), x[:0], torch.randn(2, 3, 32)):
        same_bits(rotate(other, signs, 1), reference(other, signs, 1))
