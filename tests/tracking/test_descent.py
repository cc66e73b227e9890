"""Descent quality and lost updates: published figures and worked examples."""

import pytest
import torch

import halfstep
from halfstep.optim import Update
from halfstep.tracking import Arrival, arrival, arrivals
from tiny import RECIPES, batch, mostly_slow, prepared, train


def quality(recipe, lr, start=None, seed=3, steps=1):
    """The arrival of AdamW steps on weights N(0, 0.02), as late in training."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(4000, generator=generator) * 0.02 if start is None else start
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(value.clone())
    optimizer = torch.optim.AdamW([model.weight], lr=lr, weight_decay=0.0)
    model, optimizer, _ = halfstep.prepare(model, optimizer, recipe, generator=seed)
    optimizer.awaits_scaler = False  # gradients are set by the test
    for _ in range(steps):
        dtype = model.weight.grad_dtype or model.weight.dtype
        model.weight.grad = torch.randn(value.shape, generator=generator).to(dtype)
        with arrivals(optimizer, {model.weight: "weight"}) as found:
            optimizer.step()
    return found.model


def test_arrival_equals_worked_example():
    update = Update(
        torch.zeros(4), torch.zeros(4), torch.tensor([3.0, 4.0, 0.0, 1.0]), torch.tensor([3.0, 0.0, 7.0, 2.0])
    )
    assert arrival(update) == Arrival(along=11.0, wanted=26.0, lost=1, moved=3)
    assert arrival(update).quality == 11 / 26
    assert arrival(update).lost_share == 1 / 3
    assert (arrival(update) + arrival(update)).quality == 11 / 26
    assert Arrival().quality is None
    assert Arrival().lost_share is None


@pytest.mark.parametrize("recipe", ["fp32", "bf16-mixed", "bf16-master", "fp16-master", "bf16-split", "bf16-megatron"])
@pytest.mark.parametrize("lr", [1e-3, 1e-5])
def test_masters_lose_no_update(recipe, lr):
    found = quality(recipe, lr)
    assert found.quality == pytest.approx(1.0, abs=1e-3)
    assert found.lost_share == 0.0


@pytest.mark.parametrize("recipe", ["bf16-collage-light", "bf16-collage-plus", "bf16-kahan"])
@pytest.mark.parametrize("lr", [1e-3, 1e-4])
def test_compensated_weights_lose_little(recipe, lr):
    assert quality(recipe, lr, steps=5).quality >= 0.99


def test_quality_is_zero_if_all_updates_are_lost():
    found = quality("bf16-nomaster", 2.0**-12, torch.ones(100))
    assert found.quality == 0.0
    assert found.lost_share == 1.0


def test_quality_falls_with_the_learning_rate_without_a_master():
    found = [quality("bf16-nomaster", lr) for lr in (1e-4, 1e-5, 1e-6)]
    qualities, lost = [f.quality for f in found], [f.lost_share for f in found]
    assert qualities == sorted(qualities, reverse=True)
    assert lost == sorted(lost)
    assert qualities[0] > 0.95
    assert qualities[-1] < 0.3
    assert lost[-1] > 0.9


@pytest.mark.slow
def test_stochastic_rounding_quality_is_1_on_average():
    """Mean over 1,000 draws of one step, within three standard errors of 1."""
    value = torch.full((8,), 1.0)
    draws = torch.tensor([quality("bf16-stochastic", 2.0**-12, value, seed=s).quality for s in range(1000)])
    assert abs(draws.mean() - 1) < 3 * draws.std() / 1000**0.5
    assert draws.std() > 0.1


@pytest.mark.parametrize("name", mostly_slow(RECIPES))
def test_observing_arrivals_changes_no_bit(name):
    """Every recipe reports all parameters by name, and trains as it would unobserved."""
    results = []
    for watch in (False, True):
        model, optimizer, scaler = prepared(name)
        names = {p: n for n, p in model.named_parameters()}
        if watch:
            with arrivals(optimizer, names) as found:
                train(model, optimizer, scaler, steps=1)
            assert set(found.layers) == set(names.values())
            train(model, optimizer, scaler, steps=2)
        else:
            train(model, optimizer, scaler, steps=3)
        results.append(model(batch()[0]))
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)
