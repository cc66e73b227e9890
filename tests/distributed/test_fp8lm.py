"""FP8-LM's reduction, with its ranks in one process, against torch's casts."""

import pytest
import torch

from halfstep.distributed.mean import fp8lm_steps, run
from halfstep.recipe import FP8_LM


LENGTHS = [300, 1, 64]


def gradients(ranks):
    generator = torch.Generator().manual_seed(0)
    scales = torch.cat([torch.full((n,), 10.0 ** -(3 * i)) for i, n in enumerate(LENGTHS)])
    common, own = (torch.randn(n, sum(LENGTHS), generator=generator) for n in (1, ranks))
    return (common + own) * scales


def reduced(given, mu, adapts=True):
    own, factors = given.clone(), mu.repeat(len(given), 1)
    quantizer = FP8_LM.gradients.quantizer
    run(lambda to: fp8lm_steps(own[to.rank], LENGTHS, quantizer, to, factors[to.rank], adapts), len(given))
    assert torch.equal(own.nan_to_num(nan=7.0), own[:1].expand_as(own).nan_to_num(nan=7.0))
    assert torch.equal(factors, factors[:1].expand_as(factors))
    return own[0], factors[0]


def reduced_by_torch(given, mu):
    """One power-of-two scale per parameter, and every sum rounded and saturated, in rank order."""
    found, full = [], []
    for i, part in enumerate(given.split(LENGTHS, 1)):
        scale = mu[i] * 2 ** (448 / part.abs().amax()).log2().floor()
        total = (part[0] * scale).to(torch.float8_e4m3fn).float()
        for other in part[1:]:
            total = (total + (other * scale).to(torch.float8_e4m3fn).float()).clamp(-448, 448)
            total = total.to(torch.float8_e4m3fn).float()
        found.append(total / (scale * len(given)))
        full.append(float((total.abs() == 448).float().mean()))
    return torch.cat(found), full


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_each_sum_is_rounded_and_saturated(ranks):
    given, mu = gradients(ranks), torch.tensor([1.0, 0.25, 0.125])
    expected, full = reduced_by_torch(given, mu)
    found, following = reduced(given, mu)
    assert torch.equal(found, expected)
    for before, share, after in zip(mu.tolist(), full, following.tolist(), strict=True):
        assert after == pytest.approx(before / 2 if share > 1e-5 else before * 2 ** (1 / 1000))
    assert (full[0] > 1e-5) == (ranks > 1)
    assert torch.equal(reduced(given, mu, adapts=False)[1], mu)


def test_mu_grows_up_to_two():
    found, mu = reduced(torch.zeros(2, 365), torch.tensor([1.0, 1.9999, 2.0]))
    assert not found.any()
    assert mu.tolist() == pytest.approx([2 ** (1 / 1000), 2.0, 2.0])


@pytest.mark.parametrize("lost", [float("nan"), float("inf")])
def test_a_nonfinite_gradient_on_one_rank_makes_the_parameter_nan(lost):
    given = gradients(3)
    given[2, 10] = lost
    found, _ = reduced(given, torch.ones(3))
    assert found[:300].isnan().all()
    assert torch.equal(found[300:], reduced_by_torch(given, torch.ones(3))[0][300:])
