"""Saving and loading optimizer states: bit for bit, in their own dtypes, and from torch's optimizers."""

import io
import itertools

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from families import in_turn, slow_unless
from halfstep.errors import OptimizerError
from halfstep.quant.masters import get_master
from halfstep.recipe import Recipe
from tiny import (
    FAST,
    PROJECTED,
    RECIPES,
    SMOOTH,
    adamw,
    assert_same,
    batch,
    copied,
    mlp,
    mostly_slow,
    nameless,
    prepared,
    stored,
    train,
)


SMALL = Recipe("bf16 moments", "", "", weights="bf16", master="fp32", moments="bf16", compute="bf16")
every_recipe = pytest.mark.parametrize("name", [*mostly_slow(RECIPES), SMALL], ids=lambda r: getattr(r, "name", r))


@pytest.mark.quick("model first-bf16-mixed", "model first-bf16-master", "model first-bf16-stochastic")
@pytest.mark.parametrize("name", [*mostly_slow(RECIPES), SMALL], ids=lambda r: getattr(r, "name", r))
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_a_resumed_run_equals_the_uninterrupted_one(name, order):
    model, optimizer, scaler = prepared(name)
    train(model, optimizer, scaler)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), scaler.state_dict()], file)
    losses = train(model, optimizer, scaler)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    resumed, again, rescaler = prepared(name, mlp(seed=5), generator=99)
    loads = [(resumed, saved[0]), (again, saved[1]), (rescaler, saved[2])]
    for thing, state in loads if order == "model first" else reversed(loads):
        thing.load_state_dict(state)
    assert train(resumed, again, rescaler) == losses
    assert_same(dict(resumed.state_dict()), dict(model.state_dict()))
    assert_same(again.state_dict(), optimizer.state_dict())


@pytest.mark.quick("fp32", "bf16-mixed", "bf16-stochastic")
@every_recipe
def test_loading_ones_own_state_changes_no_bit_and_no_dtype(name):
    model, optimizer, scaler = prepared(name)
    train(model, optimizer, scaler)
    before = copied(optimizer.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same(optimizer.state_dict(), before)
    for parameter, state in optimizer.state.items():
        assert state["exp_avg"].dtype == stored(optimizer.recipe, "exp_avg", torch.zeros(parameter.shape)).dtype
        if "master" in state:
            codes = optimizer.recipe.codes
            assert state["master"].dtype == (codes.master.scaled_dtype if codes else torch.float32)


WITH_MOMENTS = [adamw, lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)]
UNPROJECTED = [name for name in RECIPES if name not in PROJECTED]  # the others: test_galore_states.py


@pytest.mark.quick("fp16-static-<lambda>", "bf16-kahan-<lambda>", "coat-adamw")
@pytest.mark.parametrize(("name", "build"), [*itertools.product(UNPROJECTED, WITH_MOMENTS)])
def test_torch_optimizers_states_load(name, build):
    stock = mlp()
    torchs = build(stock)
    for _ in range(3):
        stock(batch()[0]).square().mean().backward()
        torchs.step()
    model = mlp()
    model.load_state_dict(stock.state_dict())
    model, optimizer, scaler = prepared(name, model, build(model))
    optimizer.load_state_dict(torchs.state_dict())
    for p, q in zip(model.parameters(), stock.parameters(), strict=True):
        for moment in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            if moment in torchs.state[q]:
                assert_same(optimizer.state[p][moment], stored(optimizer.recipe, moment, torchs.state[q][moment]))
        assert get_master(optimizer.recipe.master).keeps.keys() <= optimizer.state[p].keys()
    train(model, optimizer, scaler, 1)
    expected = torchs.state[q].get("step", torch.tensor(1.0)) + 1
    assert optimizer.state[p]["step"] == expected or scaler.skipped_steps


def test_a_state_loads_under_a_default_device():
    model, optimizer, scaler = prepared("bf16-master")
    train(model, optimizer, scaler)
    state = copied(optimizer.state_dict())
    with torch.device("meta"):
        optimizer.load_state_dict(state)
    assert_same(optimizer.state_dict(), state)


