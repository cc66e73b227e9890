"""Averages of the weights over the steps (EMA)."""

import copy
import gc
import pickle
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch_ema
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from ways import assert_outputs_near, prepare, relative_distance, start_of, steps, values, way

import halfstep
from halfstep.nn import watched
from halfstep.recipe import get_recipe
from tiny import assert_same, batch, mlp, prepared, train


HALF = 0.5
EPSILON = {"float8_e4m3fn": 2.0**-4, "bf16": 2.0**-7, "fp16": 2.0**-10, "fp32": 1e-6}


def trained(name, after=lambda model: None, times=4):
    """A run that calls `after(model)` after every step; returns the model and the average that it should have."""
    model, optimizer, scaler = prepare(name, start_of(name))
    average = values(model)
    for seed in range(times):
        steps(model, optimizer, scaler, 1, seed)
        after(model)
        average = {key: average[key].lerp(value, HALF) for key, value in values(model).items()}
    return model, average


def assert_average(name, model, average):
    """The model holds the average, and its outputs equal those of a fresh model that loaded it."""
    recipe = get_recipe(name)
    near = EPSILON[recipe.codes.weights.quantizer.format.name if recipe.codes else recipe.weights]
    found = {key.removeprefix("module."): value for key, value in values(model).items()}
    assert relative_distance({key: found[key] for key in average}, average) <= near
    fresh, _, _ = prepare(name, start_of(name))
    fresh.load_state_dict({key: value.to(found[key].dtype) for key, value in found.items() if key in average})
    x = batch()[0]
    torch.testing.assert_close(model.eval()(x), fresh.eval()(x), rtol=0.3, atol=0.3)  # delayed scales are the model's
    stock = start_of(name)
    stock.load_state_dict(average)
    assert_outputs_near(name, model(x), stock(x))


@way()
def test_averaged_model(name):
    """EMA by AveragedModel: after `prepare` in [the weights' bits](#averages), which warns if it stands still; before
    it in float32.
    """
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
    assert_same(values(model), values(trained(name)[0]))  # the trained model is unaffected


DECAY = 0.999


class ByHand:
    """An average as in training scripts, with or without `.data`."""

    def __init__(self, model, data=False):
        self.module, self.data = copy.deepcopy(model), data

    @torch.no_grad()
    def update_parameters(self, model):
        for average, parameter in zip(self.module.parameters(), model.parameters(), strict=True):
            average = average.data if self.data else average
            average.mul_(DECAY).add_(parameter, alpha=1 - DECAY)


class Lerped(ByHand):
    """An average as in libraries."""

    @torch.no_grad()
    def update_parameters(self, model):
        for average, parameter in zip(self.module.parameters(), model.parameters(), strict=True):
            average.data.lerp_(parameter.data, 1 - DECAY)


class Clones:
    """An average in `shadow`, clones of the parameters, which `update` changes."""

    def __init__(self, model, shadow, update):
        self.module = SimpleNamespace(state_dict=lambda: dict(zip(model.state_dict(), shadow, strict=True)))
        self.update_parameters = update


def of_torch_ema(model):
    average = torch_ema.ExponentialMovingAverage(model.parameters(), DECAY, use_num_updates=False)
    return Clones(model, average.shadow_params, lambda model: average.update(model.parameters()))


def of_diffusers(model):
    from diffusers.training_utils import EMAModel  # takes seconds

    average = EMAModel(model.parameters(), decay=DECAY, min_decay=DECAY)
    return Clones(model, average.shadow_params, lambda model: average.step(model.parameters()))


def of_lists(model):
    """An average by the optimizer's own functions over lists of tensors."""
    shadow = [parameter.detach().clone() for parameter in model.parameters()]
    update = get_ema_multi_avg_fn(DECAY)
    return Clones(model, shadow, lambda model: update(shadow, [p.detach() for p in model.parameters()], 1))


AVERAGES = {
    "AveragedModel": lambda model: AveragedModel(model, avg_fn=get_ema_avg_fn(DECAY)),
    "AveragedModel of lists": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY)),
    "by hand": ByHand,
    "by hand, .data": lambda model: ByHand(model, data=True),
    "lerp": Lerped,
    "torch_ema": of_torch_ema,
    "diffusers": of_diffusers,
    "lists": of_lists,
}


