"""Stochastic rounding: to one of the two neighbors, unbiased, and a function of the seed alone."""

import math

import pytest
import torch

from families import for_each
from halfstep import formats
from halfstep.quant import decode, derive_seed, draw_seed, encode, noise_bits, round_to
from halfstep.quant.rounding import stochastic
from oracles import formats as oracle
from oracles.numbers import same_bits


every_format = pytest.mark.parametrize("name", oracle.NAMES)
every_dtype = for_each("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])


def values_in_range(name, dtype, count=256):
    """Random values in a format's range, of many magnitudes."""
    format = oracle.get(name)
    x = torch.randn(count, dtype=torch.float64) * 2.0 ** torch.randint(-8, 4, (count,))
    return x.clamp(max(format.min, -1e4), min(format.max, 1e4)).to(dtype)


@pytest.mark.quick("float8_e5m2", "float8_e4m3b11fnuz", "int4", "uint8", "uint4", "af4")
@every_format
@every_dtype
def test_results_are_one_of_the_two_neighbors(name, dtype):
    x = values_in_range(name, dtype)
    result = round_to(x, name, "stochastic", generator=5, dtype=torch.float64)
    for before, after in zip(x.double().tolist(), result.tolist(), strict=True):
        if name == "float8_e8m0fnu" and before <= 0:
            assert math.isnan(after)
        else:
            assert after in oracle.get(name).neighbours(min(max(before, oracle.get(name).min), oracle.get(name).max))


@pytest.mark.quick("float8_e4m3fn", "float8_e4m3", "ocp_int8")
@every_format
@every_dtype
def test_exact_values_are_unchanged(name, dtype):
    x = round_to(
        torch.cat([values_in_range(name, dtype, 4096), torch.tensor([0.0, -0.0, math.nan], dtype=dtype)]), name
    )
    x = round_to(x, name, dtype=torch.float64)  # a codebook's values need not be exact in a narrow dtype
    for seed in range(3):
        same_bits(round_to(x, name, "stochastic", generator=seed), x)


@every_format
def test_stochastic_codes_decode_to_the_stochastic_values(name):
    x = values_in_range(name, torch.float32, 4096)
    found = decode(encode(x, name, "stochastic", generator=3), name, torch.float64)
    same_bits(found, round_to(x, name, "stochastic", generator=3, dtype=torch.float64))


@pytest.mark.quick("float8_e8m0fnu", "uint8", "uint4")
@pytest.mark.parametrize("name", oracle.LISTED)
def test_rounding_between_any_two_neighbors_is_unbiased(name):
    """The probability of rounding up is the remainder's share of the gap, on both sides of zero and in subnormals."""
    values, count = oracle.listed(name).values, 20_000
    middle = int(abs(values).argmin())
    for low in {0, middle, max(middle - 1, 0), (middle + len(values)) // 2, len(values) - 2}:
        below, above = float(values[low]), float(values[low + 1])
        for fraction in (1 / 64, 0.5, 0.9):
            x = torch.full((count,), below + fraction * (above - below), dtype=torch.float64)
            result = round_to(x, name, "stochastic", generator=low)
            assert ((result == below) | (result == above)).all()
            rose = (result == above).double().mean().item()
            assert abs(rose - fraction) < 4.5 * math.sqrt(fraction * (1 - fraction) / count)


@pytest.mark.parametrize("format", ["bf16", "fp16", "e4m3fn", "e5m2"])
@for_each("fraction", [1 / 64, 0.25, 0.5, 0.9])
@for_each("at", [1.0, -3.0, "subnormal"])
def test_stochastic_rounding_is_unbiased(format, fraction, at):
    f, count = formats.get(format), 40_000
    low, step = (f.min_subnormal, f.min_subnormal) if at == "subnormal" else (abs(at), f.eps * 2 ** (abs(at) > 2))
    sign = math.copysign(1, at) if at != "subnormal" else 1
    x = torch.full((count,), sign * (low + fraction * step), dtype=torch.float64)
    rose = (round_to(x, format, "stochastic", generator=11) * sign > low).double().mean().item()
    assert abs(rose - fraction) < 4 * math.sqrt(fraction * (1 - fraction) / count)


def test_the_probability_of_rounding_up_is_exact_at_the_ends():
    noise = torch.tensor([0, 1, 2**32 - 1], dtype=torch.int64)
    r = torch.full((3,), 5 + 2.0**-32, dtype=torch.float64)
    torch.testing.assert_close(stochastic(r, noise), torch.tensor([5.0, 5.0, 6.0], dtype=torch.float64))
    torch.testing.assert_close(stochastic(r.floor(), noise), torch.full((3,), 5.0, dtype=torch.float64))


@pytest.mark.parametrize("overflow", ["saturate", "ieee"])
def test_stochastic_overflow_saturates_or_gives_nan(overflow):
    x = torch.full((1000,), 448.0 + 16.0)
    result = round_to(x, "e4m3fn", "stochastic", overflow, generator=1)
    if overflow == "saturate":
        assert (result == 448).all()
    else:
        assert 400 < result.isnan().sum() < 600
        assert (result[~result.isnan()] == 448).all()


def test_results_do_not_depend_on_the_number_of_threads():
    x = torch.randn(3 * (1 << 18) + 7)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(round_to(x, "bf16", "stochastic", generator=123))
    finally:
        torch.set_num_threads(before)
    same_bits(results[1], results[0])
    same_bits(results[2], results[0])


def test_results_do_not_depend_on_shape_or_chunking():
    """Element i draws hash(seed, i), so the chunks that round_to works in have no effect."""
    count = (1 << 20) + 1000
    x = torch.full((count,), 1 + 2.0**-8)
    whole = round_to(x, "bf16", "stochastic", generator=9)
    noise = noise_bits(9, (1 << 20) - 5, 1005)
    expected = torch.where(noise >= 2**31, 1 + 2.0**-7, 1.0)
    same_bits(whole[(1 << 20) - 5 :], expected)
    same_bits(round_to(x[:6].view(2, 3), "bf16", "stochastic", generator=9).view(-1), whole[:6])


def test_different_seeds_give_different_results():
    x = torch.full((256,), 1 + 2.0**-8)
    seen = {tuple(round_to(x, "bf16", "stochastic", generator=seed).tolist()) for seed in (0, 1, 2, 1 << 32, 1 << 63)}
    assert len(seen) == 5


def test_a_generator_advances_by_one_draw_a_call():
    x = torch.full((256,), 1 + 2.0**-8)
    generator, twin = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    first = round_to(x, "bf16", "stochastic", generator=generator)
    second = round_to(x, "bf16", "stochastic", generator=generator)
    assert not torch.equal(first, second)
    for result in (first, second):
        same_bits(round_to(x, "bf16", "stochastic", generator=draw_seed(twin)), result)


def test_without_a_generator_seeds_come_from_torchs_default():
    x = torch.full((256,), 1 + 2.0**-8)
    torch.manual_seed(1)
    first = round_to(x, "bf16", "stochastic")
    torch.manual_seed(1)
    same_bits(round_to(x, "bf16", "stochastic"), first)
    state = torch.get_rng_state()
    round_to(x, "bf16", "nearest_even")
    torch.testing.assert_close(torch.get_rng_state(), state)


def test_noise_is_uniform_and_neighbors_are_independent():
    noise = noise_bits(77, 0, 1 << 16)
    assert noise.min() >= 0
    assert noise.max() < 2**32
    for bit in range(32):
        ones = (noise >> bit & 1).sum().item()
        assert abs(ones - 2**15) < 5 * 2**7  # five standard errors
    pairs = torch.corrcoef(torch.stack([noise[:-1], noise[1:]]).double())[0, 1].item()
    assert abs(pairs) < 5 / 2**8


def test_derived_seeds_are_distinct_64_bit_integers():
    seeds = {derive_seed(seed, step, index) for seed in range(4) for step in range(16) for index in range(16)}
    assert len(seeds) == 4 * 16 * 16
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert derive_seed(0, 1, 2) != derive_seed(0, 2, 1)
