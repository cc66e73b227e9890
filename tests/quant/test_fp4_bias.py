"""Stochastic FP4 is unbiased where nothing clips; what each scale rule clips; FP4 matmuls are exact."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from families import slow_unless
from halfstep import ops, round_to
from halfstep.ops.operand import decoded, operand
from halfstep.ops.plain import matmul
from halfstep.quant import Hadamard, Scales, get_quantizer
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import square
from halfstep.recipe import LinearSpec, Matmul


FLOOR, NV = get_quantizer("mxfp4"), get_quantizer("nvfp4")
RCEIL = get_quantizer("mxfp4", scale="rceil")
PART = replace(FLOOR, scales=Scales(FLOOR.scales.tile, get_scaling("three_quarters")))
SQUARE = replace(NV, scales=Scales(square(16), NV.scales.rule))


def stochastic(quantizer):
    return replace(quantizer, rounding="stochastic")


def scaled_elements(x, quantizer):
    """Elements before rounding, and the scaled amaxes of the blocks."""
    made, tile = quantizer.quantize(x), quantizer.scales.tile
    multiplier = quantizer.scales.rule.multiplier(made.tensors, quantizer.format)
    return x / tile.spread(multiplier, *x.shape), tile.reduce(x.abs(), "amax") / multiplier


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_stochastic_rounding_within_the_range_is_unbiased():
    """Where the nearest values are 0, 0.5, 1.5, 2, 3, 6 and -4."""
    x = torch.tensor([0.1, 0.7, 1.3, 2.4, 3.3, 5.1, -4.7])
    gap = torch.tensor([0.5, 0.5, 0.5, 1.0, 1.0, 2.0, 2.0])
    count = 50_000
    mean = round_to(x.repeat(count, 1), "e2m1fn", "stochastic", generator=5).double().mean(0)
    assert ((mean - x).abs() < 4.5 * gap / 2 / math.sqrt(count)).all()
    assert round_to(x, "e2m1fn").tolist() == [0.0, 0.5, 1.5, 2.0, 3.0, 6.0, -4.0]
    assert round_to(torch.tensor([7.5, -6.1]), "e2m1fn", "stochastic", generator=5).tolist() == [6.0, -6.0]


@pytest.mark.quick("part")
@pytest.mark.parametrize(
    "quantizer",
    slow_unless((NV, FLOOR, PART).__contains__, [NV, SQUARE, FLOOR, RCEIL, PART]),
    ids=["nvfp4", "square", "floor", "rceil", "part"],
)
def test_a_quantized_tensor_is_unbiased_but_for_clipped_elements(quantizer):
    x, draws = normal(32, 64), 300
    ratio, _ = scaled_elements(x, quantizer)
    clipped = ratio.abs() > 6
    back = x / ratio
    made = torch.stack([stochastic(quantizer)(x, generator=seed) for seed in range(draws)]).double()
    spread = made.std(0)
    z = ((made.mean(0) - x) / (spread / math.sqrt(draws)))[(spread > 0) & ~clipped]
    assert z.abs().max() < 5.5
    assert 0.8 < z.std() < 1.2
    torch.testing.assert_close(made.mean(0)[clipped].float(), (6 * ratio.sign() * back)[clipped])
    assert bool(clipped.any()) == (quantizer not in (RCEIL, PART))


def test_nvfp4_scales_clip_the_amaxes_of_half_the_blocks():
    """E4M3 rounds a block's scale to nearest: half of them down, by 3% at most, so their amaxes are beyond 6."""
    ratio, maxima = scaled_elements(normal(1024, 1024), NV)
    assert (maxima > 6).double().mean() == pytest.approx(0.52, abs=0.02)
    beyond = ratio.abs()[ratio.abs() > 6]
    assert len(beyond) / ratio.numel() == pytest.approx(0.035, abs=0.001)
    assert (1 - 6 / beyond).mean() == pytest.approx(0.022, abs=0.001)
    assert maxima.max() <= 6 * (1 + 2.0**-4)


def test_floored_scales_clip_the_amaxes_of_two_blocks_in_five():
    """Scaled amaxes lie in [4, 8), with uniform logarithms where elements have all magnitudes; where all have a
    standard deviation of 1 they lie lower."""
    magnitudes = 2.0 ** torch.rand(1024, 1, generator=torch.Generator().manual_seed(1))
    ratio, maxima = scaled_elements(normal(1024, 1024) * magnitudes, FLOOR)
    assert (maxima > 6).double().mean() == pytest.approx(math.log2(8 / 6), abs=0.015)
    assert 4 <= maxima.min() <= maxima.max() < 8
    _, ones = scaled_elements(normal(1024, 1024), FLOOR)
    assert (ones > 6).double().mean() == pytest.approx(0.30, abs=0.01)
    assert (1 - 6 / ratio.abs()[ratio.abs() > 6]).max() < 0.25


