"""Reasons for FP4 by modules and by stages: flat attention, vanishing gradients, a last stage in higher precision.

Source: what Zhou et al. 2025 (arXiv 2502.11458) is reported to say; the data are toys of our own."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep import formats, ops
from halfstep.quant import Quantizer, Scales, Tile
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import TENSOR
from halfstep.recipe import LinearSpec, Matmul, Recipe, Rule, Stage, chain, get_recipe


BY_PATH = {rule.path: rule.linear.output for rule in get_recipe("fp4-zhou").rules}
FINE, COARSE = BY_PATH["*attn"], BY_PATH["*"]


def attention(seed, rounded):
    """The mean entropy and the mean largest weight of a softmax over 256 tokens, whose keys resemble their queries."""
    chance = torch.Generator().manual_seed(seed)
    x, wq, noise = (torch.randn(rows, 64, generator=chance) for rows in (256, 64, 64))
    wq = wq / 8
    q, k = (ops.linear(x, weight, None, LinearSpec(rounded)) for weight in (wq, wq + 0.1 * noise / 8))
    weights = torch.softmax(q @ k.t() / 8, -1)
    entropy = -(weights * weights.clamp_min(1e-30).log()).sum(-1)
    return torch.stack([entropy.mean(), weights.amax(-1).mean()])


@pytest.mark.slow
def test_fp4_projections_flatten_attention_more_than_fp8_ones():
    """Means of 8 models: FP4 raises the entropy and lowers the largest weight at least four times as much as FP8."""
    exact, fine, coarse = (
        torch.stack([attention(seed, rounded) for seed in range(8)]).mean(0) for rounded in (Matmul(), FINE, COARSE)
    )
    assert coarse[0] - exact[0] > 0.02
    assert exact[1] - coarse[1] > 0.003
    assert ((coarse - exact).abs() > 4 * (fine - exact).abs()).all()


def share_flushed_to_zero(format, tile):
    """The share of gradients, N(0, 1) times a lognormal of sigma 2, that become zero."""
    chance = torch.Generator().manual_seed(0)
    grads = torch.randn(256, 1024, generator=chance) * torch.exp(2 * torch.randn(256, 1024, generator=chance))
    quantizer = Quantizer(formats.get(format), scales=Scales(tile, get_scaling("current")))
    return float((ops.fake_quantize(grads, quantizer) == 0).float().mean())


def test_gradients_underflow_in_fp4_less_with_blocks_and_not_in_e5m2():
    whole, blocks, fine = (
        share_flushed_to_zero("e2m1fn", TENSOR),
        share_flushed_to_zero("e2m1fn", Tile(1, 32)),
        share_flushed_to_zero("e5m2", TENSOR),
    )
    assert whole == pytest.approx(0.999, abs=1e-3)
    assert blocks == pytest.approx(0.700, abs=5e-3)
    assert fine < 1e-4


# ---- the schedule ----------------------------------------------------------------------------------------------------


FP4 = Recipe("fp4", "Forward products in FP4.", "a toy", rules=(Rule("*", LinearSpec(COARSE)),))
FP32 = get_recipe("fp32")


def loss(share, cosine, seed, steps):
    """The last loss of a tanh regression whose first `share` of the steps is in FP4."""
    chance = torch.Generator().manual_seed(seed)
    x, w1, w2 = (torch.randn(*shape, generator=chance) for shape in ((256, 16), (16, 16), (16, 1)))
    y = torch.tanh(x @ w1 / 2) @ w2 / 2
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    recipe = {0: FP32, 1: FP4}.get(share) or chain(FP4, Stage(FP32, share))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe, total_steps=steps)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (0.5 * (1 + math.cos(math.pi * step / steps)) if cosine else 1.0)
        F.mse_loss(model(x), y).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    with torch.no_grad():
        return float(F.mse_loss(model(x), y))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_gain_of_a_last_fp32_stage_depends_on_the_remaining_learning_rate(seed):
    """With a constant rate the last tenth of the steps is enough; after a cosine decay to zero it is not."""
    constant, cosine = ({share: loss(share, kind, seed, 300) for share in (0, 0.5, 0.9, 1)} for kind in (False, True))
    assert constant[0] < constant[0.5] < constant[0.9] < 0.5 * constant[1]
    assert cosine[0] < cosine[0.5] < cosine[1]
    assert cosine[0.9] > 0.9 * cosine[1]  # no gain: the remaining steps are small
    assert cosine[0.9] > 2 * constant[0.9]