def error_and_warnings(name, make, first, times=24):
    """The relative error of an average compared with one in float32, and the warnings.

    `first` makes the average before `prepare`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
    average = make(model) if first else None
    model, optimizer, scaler = halfstep.prepare(model, torch.optim.AdamW(model.parameters()), name, generator=0)
    average = average or make(model)
    start = by_hand = values(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        average.update_parameters(model)
        for seed in range(times):
            steps(model, optimizer, scaler, 1, seed)
            average.update_parameters(model)
            by_hand = {key: value.lerp(values(model)[key], 1 - DECAY) for key, value in by_hand.items()}
    found = values(average.module)
    off = sum(float((found[key] - by_hand[key]).square().sum()) for key in start)
    way = sum(float((by_hand[key] - start[key]).square().sum()) for key in start)
    return (off / way) ** 0.5, [str(warning.message) for warning in told]


@pytest.mark.quick("AveragedModel-bf16-stochastic", "by hand, .data-bf16-master", "torch_ema-bf16-stochastic")
@pytest.mark.parametrize("name", ["bf16-stochastic", "bf16-master"])
@pytest.mark.parametrize("how", AVERAGES)
def test_an_average_in_16_bits_does_not_move_and_warns(how, name):
    off, (said,) = error_and_warnings(name, AVERAGES[how], first=False)
    assert off > 0.5
    assert f"recipe {name!r} keeps weights" in said
    assert "make it before halfstep.prepare" in said


def test_an_average_in_fp16_warns():
    """Which values move depends on their significands, not on their distance from the weights."""
    off, (said,) = error_and_warnings("fp16-master", AVERAGES["AveragedModel"], first=False)
    assert off > 0.5
    assert "recipe 'fp16-master' keeps weights" in said


def test_averages_that_stop_moving_late_warn(monkeypatch):
    """After the first writes, the number of writes is checked at powers of two only."""
    monkeypatch.setattr(watched, "_WRITES", 4)
    _, (said,) = error_and_warnings("bf16-stochastic", AveragedModel, first=False, times=80)
    assert "in a copy.deepcopy of the model" in said


def test_an_average_with_stochastic_rounding_does_not_warn():
    """Most of its values do not change, as in an average that is lost."""
    generator = torch.Generator().manual_seed(0)

    def rounded(average, weight, count):
        bits = average.float().lerp(weight.float(), 1 - DECAY).view(torch.int32)
        noise = torch.randint(2**16, bits.shape, dtype=torch.int32, generator=generator)
        return ((bits + noise) & -(2**16)).view(torch.float32)

    _, told = error_and_warnings("bf16-stochastic", lambda model: AveragedModel(model, avg_fn=rounded), first=False)
    assert told == []


def warnings_in_loop(model, optimizer, average, scaler=None, times=20):
    """The warnings about averages in a plain training loop."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(times):
            train(model, optimizer, scaler or halfstep.LossScaler(enabled=False), 1)
            average.update_parameters(model)
    return [str(warning.message) for warning in told if "average" in str(warning.message)]


@pytest.mark.parametrize("name", ["bf16-nomaster", "bf16-stochastic"])
def test_averages_in_clones_warn_with_a_stock_optimizer(name):
    model = mlp()
    halfstep.apply(model, name)
    (said,) = warnings_in_loop(model, torch.optim.AdamW(model.parameters()), of_lists(model))
    assert "in clones of the parameters" in said


def test_averages_in_clones_warn_if_a_deepcopy_is_trained():
    model, optimizer, scaler = copy.deepcopy(prepared("bf16-master"))
    (said,) = warnings_in_loop(model, optimizer, of_lists(model), scaler)
    assert "in clones of the parameters" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16-stochastic", "bf16-master"])
@pytest.mark.parametrize("how", ["AveragedModel", "by hand", "torch_ema", "diffusers"])
def test_an_average_made_before_prepare_is_in_float32(how, name):
    """It starts at unrounded weights, so its error is their rounding error relative to the distance it moved."""
    off, told = error_and_warnings(name, AVERAGES[how], first=True, times=200)
    assert told == []
    assert off < 0.2


def test_averages_of_float32_weights_are_exact_and_do_not_warn():
    off, told = error_and_warnings("fp32", AVERAGES["AveragedModel of lists"], first=False)
    assert (off < 1e-3, told) == (True, [])


