"""Scaling states in checkpoints: a resumed run equals the uninterrupted one; states that do not fit are refused."""

import copy
import io
from dataclasses import replace

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import LossScaleError
from halfstep.nn.scaling import Scalings
from halfstep.quant.scaling.delayed import Delayed
from halfstep.recipe.named.fp8_delayed import delayed_recipe
from tiny import adamw, assert_same, copied, mlp, nameless, prepared, train


STATEFUL = ("fp8-delayed", "fp8-delayed-megatron")
every_stateful = pytest.mark.parametrize("name", STATEFUL)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def all_states(model, optimizer, scaler):
    return copied((model.state_dict(), optimizer.state_dict(), scaler.state_dict(), Scalings(model).state_dict()))


@pytest.mark.quick("False-fp8-delayed", "False-fp8-delayed-megatron")
@every_stateful
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_resumed_run_is_exact(name, scheduled):
    plain = prepared(name)
    train(*plain, 5)
    saved = through_a_file([part.state_dict() for part in plain])
    losses = train(*plain, 4)
    resumed = prepared(name, mlp(1))
    if scheduled:
        train(*resumed, 2)  # an earlier run, whose states must not matter
    for part, state in zip(resumed, saved, strict=True):
        part.load_state_dict(state)
    assert train(*resumed, 4) == losses
    assert_same(all_states(*resumed), all_states(*plain))


@every_stateful
def test_a_run_resumed_without_scaling_states_differs(name):
    plain = prepared(name)
    train(*plain, 5)
    saved = [copy.deepcopy(part.state_dict()) for part in plain]
    losses = train(*plain, 4)
    resumed = prepared(name)
    for part, state in zip(resumed[:2], saved[:2], strict=True):
        part.load_state_dict(state)
    assert train(*resumed, 4) != losses


@every_stateful
def test_scaling_states_are_saved_under_one_extra_key(name):
    _, _, scaler = prepared(name)
    assert list(scaler.state_dict()) == ["halfstep"]
    assert list(scaler.state_dict()["halfstep"]) == ["recipe", "steps", "scaling"]
    assert len(scaler.state_dict()["halfstep"]["scaling"]) == 6


def wider():
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))


@pytest.mark.parametrize(
    ("model", "recipe", "words"),
    [
        (mlp, "fp8-delayed-megatron", "'0.input' has 1024 steps of history, this recipe 1. Resume with the recipe it"),
        (
            wider,
            "fp8-delayed",
            r"is of other layers: 1.grad_output, 1.input, 1.weight missing, none unexpected. Resume",
        ),
        (mlp, "fp8-current", r"of other layers: none missing, 0.grad_output, 0.input, 0.weight and 3 more unexpected"),
        (mlp, "bf16-master", "3 more unexpected. Resume with the model and the recipe it was saved under"),
    ],
)
def test_states_that_do_not_fit_are_refused_without_changes(model, recipe, words):
    saved = prepared("fp8-delayed")
    train(*saved, 2)
    parts = prepared(recipe, model())
    train(*parts, 2)
    before = all_states(*parts)
    with pytest.raises(LossScaleError, match=words):
        parts[2].load_state_dict(nameless(saved[2].state_dict()))
    assert_same(all_states(*parts), before)


def test_a_refused_state_leaves_the_loss_scale_unchanged():
    recipe = delayed_recipe("made", Delayed("d", history=3), "", "")
    scaled = {"name": "made", "loss_scale": halfstep.get_recipe("fp16-mixed").loss_scale}
    parts = prepared(replace(recipe, **scaled))
    before = all_states(*parts)
    other = prepared(replace(halfstep.get_recipe("fp8-delayed"), **scaled))
    other[2].update(8.0)
    with pytest.raises(LossScaleError, match="has 1024 steps of history, this recipe 3"):
        parts[2].load_state_dict(nameless(other[2].state_dict()))
    assert_same(all_states(*parts), before)


@every_stateful
def test_torchs_grad_scaler_state_loads_with_a_warning(name):
    recipe = replace(halfstep.get_recipe(name), name="made", loss_scale=halfstep.get_recipe("fp16-mixed").loss_scale)
    parts = prepared(recipe)
    before = Scalings(parts[0]).state_dict()
    train(*parts, 2)
    torchs = torch.amp.GradScaler("cpu", init_scale=32.0)
    torchs.scale(torch.ones(()))
    with pytest.warns(UserWarning, match="holds no scaling states, so the model's scales start over"):
        parts[2].load_state_dict(torchs.state_dict())
    assert parts[2].get_scale() == 32
    assert_same(Scalings(parts[0]).state_dict(), before)


def test_a_scaler_without_scaling_states_loads_torchs_state_silently():
    _, _, scaler = prepared("fp16-mixed")
    torchs = torch.amp.GradScaler("cpu", init_scale=32.0)
    torchs.scale(torch.ones(()))
    scaler.load_state_dict(torchs.state_dict())
    assert scaler.get_scale() == 32
    _, _, disabled = prepared("fp8-current")
    disabled.load_state_dict({})


def test_scalings_saves_and_loads_states_without_a_scaler():
    model = mlp()
    halfstep.apply(model, "fp8-delayed")
    optimizer = adamw(model)
    torch.nn.functional.mse_loss(model(torch.randn(4, 8)), torch.zeros(4, 4)).backward()
    optimizer.step()
    halfstep.advance(model)
    saved = Scalings(model).state_dict()
    twin = mlp()
    halfstep.apply(twin, "fp8-delayed")
    Scalings(twin).load_state_dict(saved)
    assert_same(Scalings(twin).state_dict(), saved)