@pytest.mark.quick("ceil")
@pytest.mark.parametrize("rule", ["rceil", "ceil"])
def test_scales_rounded_up_clip_nothing(rule):
    for power in range(-4, 5):
        ratio, maxima = scaled_elements(normal(256, 1024) * 2.0 ** (power / 2), get_quantizer("mxfp4", scale=rule))
        assert ratio.abs().max() <= 6
        assert maxima.min() >= (3 if rule == "rceil" else 2)


def test_three_quarters_scaling_equals_its_authors_formula():
    """3 x / 2^(e + 2), with e = floor(log2 amax) - 2, is rounded; values are 2^(e + 2) / 3 times that."""
    for x in (
        normal(64, 64),
        normal(64, 64) * 2.0**-40,
        torch.tensor([[1.0, -0.5, 0.25, 0.0] * 8]),
        torch.zeros(1, 32),
    ):
        amax = x.view(-1, 32).abs().amax(1, keepdim=True).double()
        power = 2.0 ** (torch.floor(torch.log2(amax.clamp(min=2.0**-100))) - 2)
        elements = round_to((0.75 * x.view(-1, 32) / power).float(), "e2m1fn")
        expected = (elements * power * 4 / 3).float().view(x.shape)
        torch.testing.assert_close(PART(x), expected, rtol=3e-7, atol=0)
        made = operand(x, PART, torch.bfloat16)
        assert torch.equal(made.values.double().view(-1, 32), elements * power)
        assert made.scale == torch.tensor(4 / 3)
        stored = decoded(ops.quantize(x, PART), torch.bfloat16)
        assert torch.equal(stored.values.float(), made.values.float())
        assert torch.equal(stored.scale, made.scale)
        assert scaled_elements(x + 1e-30, PART)[1].max() < 6
        assert scaled_elements(normal(1024, 32), PART)[1].min() >= 3


@pytest.mark.quick("None")
@pytest.mark.parametrize("hadamard", [None, Hadamard()], ids=str)
def test_gradients_of_a_layer_are_unbiased(hadamard):
    """Of both backward matmuls, over many draws; their other operands are not rounded."""
    x, w, dy = normal(48, 32), normal(16, 32, seed=1), normal(48, 16, seed=2)
    exact = get_quantizer("fp32")
    spec = LinearSpec(Matmul(), Matmul(stochastic(RCEIL), exact), Matmul(stochastic(RCEIL), exact, hadamard=hadamard))
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    torch.manual_seed(0)
    y = ops.linear(*leaves, None, spec)
    found = [torch.autograd.grad(y, leaves, dy, retain_graph=True) for _ in range(200)]
    for made, expected in zip(zip(*found, strict=True), (dy @ w, dy.t() @ x), strict=True):
        draws = torch.stack(made).double()
        z = (draws.mean(0) - expected) / (draws.std(0) / math.sqrt(len(made)))
        assert z.abs().max() < 5.5
        assert 0.8 < z.std() < 1.2


def test_square_tiles_quantize_a_weight_and_its_transpose_alike():
    """Q(W)^T = Q(W^T), which does not hold for rows of 16."""
    w = normal(64, 48)
    assert torch.equal(SQUARE(w).t(), SQUARE(w.t()))
    assert (NV(w).t() - NV(w.t())).abs().max() > 0.3


@pytest.mark.parametrize("quantizer", [FLOOR, RCEIL, NV, SQUARE], ids=["floor", "rceil", "nvfp4", "square"])
def test_fp4_matmuls_equal_exact_fractions(quantizer):
    """Elements times their blocks' scales are exact in bf16, and sums of few of their products in float32: the matmul
    equals that of exact fractions, but for the tensors' scales."""
    a, b = normal(16, 48), normal(16, 48, seed=1)
    sides = []
    for x in (a, b):
        made = operand(x, quantizer, torch.bfloat16)
        assert torch.equal(made.values.bfloat16().float(), made.values.float())  # exact in bf16 and float32
        stored = quantizer.quantize(x)
        blocks = stored.tensors | ({"tensor_scale": torch.ones(())} if "tensor_scale" in stored.tensors else {})
        assert torch.equal(made.values.float(), replace(stored, tensors=blocks).dequantize())
        sides.append(made)
    lhs, rhs = sides
    rows, columns = ([[Fraction(value) for value in row] for row in side.values.tolist()] for side in sides)
    exact = [[sum(u * v for u, v in zip(row, column, strict=True)) for column in columns] for row in rows]
    found = matmul(lhs.values, rhs.values.t(), dtype=torch.float32)
    assert [[Fraction(value) for value in row] for row in found.tolist()] == exact
