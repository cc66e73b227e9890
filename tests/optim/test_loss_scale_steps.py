"""The loss scaler's effects on gradients and steps: divide, clip, skip, refuse."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

import halfstep
from halfstep import LossScaler
from halfstep.errors import LossScaleError
from tiny import adamw, assert_same, batch, mlp, prepared, train


pytestmark = pytest.mark.usefixtures("products")
STOCK = [
    lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True),
    lambda m: torch.optim.AdamW(m.parameters(), foreach=True),
    lambda m: torch.optim.AdamW(m.parameters(), fused=True),
    lambda m: torch.optim.RMSprop(m.parameters()),
]


def backward(model, scaler, factor=1.0):
    x, y = batch()
    scaler.scale(F.mse_loss(model(x), y) * factor).backward()


@pytest.mark.quick("own-None-<lambda>0", "own-None-<lambda>1", "own-None-<lambda>4")
@pytest.mark.parametrize("build", STOCK)
@pytest.mark.parametrize("clip", [None, 0.01, 1e3])
def test_stock_optimizers_match_torchs_scaler(build, clip):
    weights = []
    for scaler in (LossScaler(), torch.amp.GradScaler("cpu")):
        model = mlp()
        optimizer = build(model)
        for i in range(4):
            backward(model, scaler, float("inf") if i == 1 else 1.0)
            if clip and isinstance(scaler, LossScaler):
                scaler.clip_grad_norm_(optimizer, clip)
            elif clip:
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        weights.append(dict(model.state_dict()))
        assert scaler.get_scale() == 2.0**15
        assert not hasattr(optimizer, "grad_scale")
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-6)


@pytest.mark.quick("own-1.0-bf16-mixed", "carried-1.0-fp32", "carried-inf-fp32")
@pytest.mark.parametrize("name", ["fp32", "bf16-mixed", "bf16-master", "fp16-mixed"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clip_equals_unscale_then_torchs_clip(name, norm_type):
    results = []
    for ours in (True, False):
        model, optimizer, scaler = prepared(name)
        backward(model, scaler)
        if ours:
            norm = scaler.clip_grad_norm_(optimizer, 0.01, norm_type)
        else:
            scaler.unscale_(optimizer)
            norm = clip_grad_norm_(model.parameters(), 0.01, norm_type)
        scaler.step(optimizer)
        scaler.update()
        results.append((norm.float(), optimizer.state[model[0].weight]["exp_avg"]))
        assert norm > 0.01
    tolerance = 2.0**-6 if name == "bf16-master" else 1e-5  # torch rounds norm, coefficient and product to bf16
    torch.testing.assert_close(results[0], results[1], rtol=tolerance, atol=1e-9)


@pytest.mark.parametrize("name", ["fp32", "bf16-pure"])
@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_clipping_with_coefficient_zero_matches_torch(name, max_norm):
    """An infinite gradient without a loss scale, or max_norm = 0."""
    model, optimizer, scaler = prepared(name)
    backward(model, scaler, 1.0 if max_norm == 0 else float("inf"))
    norm = scaler.clip_grad_norm_(optimizer, max_norm)
    scaler.step(optimizer)
    if max_norm == 0:
        assert all((optimizer.state[p]["exp_avg"] == 0).all() for p in model.parameters())
    else:
        assert not norm.isfinite()
        assert scaler.is_enabled() or not all(p.isfinite().all() for p in model.parameters())


def test_clip_without_gradients_returns_zero_and_after_step_is_refused():
    model, optimizer, scaler = prepared("fp16-master")
    assert scaler.clip_grad_norm_(optimizer, 1.0) == 0
    backward(model, scaler)
    scaler.step(optimizer)
    with pytest.raises(LossScaleError, match=r"after step\(\)"):
        scaler.clip_grad_norm_(optimizer, 1.0)


def test_fp16_gradients_below_its_range_when_unscaled_move_the_weight():
    """2^-16 after scaling by 2^16 is 2^-32 unscaled, which is zero in fp16."""
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer, scaler = prepared("fp16-master", model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = optimizer.state[model.weight]["master"].clone()
    model.weight.grad = torch.full((1, 1), 2.0**-16, dtype=torch.float16)
    assert (model.weight.grad / 2.0**16).item() == 0
    with torch.no_grad():
        optimizer.state[model.weight]["master"].zero_()
        model.weight.zero_()
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.state[model.weight]["master"].item() == -(2.0**-32)
    assert before.shape == (1, 1)


def test_unscaling_fp16_gradients_of_torchs_optimizers_is_refused():
    half = mlp().half()
    for stock in (torch.optim.SGD(half.parameters(), lr=0.1), torch.optim.SGD(half.parameters(), lr=0.1, fused=True)):
        for p in half.parameters():
            p.grad = torch.ones_like(p)
        words = (
            r"flush small ones to zero \(parameter 0 of group 0 and 5 more\).*from halfstep.prepare.*without clipping"
        )
        for call in (LossScaler().unscale_, lambda o: LossScaler().clip_grad_norm_(o, 1.0)):
            with pytest.raises(LossScaleError, match=words):
                call(stock)
        assert all((p.grad == 1).all() for p in half.parameters())
        if not stock.defaults["fused"]:
            with pytest.raises(LossScaleError, match="flush small ones to zero"):
                LossScaler().step(stock)


def test_calls_out_of_order_are_refused():
    model = mlp()
    optimizer, scaler = adamw(model), LossScaler()
    with pytest.raises(LossScaleError, match=r"update\(\) before any step\(\) or unscale_\(\)"):
        scaler.update()
    with pytest.raises(LossScaleError, match=r"no parameter of the optimizer has a gradient.*backward\(\) first"):
        scaler.step(optimizer)
    backward(model, scaler)
    with pytest.raises(LossScaleError, match=r"a closure cannot be used.*neither checked nor divided.*'bf16-mixed'"):
        scaler.step(optimizer, lambda: None)
    with pytest.raises(LossScaleError, match="a closure cannot be used"):
        scaler.step(optimizer, closure=lambda: None)
    scaler.unscale_(optimizer)
    with pytest.raises(LossScaleError, match=r"already unscaled since the last update\(\)"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(LossScaleError, match="already stepped since the last update"):
        scaler.unscale_(optimizer)
    with pytest.raises(LossScaleError, match=r"step\(\) has already been called.*update\(\) first"):
        scaler.step(optimizer)
    scaler.update()


def test_a_disabled_scaler_is_the_identity():
    model = mlp()
    optimizer, scaler = adamw(model), LossScaler(enabled=False)
    loss = model(batch()[0]).sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    grad = model[0].weight.grad.clone()
    scaler.unscale_(optimizer)
    assert_same(model[0].weight.grad, grad)
    for _ in range(2):
        scaler.step(optimizer)
    scaler.update()
    assert scaler.state_dict() == {}
    assert optimizer.state[model[0].weight]["step"] == 2
    assert scaler.step(optimizer, lambda: torch.tensor(5.0)) == 5


@pytest.mark.quick("own-False-bf16-master", "own-False-fp16-mixed", "own-True-fp16-master")
@pytest.mark.parametrize("name", ["bf16-master", "bf16-stochastic", "fp16-mixed", "fp16-master"])
@pytest.mark.parametrize("unscale", [False, True])
def test_torchs_scaler_works_with_our_optimizer(name, unscale):
    weights = []
    for torchs in (True, False):
        model, optimizer, scaler = prepared(name)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if torchs else LossScaler(init_scale=1024.0)
        for factor in (1.0, float("inf"), 1.0, 1.0):
            backward(model, scaler, factor)
            if unscale and not name.startswith("fp16-master"):
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        weights.append(dict(model.state_dict()))
        assert optimizer.state[model[0].weight]["step"] == 3
    assert_same(weights[0], weights[1])


def test_update_advances_the_models_scaling_states():
    model, optimizer, scaler = prepared("fp32")
    calls = []
    scaler._follower.advance = lambda skipped: calls.append(skipped)
    train(model, optimizer, scaler, 3)
    assert calls == [False] * 3
    halfstep.revert(model)
    _, _, scaler = prepared("bf16-master", model, adamw(model))
    halfstep.revert(model)
    with pytest.raises(halfstep.errors.RecipeError, match="follows no recipe"):
        scaler.update(1.0)


def test_a_growing_scale_does_not_change_training():
    """Powers of two are exact."""
    runs = []
    for interval in (1, 1000):
        model, optimizer, scaler = prepared("fp16-mixed")
        scaler.set_growth_interval(interval)
        scaler.update(256.0)
        runs.append((train(model, optimizer, scaler, 4), scaler.get_scale()))
    assert [scale for _, scale in runs] == [4096.0, 256.0]
    assert all(b < a for a, b in pairwise(runs[0][0]))
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=1e-3, atol=0)


def test_is_unscaled_is_true_between_unscaling_and_step():
    model, optimizer, scaler = prepared("fp16-mixed")
    assert not scaler.is_unscaled(optimizer)
    for unscale in (scaler.unscale_, lambda o: scaler.clip_grad_norm_(o, 1.0)):
        backward(model, scaler)
        assert not scaler.is_unscaled(optimizer)
        unscale(optimizer)
        assert scaler.is_unscaled(optimizer)
        scaler.step(optimizer)
        assert not scaler.is_unscaled(optimizer)
        scaler.update()
        optimizer.zero_grad()
