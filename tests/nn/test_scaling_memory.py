"""Scaling states of models made on the meta device, after `to_empty`, and under another default dtype."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep.nn.scaling import Scalings
from halfstep.recipe import get_recipe
from tiny import EVERY, adamw, assert_same, batch, mlp, model_for, prepared, train


EVERY_STATEFUL = [n for n in EVERY if any(rule.linear.states for rule in get_recipe(n).rules)]


def states(model):
    return Scalings(model).state_dict()


def on_meta(name):
    with torch.device("meta"):
        model = model_for(name)
    halfstep.apply(model, name)
    assert all(state.is_meta for state in states(model).values())
    return model


def expected_of(name, x, y):
    """The initial weights, and the states after a step, of a model made on the CPU."""
    model = model_for(name)
    halfstep.apply(model, name)
    before = copy.deepcopy(model.state_dict())
    F.mse_loss(model(x), y).backward()
    halfstep.advance(model)
    return before, states(model)


@pytest.mark.quick("False-fp8-delayed-megatron", "True-fp8-delayed", "True-fp8-smooth-swiglu")
@pytest.mark.parametrize("name", EVERY_STATEFUL)
@pytest.mark.parametrize("assign", [False, True])
def test_a_model_from_the_meta_device_starts_with_initialized_states(name, assign):
    """`to_empty` allocates uninitialized storage."""
    x, y = batch()
    weights, expected = expected_of(name, x, y)
    model = on_meta(name)
    if not assign:
        torch.use_deterministic_algorithms(True)
        try:  # torch fills the storage with NaN
            model.to_empty(device="cpu")
        finally:
            torch.use_deterministic_algorithms(False)
    assert assign or not any(state.any() for state in states(model).values())
    model.load_state_dict(weights, assign=assign)
    for p in model.parameters():
        p.requires_grad_()
    with torch.no_grad():
        model.eval()(x)
    F.mse_loss(model.train()(x), y).backward()
    halfstep.advance(model)
    assert_same(states(model), expected)


@pytest.mark.parametrize("name", ["fp8-delayed", "fp8-delayed-megatron"])
def test_states_survive_to_empty_and_to(name):
    model, optimizer, scaler = prepared(name)
    train(model, optimizer, scaler, 2)
    before, weights = states(model), copy.deepcopy(model.state_dict())
    model.to(torch.device("cpu"))
    torch.use_deterministic_algorithms(True)
    try:
        model.to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(states(model), before)
    model.load_state_dict(weights)
    halfstep.revert(model)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("name", ["fp8-delayed", "fp8-delayed-megatron"])
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_states_are_float32_whatever_the_default_dtype(name, default):
    found = []
    for dtype in (torch.float32, default):
        model, (x, y) = mlp(), batch()
        torch.set_default_dtype(dtype)
        try:
            halfstep.apply(model, name)
            optimizer = adamw(model)
            for _ in range(2):
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                halfstep.advance(model)
        finally:
            torch.set_default_dtype(torch.float32)
        assert all(state.dtype == torch.float32 for state in states(model).values())
        found.append(states(model))
    assert_same(found[1], found[0])
