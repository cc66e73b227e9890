"""The CPU kernel for amax equals torch's."""

import math

import pytest
import torch

from halfstep.kernels.cpu import amax as kernel
from halfstep.kernels.cpu.compiled import CHUNK
from halfstep.ops import amax_of
from oracles.numbers import every_16_bit_value, same_bits


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 17, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 0.0])
def test_amax_equals_torch_for_any_position_of_the_largest(size, dtype, scale):
    x = (torch.randn(size, generator=torch.Generator().manual_seed(size)) * scale).to(dtype)
    for index in (0, size // 2, size - 1):
        for value in (2.5, -2.5, -0.0, math.inf, -math.inf):
            y = x.clone()
            y[index] = value
            same_bits(kernel.run(y), y.float().abs().max())
        for value in (math.nan, -math.nan):
            y[index] = value
            assert kernel.run(y).isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_amax_of_all_16_bit_values_equals_torch(dtype):
    for part in every_16_bit_value(dtype).split(257):
        same_bits(kernel.run(part), part.float().abs().max())


def test_unsupported_tensors_use_torch():
    x = torch.randn(6, 8)
    assert kernel.run(x.t()) is None
    assert kernel.run(x.double()) is None
    assert kernel.run(x[:0]) is None
    for other in (x.t(), x.double(), x[:, ::3], x[:0], x.requires_grad_(), torch.tensor(-3.0)):
        found = amax_of(other)
        assert found.dtype == torch.float32
        assert found.shape == ()
        assert not found.requires_grad
        assert found == (other.abs().max().float() if other.numel() else 0.0)


def test_storages_can_be_resized_after_the_kernel():
    x = torch.zeros(64)
    kernel.run(x)
    x.untyped_storage().resize_(0)
