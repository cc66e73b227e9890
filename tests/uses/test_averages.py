"""Averages of the weights over the steps."""

import copy

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from ways import apart, assert_outputs_alike, prepare, start_of, steps, values, way

from halfstep.recipe import get_recipe
from tiny import assert_same, batch


HALF = 0.5
EPSILON = {"float8_e4m3fn": 2.0**-4, "bf16": 2.0**-7, "fp16": 2.0**-10, "fp32": 1e-6}


def trained(name, after=lambda model: None, times=4):
    """A run whose every step ends with `after(model)`; returns the model and the average that it should find."""
    model, optimizer, scaler = prepare(name, start_of(name))
    average = values(model)
    for seed in range(times):
        steps(model, optimizer, scaler, 1, seed)
        after(model)
        average = {key: average[key].lerp(value, HALF) for key, value in values(model).items()}
    return model, average


def assert_average(name, model, average):
    """The model holds the average, and computes with it what a fresh model would that loaded it."""
    recipe = get_recipe(name)
    near = EPSILON[recipe.codes.weights.quantizer.format.name if recipe.codes else recipe.weights]
    found = {key.removeprefix("module."): value for key, value in values(model).items()}
    assert apart({key: found[key] for key in average}, average) <= near
    fresh, _, _ = prepare(name, start_of(name))
    fresh.load_state_dict({key: value.to(found[key].dtype) for key, value in found.items() if key in average})
    x = batch()[0]
    torch.testing.assert_close(model.eval()(x), fresh.eval()(x), rtol=0.3, atol=0.3)  # delayed scales are the model's
    stock = start_of(name)
    stock.load_state_dict(average)
    assert_outputs_alike(name, model(x), stock(x))


@way()
def test_averaged_model(name):
    """EMA by AveragedModel: `AveragedModel(model)` after `prepare`; it [averages in the weights' bits](#averages)."""
    averaged = []

    def after(model):
        averaged[0].update_parameters(model)

    model, optimizer, scaler = prepare(name, start_of(name))
    average = values(model)
    averaged.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(HALF)))
    averaged[0].update_parameters(model)  # the first one copies
    for seed in range(4):
        steps(model, optimizer, scaler, 1, seed)
        after(model)
        average = {key: average[key].lerp(value, HALF) for key, value in values(model).items()}
    assert_average(name, averaged[0].module, average)
    assert_same(values(model), values(trained(name)[0]))  # the trained one knows nothing of it


def test_an_average_near_the_last_one_wants_more_bits_than_the_weights_have():
    """What docs/using.md says of AveragedModel: of bf16 weights it loses most of what a decay of 0.999 adds."""
    decay, shares = 0.999, {}
    for name in ("fp32", "bf16-stochastic"):
        model, optimizer, scaler = prepare(name, start_of(name))
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
        averaged.update_parameters(model)  # the first one copies
        first = values(model)
        by_hand = dict(first)
        for seed in range(8):
            steps(model, optimizer, scaler, 1, seed)
            averaged.update_parameters(model)
            by_hand = {key: value.lerp(values(model)[key], 1 - decay) for key, value in by_hand.items()}
        found = values(averaged.module)
        moved = sum((by_hand[key] - first[key]).abs().sum() for key in first)
        shares[name] = float(sum((found[key] - first[key]).abs().sum() for key in first) / moved)
    assert abs(shares["fp32"] - 1) < 1e-3
    assert shares["bf16-stochastic"] < 0.5


@way()
def test_average_by_hand(name):
    """EMA by hand: keep float32 copies of `model.parameters()`, and copy them into a deepcopy, or in and out again."""
    shadow = {}

    def after(model):
        for key, parameter in model.named_parameters():
            shadow[key].lerp_(parameter.detach().float(), HALF)
        swapped(model)

    @torch.no_grad()
    def swapped(model):
        """Evaluate with the average, and put the weights back: training goes on as if nothing had been."""
        backup = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
        for key, parameter in model.named_parameters():
            parameter.copy_(shadow[key])
        model(batch()[0])
        for key, parameter in model.named_parameters():
            parameter.copy_(backup[key])

    start = prepare(name, start_of(name))[0]
    shadow.update({key: parameter.detach().float().clone() for key, parameter in start.named_parameters()})
    model, average = trained(name, after)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for key, parameter in twin.named_parameters():
            parameter.copy_(shadow[key])
    assert_average(name, twin, average)
    assert_same(values(model), values(trained(name)[0]))


@way()
def test_average_of_state_dicts(name):
    """EMA through state_dict(): average its floating-point values in float32, and load them into a deepcopy."""
    start = values(prepare(name, start_of(name))[0])
    shadow = dict(start)

    def after(model):
        for key, value in model.state_dict().items():
            shadow[key] = shadow[key].lerp(value.float(), HALF)

    model, average = trained(name, after)
    twin = copy.deepcopy(model)
    twin.load_state_dict(shadow)
    assert_average(name, twin, average)
    assert_same(values(model), values(trained(name)[0]))
