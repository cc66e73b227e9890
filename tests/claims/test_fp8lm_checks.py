"""FP8-LM's published figures against the ledger's checks and exact sums."""

from itertools import pairwise

import pytest
import torch

from halfstep import formats, ops
from halfstep.claims.checks import fp8 as fp8lm
from halfstep.claims.checks.base import get_check
from halfstep.quant import Quantizer, Scales
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import TENSOR


E4M3 = formats.get("e4m3fn")


def scale_of(amax, mu=1.0):
    return get_scaling("rceil").factor(amax, E4M3) * mu


@pytest.mark.parametrize("mu", [0.5, 0.25, 0.0625])
def test_factor_on_the_gradient_changes_no_code_but_a_scale_margin_does(mu):
    g = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    codes, scale = ops.encode_scaled(g, torch.float8_e4m3fn)
    before, scale_before = ops.encode_scaled(mu * g, torch.float8_e4m3fn)
    assert torch.equal(before.view(torch.uint8), codes.view(torch.uint8))
    assert scale_before == mu * scale
    quantizer = Quantizer(E4M3, scales=Scales(TENSOR, get_scaling("rceil")))
    margin = -torch.tensor(mu).log2().int().item()
    lower = Quantizer(E4M3, scales=Scales(TENSOR, get_scaling("rceil", margin=margin)))
    assert not torch.equal(lower.quantize(g).codes, quantizer.quantize(g).codes)
    assert lower.quantize(g).scale.item() == quantizer.quantize(g).scale.item() - torch.tensor(mu).log2().int().item()


@pytest.mark.slow
def test_sum_of_sixteen_ranks_saturates_until_the_factor_drops():
    """Published: 6.4, 11.4, 21.8, 24.0 and 24.0 dB for other gradients; the controller reaches 23 dB after 3 steps."""
    g = fp8lm.shards(16, 4096)
    found = [fp8lm.snr(fp8lm.summed(g, 2.0**-n)[0], g.mean(0)) for n in range(5)]
    assert found == pytest.approx([6.4, 11.4, 21.8, 24.0, 24.0], abs=2.5)
    steps = fp8lm.controlled(g, 30)
    assert [decibels for _, decibels in steps[:3]] == found[:3]
    assert min(decibels for _, decibels in steps[4:]) > 23
    moves = pairwise(mu for mu, _ in steps)
    for before, now in moves:
        assert any(now == pytest.approx(before * by, rel=1e-6) for by in (1 / 2, 2 ** (1 / 1000)))


def test_sum_over_ranks_equals_torch_casts():
    """Each partial sum rounded and saturated by torch's own casts."""
    g = fp8lm.shards(4, 512)
    s = float(scale_of(g.abs().amax().float()))
    total = torch.zeros(512, dtype=torch.float64)
    for shard in g:
        total = (total + (shard * s).float().to(torch.float8_e4m3fn).double()).clamp(-448, 448)
        total = total.float().to(torch.float8_e4m3fn).double()
    torch.testing.assert_close(fp8lm.summed(g, 1.0)[0], total / (4 * s), rtol=0, atol=0)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_mean_of_representable_gradients_is_exact(ranks):
    """Gradients that are multiples of 1/8 with sums that E4M3 represents: the mean is the sum of codes over N s."""
    generator = torch.Generator().manual_seed(2)
    g = torch.randint(-2, 3, (ranks, 256), generator=generator).double() / 8
    g[:, 0] = 0.25
    mean, following = fp8lm.summed(g, 1 / 16)
    torch.testing.assert_close(mean, g.mean(0), rtol=0, atol=0)
    assert following > 1 / 16  # nothing saturated


def test_share_of_zeroed_second_moments_equals_published():
    """Published: 64 % in E4M3, 0.2 % in E5M2, 0.001 % in scaled fp16."""
    found = get_check("fp8lm-second-moment").measure()
    assert found["e4m3fn"] == pytest.approx(0.64, abs=0.06)
    assert found["e5m2"] == pytest.approx(0.002, abs=0.001)
    assert found["fp16"] <= 0.00001


def test_pre_division_zeroes_and_post_division_overflows():
    """Published for 64 ranks: zeros grow from 0.055 to 0.73, and some sums overflow."""
    found = get_check("fp8lm-pre-and-post").measure()
    assert found["zeroed_1"] < 0.1 < 0.5 < found["zeroed_64"]
    assert found["clipped_64"] > 0


def test_bytes_per_parameter_equal_published():
    found = get_check("fp8lm-bytes").measure()
    assert found == {"fp32": 16, "o1": 11, "o2": 6, "o3": 7, "grads": 1}
