"""The optimizer that `prepare` returns continues the one given: groups, schedulers, state, masters, hooks."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR

import halfstep
from halfstep.errors import OptimizerError
from halfstep.quant.masters import get_master
from tiny import PROJECTED, RECIPES, adamw, assert_same, batch, copied, mlp, mostly_slow, prepared, stored, train


@pytest.mark.parametrize("build", [lambda o: StepLR(o, 1, 0.5), lambda o: OneCycleLR(o, 0.1, total_steps=9)])
@pytest.mark.parametrize("when", ["before", "after", "both"])
def test_schedulers_built_before_or_after_prepare_set_the_rate(build, when):
    """Warnings are errors here, torch's about the order of optimizer.step() and scheduler.step() included."""
    stock_model = mlp()
    stock = adamw(stock_model)
    stock_scheduler = build(stock)
    model = mlp()
    old = adamw(model)
    scheduler = build(old) if when != "after" else None
    model, new, scaler = prepared("bf16-mixed", model, old)
    scheduler = scheduler if when == "before" else build(new)
    for _ in range(4):
        train(model, new, scaler, 1)
        stock.step()
        scheduler.step()
        stock_scheduler.step()
        assert new.param_groups[0]["lr"] == pytest.approx(stock.param_groups[0]["lr"])


def test_a_scheduler_works_after_loading_the_optimizers_state():
    model = mlp()
    old = adamw(model)
    scheduler = LambdaLR(old, lambda epoch: 0.5**epoch)
    model, new, scaler = prepared("bf16-master", model, old)
    train(model, new, scaler, 1)
    new.load_state_dict(copied(new.state_dict()))
    scheduler.step()
    assert new.param_groups[0]["lr"] == 0.005
    assert new.param_groups is old.param_groups


def test_a_scheduler_resumes_from_its_state():
    model, optimizer, scaler = prepared("bf16-mixed")
    scheduler = CosineAnnealingLR(optimizer, 10)
    train(model, optimizer, scaler, 1)
    scheduler.step()
    saved = copied(scheduler.state_dict()), copied(optimizer.state_dict())
    _, optimizer, _ = prepared("bf16-mixed")
    scheduler = CosineAnnealingLR(optimizer, 10)
    optimizer.load_state_dict(saved[1])
    scheduler.load_state_dict(saved[0])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(scheduler.get_last_lr()[0])
    assert optimizer.param_groups[0]["lr"] < 0.01


@pytest.mark.parametrize("name", mostly_slow([name for name in RECIPES if name not in PROJECTED]))
def test_moments_are_taken_over_in_the_recipes_format(name):
    model = mlp()
    old = adamw(model)
    model(batch()[0]).square().mean().backward()
    old.step()
    before = {n: copied(old.state[p]) for n, p in model.named_parameters()}
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    model, new, _ = prepared(name, model, old)
    recipe = halfstep.get_recipe(name)
    assert not old.state
    for n, p in model.named_parameters():
        assert new.state[p]["step"] == 1
        for moment in ("exp_avg", "exp_avg_sq"):
            assert_same(new.state[p][moment], stored(recipe, moment, before[n][moment]))
        if recipe.master:
            exact = recipe.master in ("fp32", "split")
            value = get_master(recipe.master).value(p.detach(), new.state[p])
            torch.testing.assert_close(value, weights[n], rtol=0 if exact else 2.0**-16, atol=0)
        for moment in [m for m in ("exp_avg", "exp_avg_sq") if recipe.moment(m).residual]:
            pair = new.state[p][moment].float() + new.state[p][moment + "_residual"].float()
            torch.testing.assert_close(pair, before[n][moment], rtol=2.0**-16, atol=0)


def test_a_frozen_parameter_gets_no_master():
    model = mlp()
    model[0].requires_grad_(False)
    model, optimizer, scaler = prepared(
        "bf16-master", model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    )
    train(model, optimizer, scaler)
    assert model[0].weight not in optimizer.state
    assert "master" in optimizer.state[model[3].weight]