def test_a_loaded_state_shares_no_storage_with_the_state_dict():
    model, optimizer, scaler = prepared("bf16-master")
    train(model, optimizer, scaler)
    state = copied(optimizer.state_dict())
    kept = copied(state)
    optimizer.load_state_dict(state)
    train(model, optimizer, scaler)
    assert_same(state, kept)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (torch.nn.Sequential(torch.nn.Linear(2, 2)), r"groups of sizes \[2\], this optimizer has \[6\]"),
        (torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(3)]), r"of shape \(2, 2\), expected \(16, 8\)"),
    ],
)
def test_a_state_of_another_model_is_refused_without_changes(other, words):
    stranger = adamw(other)
    other(torch.ones(1, 2)).sum().backward()
    stranger.step()
    model, optimizer, scaler = prepared("bf16-master")
    train(model, optimizer, scaler)
    before = copied(optimizer.state_dict())
    with pytest.raises(OptimizerError, match=words):
        optimizer.load_state_dict(stranger.state_dict())
    assert_same(optimizer.state_dict(), before)


@pytest.mark.parametrize("name", ["bf16-collage-plus", "bf16-master", "fp8lm-o3"])
def test_a_state_without_masters_warns_unless_from_float32_state_dict(name):
    """It was saved under another recipe; `float32_state_dict` is the way to change recipes on purpose."""
    before, saved, scaler = prepared("fp32")
    train(before, saved, scaler)
    model, optimizer, _ = prepared(name)
    model.load_state_dict(before.state_dict())
    said = rf"state of \d parameters was saved under a recipe that keeps nothing.*recipe '{name}'.*float32_state_dict"
    with pytest.warns(UserWarning, match=said):
        optimizer.load_state_dict(nameless(saved.state_dict()))
    told = copied(optimizer.state_dict())
    optimizer.load_state_dict(saved.float32_state_dict())
    assert_same(optimizer.state_dict()["state"], told["state"])
    optimizer.load_state_dict(told)


def test_load_state_dict_hooks_get_and_may_replace_the_state():
    model, optimizer, scaler = prepared("bf16-master")
    train(model, optimizer, scaler)
    saved, seen = optimizer.state_dict(), []
    optimizer.register_load_state_dict_pre_hook(lambda _, state: {**state["wrapped"], "mark": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(state.pop("mark")))
    optimizer.register_load_state_dict_post_hook(lambda loaded: seen.append(len(loaded.state)))
    given = {"wrapped": copied(saved)}
    optimizer.load_state_dict(given)
    assert seen == [1, 6]
    assert given.keys() == {"wrapped"}
    assert_same(optimizer.state_dict(), saved)


@pytest.mark.parametrize("name", ["bf16-master", "fp16-master"])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_masters_follow_loaded_weights(name, steps_before):
    model, optimizer, scaler = prepared(name, optimizer=None)
    train(model, optimizer, scaler, steps_before)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    scaler.update(1.0)
    model.load_state_dict({key: torch.full_like(value, 3) for key, value in model.state_dict().items()})
    train(model, optimizer, scaler, 1)
    for parameter in model.parameters():
        assert_same(parameter.detach(), torch.full_like(parameter, 3))
        assert_same(optimizer.state[parameter]["master"], parameter.detach().float())


def test_unchanged_elements_keep_their_unrounded_master():
    model, optimizer, scaler = prepared("bf16-master")
    train(model, optimizer, scaler)
    weight = model[0].weight
    before = optimizer.state[weight]["master"].clone()
    for group in optimizer.param_groups:
        group.update(lr=0.0)
    with torch.no_grad():
        weight[0].fill_(2.0)
    train(model, optimizer, scaler, 1)
    assert_same(optimizer.state[weight]["master"][0], torch.full((8,), 2.0))
    assert_same(optimizer.state[weight]["master"][1:], before[1:])
    assert not torch.equal(before[1:], before[1:].bfloat16().float())


@pytest.mark.quick("fp32-False", "bf16-mixed-True", "bf16-stochastic-True")
@pytest.mark.parametrize(
    ("name", "flat"),
    slow_unless(
        in_turn([*(name for name in RECIPES if name in FAST), SMALL], [False, True]).__contains__,
        itertools.product([*RECIPES, SMALL], [False, True]),
    ),
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_distributed_checkpoint_states_of_optimizers_are_exact(name, flat):
    """Loaded into an optimizer without steps, whose states torch would initialize by a step with zero gradients."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer, scaler = prepared(name)
    train(model, optimizer, scaler)
    saved = copied(get_optimizer_state_dict(model, optimizer, options=options))
    resumed, again, rescaler = prepared(name, mlp(5) if name not in SMOOTH else None)
    resumed.load_state_dict(model.state_dict())
    rescaler.load_state_dict(scaler.state_dict())
    set_optimizer_state_dict(resumed, again, saved, options=options)
    assert_same(again.state_dict()["state"], optimizer.state_dict()["state"])
    losses = train(resumed, again, rescaler)
    assert losses == train(model, optimizer, scaler)
