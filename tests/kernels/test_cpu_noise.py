"""The noise for stochastic rounding: vector lanes equal the reference, and its statistics are good enough."""

import math

import numba
import numpy as np
import pytest
import torch
from numba import types

from halfstep.kernels.cpu.compiled import CHUNK
from halfstep.kernels.cpu.lanes import lanes
from halfstep.kernels.cpu.noise import chunk_keys, noise, seed_keys
from halfstep.quant import noise_bits
from halfstep.quant.rounding import NOISE_CHUNK


@lanes(types.uint32)
def noise_of(keys, index):
    return noise(keys, index)


@numba.njit
def fill(out, seed, chunk):
    keys = chunk_keys(seed, chunk)
    for i in range(out.size):
        out[i] = noise_of(keys, i)


@pytest.mark.parametrize("start", [0, 2**32 - CHUNK, 2**32, 5 * 2**32 + 3 * CHUNK, 2**46])
@pytest.mark.parametrize("seed", [0, 12345, 2**64 - 1])
def test_lanes_equal_the_reference(start, seed):
    out = np.zeros(CHUNK, np.uint32)
    fill(out, seed_keys(seed), start // CHUNK)
    assert torch.equal(torch.from_numpy(out.astype(np.int64)), noise_bits(seed, start, CHUNK))


def test_the_kernels_chunk_size_is_the_noises():
    assert CHUNK == NOISE_CHUNK


def test_noise_does_not_depend_on_the_start_of_a_slice():
    whole = noise_bits(3, 0, 3 * CHUNK)
    for start, count in ((0, 0), (CHUNK - 1, 2), (5, CHUNK), (2 * CHUNK, 7), (CHUNK // 2, 2 * CHUNK)):
        assert torch.equal(noise_bits(3, start, count), whole[start : start + count])


def correlated(a, b):
    """The largest correlation between any two of two samples' top bits, in standard errors."""
    one, two = ((x.unsqueeze(1) >> torch.arange(16, 32) & 1).double() - 0.5 for x in (a, b))
    return (one.T @ two).abs().max().item() * 4 / math.sqrt(len(a))


SAMPLE = noise_bits(77, 0, 1 << 17)
THRESHOLD = 5.3  # standard errors, for 256 pairs of bits


def test_bits_are_balanced():
    ones = (SAMPLE.unsqueeze(1) >> torch.arange(32) & 1).double().mean(0)
    assert (ones - 0.5).abs().max().item() < 4.5 * 0.5 / math.sqrt(len(SAMPLE))


def test_values_are_uniform():
    counts = torch.bincount(SAMPLE >> 22, minlength=1024).double()
    expected = len(SAMPLE) / 1024
    chi_squared = ((counts - expected) ** 2 / expected).sum().item()
    assert abs(chi_squared - 1023) < 5 * math.sqrt(2 * 1023)


@pytest.mark.parametrize("lag", [1, 2, 3, 16, 64, 1024, CHUNK])
def test_neighbours_and_chunks_are_independent(lag):
    assert correlated(SAMPLE[:-lag], SAMPLE[lag:]) < THRESHOLD


@pytest.mark.quick("78", "9223372036854775885")
@pytest.mark.parametrize("other", [76, 78, 77 ^ 1 << 20, 77 + (1 << 32), 77 + (1 << 63)])
def test_seeds_are_independent(other):
    assert correlated(SAMPLE, noise_bits(other, 0, len(SAMPLE))) < THRESHOLD
    for shift in (1, CHUNK):
        assert correlated(SAMPLE[shift:], noise_bits(other, 0, len(SAMPLE) - shift)) < THRESHOLD


def test_chunks_of_small_seeds_have_different_noise():
    first = torch.stack([noise_bits(seed, 0, 16 * CHUNK)[::CHUNK] for seed in range(16)])
    assert len(first.unique()) == first.numel()