@pytest.mark.parametrize("name", ["bf16-master", "bf16-stochastic", "fp32"])
def test_parameters_added_later_follow_the_recipe(name):
    """Unfreezing a layer halfway is an add_param_group with nothing but parameters."""
    model = mlp()
    model, optimizer, scaler = prepared(name, model, torch.optim.AdamW(model[0].parameters(), lr=0.01))
    train(model, optimizer, scaler)
    optimizer.add_param_group({"params": list(model[3].parameters())})
    assert optimizer.param_groups[1]["lr"] == 0.01
    before = model[3].weight.detach().clone()
    with (
        nullcontext() if name != "bf16-master" else pytest.warns(UserWarning, match=r"\(3.weight\) .* rounded already")
    ):
        train(model, optimizer, scaler, 1)
    train(model, optimizer, scaler)
    assert not torch.equal(model[3].weight, before)
    assert ("master" in optimizer.state[model[3].weight]) == (name == "bf16-master")


def test_prepare_draws_from_the_generator_only_for_stochastic_rounding():
    for name in RECIPES:
        state = torch.get_rng_state()
        model = mlp()
        torch.set_rng_state(state)
        halfstep.prepare(model, adamw(model), recipe=name)
        stochastic = halfstep.get_recipe(name).update_rounding == "stochastic"
        assert torch.equal(torch.get_rng_state(), state) != stochastic


def test_the_seed_determines_stochastic_updates():
    def weights(seed):
        model, optimizer, scaler = prepared("bf16-stochastic", generator=seed)
        train(model, optimizer, scaler)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert_same(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.quick("fp32", "bf16-mixed", "fp16-mixed")
@pytest.mark.parametrize("name", mostly_slow(RECIPES))
def test_a_deepcopy_of_model_optimizer_and_scaler_trains_identically(name):
    model, optimizer, scaler = prepared(name)
    train(model, optimizer, scaler)
    twin_model, twin, twin_scaler = copy.deepcopy((model, optimizer, scaler))
    train(model, optimizer, scaler)
    train(twin_model, twin, twin_scaler)
    assert_same(dict(twin_model.state_dict()), dict(model.state_dict()))


def test_an_unsupported_optimizer_is_refused_without_changes():
    model = mlp()
    before, kind = copied(model.state_dict()), type(model)
    with pytest.raises(OptimizerError, match="Adadelta cannot be expressed"):
        halfstep.prepare(model, torch.optim.Adadelta(model.parameters()), recipe="bf16-master")
    with pytest.raises(OptimizerError, match="amsgrad=True cannot be expressed"):
        halfstep.prepare(model, adamw(model, amsgrad=True), recipe="bf16-master")
    model_again, optimizer, _ = prepared("bf16-master", mlp())
    with pytest.raises(
        OptimizerError, match=r"LowBit is halfstep's own and keeps its states already. Hand torch.optim.AdamW"
    ):
        halfstep.prepare(model, optimizer, recipe="bf16-master")
    assert type(model) is kind
    assert_same(dict(model.state_dict()), dict(before))
    assert model_again is not model


def test_a_sparse_gradient_is_refused():
    model = torch.nn.Embedding(4, 3, sparse=True)
    _, optimizer, _ = prepared("fp32", model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(OptimizerError, match=r"parameter 0 \(weight\) has a torch.sparse_coo gradient.*sparse=False"):
        optimizer.step()


def test_hooks_and_their_handles_move_to_the_new_optimizer():
    model, seen = mlp(), []
    old = adamw(model)
    handles = [
        old.register_step_pre_hook(lambda optimizer, args, kwargs: seen.append(("before", optimizer))),
        old.register_step_post_hook(lambda optimizer, args, kwargs: seen.append(("after", optimizer))),
        old.register_state_dict_pre_hook(lambda optimizer: seen.append(("saving", optimizer))),
        old.register_state_dict_post_hook(lambda optimizer, state: {**state, "mark": 1}),
        old.register_load_state_dict_pre_hook(lambda optimizer, state: seen.append(("loading", state["mark"]))),
        old.register_load_state_dict_post_hook(lambda optimizer: seen.append(("loaded", optimizer))),
    ]
    model, new, scaler = prepared("bf16-master", model, old)
    train(model, new, scaler, 1)
    assert seen == [("before", new), ("after", new)]
    seen.clear()
    saved = new.state_dict()
    new.load_state_dict(saved)
    assert seen == [("saving", new), ("loading", 1), ("loaded", new)]
    for handle in handles:
        handle.remove()
    seen.clear()
    train(model, new, scaler, 1)
    new.load_state_dict(new.state_dict())
    assert seen == []
    for refused in (old.step, old.state_dict, lambda: old.load_state_dict(saved)):
        with pytest.raises(OptimizerError, match="was handed to halfstep"):
            refused()