def stock_copy(model):
    """A copy without a recipe, in torch's classes."""
    layers = [type(layer).__base__(*shape) for layer, shape in zip(model, [(8, 64), (), (64, 4)], strict=True)]
    stock = torch.nn.Sequential(*layers).bfloat16().requires_grad_(False)
    stock.load_state_dict(model.state_dict())
    return stock


class Others:
    """Copies of a model that are written after each step but are no averages in 16 bits."""

    def __init__(self, model, how, clones):
        self.how, self.generator = how, torch.Generator().manual_seed(0)
        self.copied = stock_copy if clones else copy.deepcopy
        self.module = self.copied(model)
        self.shadow = [parameter.detach().float() for parameter in model.parameters()]
        if how == "float32 copy":
            self.module.float()

    @torch.no_grad()
    def update_parameters(self, model):
        if self.how == "load":
            self.module.load_state_dict(model.state_dict())
        if self.how == "new snapshot":
            self.module = self.copied(model)
        for own, shadow, parameter in zip(self.module.parameters(), self.shadow, model.parameters(), strict=True):
            if self.how == "copy":
                own.data.copy_(parameter.data)
            elif self.how == "float32 copy":
                own.lerp_(parameter.float(), 1 - DECAY)
            elif self.how == "rounded from float32":
                own.copy_(shadow.lerp_(parameter.float(), 1 - DECAY))
            elif self.how == "stochastic":
                bits = own.float().lerp_(parameter.float(), 1 - DECAY).view(torch.int32)
                noise = torch.randint(2**16, bits.shape, dtype=torch.int32, generator=self.generator)
                own.copy_(((bits + noise) & -(2**16)).view(torch.float32))


OTHERS = ["load", "copy", "new snapshot", "never", "float32 copy", "rounded from float32", "stochastic"]


@pytest.mark.quick("load-False", "stochastic-True")
@pytest.mark.parametrize("clones", [False, True])
@pytest.mark.parametrize("how", OTHERS)
def test_other_copies_do_not_warn(how, clones):
    _, told = error_and_warnings("bf16-stochastic", lambda model: Others(model, how, clones), first=False)
    assert told == []


def test_averages_made_late_warn_and_keep_no_model_alive():
    """Clones made after step 8 are found before step 64."""
    model = mlp()
    model, optimizer, scaler = halfstep.prepare(model, torch.optim.AdamW(model.parameters()), "bf16-master")
    train(model, optimizer, scaler, 8)
    average = of_lists(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(80):
            train(model, optimizer, scaler, 1)
            average.update_parameters(model)
    (said,) = told
    assert "in clones of the parameters, in torch.bfloat16" in str(said.message)
    gone = weakref.ref(model)
    del model, average, optimizer, scaler
    gc.collect()
    assert gone() is None


def hooks_left():
    """The number of hooks, after a step has removed those of deleted models."""
    gc.collect()
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step()
    return len(hooks)


def test_a_copy_that_trains_does_not_warn_and_hooks_are_removed():
    before = hooks_left()
    first = prepare("bf16-stochastic", start_of("bf16-stochastic"))
    second = copy.deepcopy(first)
    assert len(hooks) == before + 1
    for seed in range(2):
        steps(*first, 1, seed)
        steps(*second, 1, seed + 1)
    assert len(hooks) == before
    twin = copy.deepcopy(first[0])
    assert len(hooks) == before + 1
    pickle.loads(pickle.dumps(first[0]))
    del twin
    assert hooks_left() == before


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


def test_an_average_in_16_bits_updated_in_inference_mode_warns():
    model, optimizer, scaler = prepared("bf16-pure")
    with torch.inference_mode():
        average = copy.deepcopy(model)

    def run():
        for _ in range(16):
            train(model, optimizer, scaler, 1)
            with torch.inference_mode():
                for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(weight, 0.001)

    with pytest.warns(UserWarning, match="most of the average never moves"):
        run()


def test_hooks_of_two_copies_are_removed_one_at_a_time():
    """torch iterates over both hooks before each step, so none may be removed meanwhile."""
    model, optimizer, scaler = prepared("bf16-pure")
    before = hooks_left()
    trained, kept = copy.deepcopy(model), copy.deepcopy(model)
    trained(batch()[0]).square().mean().backward()
    train(model, optimizer, scaler, 2)
    assert len(hooks) == before + 1
    del trained, kept
