"""Matmuls whose sums are not in float32: against exact fractions, numpy's float16 and a model of Hopper's FP8 tensor
cores."""

import itertools
from fractions import Fraction

import mmaemu.model.chain
import numpy as np
import pytest
import torch

from halfstep import formats
from halfstep.errors import QuantizationError
from halfstep.kernels.cpu import accumulate as kernel
from halfstep.quant import Accumulator, get_accumulator
from halfstep.quant.accumulator import accumulate
from oracles.numbers import same_bits


FP16, BF16 = formats.get("fp16"), formats.get("bf16")
ACCUMULATORS = [
    Accumulator(FP16), Accumulator(FP16, 16), Accumulator(BF16), Accumulator(BF16, 4, promote=64),
    get_accumulator("hopper"), get_accumulator("hopper-fast"),
]  # fmt: skip


def draw(*shape, seed=0, spread=0.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator) * torch.exp2(spread * torch.randn(*shape, generator=generator))
    return x.bfloat16().float()


def nearest(number, dtype):
    """The value of a dtype nearest to a fraction, ties to even; without overflow."""
    info, size = torch.finfo(dtype), abs(number)
    least = Fraction(info.tiny)
    while size >= 2 * least:
        least *= 2
    step = least * Fraction(info.eps)
    return round(number / step) * step


@pytest.mark.quick("fp16-dtype0")
@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_one_product_at_a_time_is_a_chain_of_fused_multiply_adds(name, dtype):
    lhs, rhs = draw(3, 60, spread=4.0), draw(60, 2, seed=1, spread=4.0) / 64
    expected = torch.zeros(3, 2)
    for i, j in itertools.product(range(3), range(2)):
        running = Fraction(0)
        for a, b in zip(lhs[i].tolist(), rhs[:, j].tolist(), strict=True):
            running = nearest(running + Fraction(a) * Fraction(b), dtype)
        expected[i, j] = float(running)
    same_bits(accumulate(lhs, rhs, Accumulator(formats.get(name))), expected)


def test_fp16_accumulation_equals_numpys():
    lhs, rhs = draw(9, 700), draw(700, 11, seed=1)
    a, b, running = lhs.double().numpy(), rhs.double().numpy(), np.zeros((9, 11), np.float16)
    for k in range(700):
        running = (running + a[:, k, None] * b[k]).astype(np.float16)
    same_bits(accumulate(lhs, rhs, Accumulator(FP16)), torch.from_numpy(running).float())


def test_the_products_of_a_block_are_summed_in_float32():
    lhs, rhs = draw(4, 50), draw(50, 3, seed=1)
    expected = torch.zeros(4, 3)
    for start in range(0, 50, 16):
        block = torch.zeros(4, 3)
        for k in range(start, min(start + 16, 50)):
            block = block + lhs[:, k, None] * rhs[k]
        expected = (expected.double() + block.double()).to(torch.float16).float()
    same_bits(accumulate(lhs, rhs, Accumulator(FP16, 16)), expected)


def normal_e4m3(*shape, seed):
    x = draw(*shape, seed=seed, spread=2.0)
    return torch.where(x.abs() < 2**-6, 0.0, x).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("shared", [32, 100, 128, 515, 4096])
@pytest.mark.parametrize("fast", [True, False])
def test_aligned_sums_equal_the_model_of_hopper(shared, fast):
    lhs, rhs = normal_e4m3(5, shared, seed=0), normal_e4m3(7, shared, seed=1)
    step, total = shared if fast else 128, torch.zeros(5, 7)
    for start in range(0, shared, step):
        sides = lhs[:, None, start : start + step], rhs[None, :, start : start + step]
        pairs = (side.expand(5, 7, -1).contiguous() for side in sides)
        total = total + mmaemu.model.chain.dot(*pairs, preset="hopper")
    named = get_accumulator("hopper-fast" if fast else "hopper")
    same_bits(accumulate(lhs.float(), rhs.float().t(), named), total)


def test_positive_sums_shrink_as_measured_on_hopper():
    """E4M3, all positive, K = 4096: fast sums are 7% too small, promoted ones 0.06%."""
    lhs, rhs = (draw(16, 4096, seed=seed).abs().to(torch.float8_e4m3fn).float() for seed in (0, 1))
    exact = (lhs.double() @ rhs.double().t()).float()
    shrunk = {name: float((accumulate(lhs, rhs.t(), get_accumulator(name)) / exact).mean()) - 1 for name in
              ("hopper", "hopper-fast")}  # fmt: skip
    assert shrunk["hopper-fast"] == pytest.approx(-0.07, rel=0.15)
    assert shrunk["hopper"] == pytest.approx(-6.3e-4, rel=0.15)


@pytest.mark.quick(
    "shape1-sums in e8m13, 32 aligned at a time, into float32 every 128",
    "shape3-sums in fp16, 1 at a time",
    "shape3-sums in bf16, 1 at a time",
    "shape3-sums in e8m13, 32 aligned at a time, into float32 every 128",
    "shape4-sums in fp16, 16 at a time",
    "shape4-sums in bf16, 4 at a time, into float32 every 64",
)
@pytest.mark.parametrize("accumulator", ACCUMULATORS, ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 7), (33, 300, 150), (1, 1, 1), (2, 0, 3), (0, 4, 2)])
def test_the_kernel_equals_the_reference(accumulator, shape):
    rows, shared, columns = shape
    for scale in (1.0, 300.0, 2.0**-13, 2.0**-60):
        lhs, rhs = draw(rows, shared) * scale, draw(shared, columns, seed=1)
        lhs[:, ::7] = 0
        out = torch.zeros(rows, columns)
        assert kernel.run(lhs, rhs, out, accumulator)
        same_bits(out, accumulate(lhs, rhs, accumulator))


@pytest.mark.parametrize("accumulator", ACCUMULATORS, ids=str)
def test_infinities_and_nan_propagate(accumulator):
    lhs, rhs = draw(4, 40), draw(40, 5, seed=1)
    lhs[0, 3], lhs[1, 20] = torch.inf, torch.nan
    rhs[3, 0] = 0.0
    out = torch.zeros(4, 5)
    kernel.run(lhs, rhs, out, accumulator)
    expected = accumulate(lhs, rhs, accumulator)
    same_bits(out.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(out[:2].isnan(), (lhs @ rhs)[:2].isnan())
    assert out[2:].isfinite().all()


def test_sums_beyond_the_range_are_infinite():
    lhs, rhs = torch.full((1, 512), 240.0), torch.full((512, 1), 240.0)
    assert accumulate(lhs, rhs, Accumulator(FP16)).isinf().all()
    assert accumulate(lhs, rhs, Accumulator(BF16)).isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 0}, "block = 0 with blocks of 0; expected a positive number"),
        ({"block": 32, "promote": 100}, "promote = 100 with blocks of 32; expected a positive number"),
        ({"format": formats.get("e4m3fn")}, "needs a float format with infinities"),
        ({"format": formats.get("fp32"), "aligned": True}, "its sums have 26 bits"),
        ({"aligned": True}, "5 exponent bits"),
    ],
)
def test_invalid_accumulators_raise(options, message):
    with pytest.raises(QuantizationError, match=message):
        Accumulator(**{"format": FP16, **options})
