"""Models of which only a part trains."""

import copy
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from ways import (
    Stock,
    assert_near_fp32,
    both,
    prepare,
    relative_distance,
    sgd,
    step,
    steps,
    tolerance,
    under,
    values,
    way,
)

import halfstep
from halfstep.recipe import get_recipe
from tiny import assert_same, batch, model_for


class LowRank(nn.Module):
    """A frozen layer plus a trained low-rank product."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapted(name):
    torch.manual_seed(3)
    model = model_for(name).requires_grad_(False)
    model[0], model[3] = LowRank(model[0]), LowRank(model[3])
    return model


def unfrozen(name, loop, make, **options):
    """The results of `both`; recipes with masters warn once that masters of unfrozen weights start from rounded
    values."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = both(name, loop, make, **options)
    keeps = get_recipe(name).master is not None or (get_recipe(name).codes or get_recipe(name)).master is not None
    assert len(said) == keeps
    assert all("start from weights that are rounded already" in str(warning.message) for warning in said)
    return found


def frozen(model):
    return {key for key, parameter in model.named_parameters() if not parameter.requires_grad}


@way()
def test_partial_training(name):
    """LoRA-like training: freeze the base, give the optimizer the trained parameters; frozen ones keep their bits."""
    start, found, expected = both(name, steps, lambda: adapted(name))
    model, _, _ = prepare(name, adapted(name))
    stay, stored = frozen(model), values(model)
    assert_same({key: found[key] for key in stay}, {key: stored[key] for key in stay})
    trained = [key for key in start if key not in stay]
    start, found, expected = ({key: each[key] for key in trained} for each in (start, found, expected))
    assert_near_fp32(name, start, found, expected, slack=2)


@way()
def test_frozen_in_the_optimizer(name):
    """Unfreezing later: freeze after `prepare`, or before it (masters then start from rounded bits, with a warning)."""

    def loop(model, optimizer, scaler):
        steps(model, optimizer, scaler, 2)
        model[0].requires_grad_(True)
        steps(model, optimizer, scaler, 3, first=2)

    def whole(model):
        return torch.optim.SGD(model.parameters(), 0.1, 0.9)

    def make():
        model = model_for(name)
        model[0].requires_grad_(False)
        return model

    start, found, expected = unfrozen(name, loop, make, optimizer=whole)
    assert_near_fp32(name, start, found, expected, slack=1.5)
    assert not torch.equal(found["0.weight"], start["0.weight"])


@way()
def test_added_later(name):
    """add_param_group: on the optimizer that `prepare` returned, when a part is unfrozen. A layer that came after
    `prepare` is trained, and a warning says that it does not follow the recipe."""

    def make():
        model = model_for(name)
        model[0].requires_grad_(False)
        return model

    def loop(model, optimizer, scaler):
        steps(model, optimizer, scaler, 2)
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.05})
        steps(model, optimizer, scaler, 3, first=2)

    start, found, expected = unfrozen(name, loop, make)
    assert_near_fp32(name, start, found, expected, slack=1.5)


@way()
def test_frozen_backbone(name):
    """A frozen backbone in eval(): freeze it and call its `eval()`; the smallest inputs do not underflow."""
    torch.manual_seed(3)
    make = nn.Sequential(model_for(name).requires_grad_(False), nn.Linear(4, 8), model_for(name))
    with torch.no_grad():
        make[0][0].weight.mul_(1000)  # so that small inputs give usual outputs
    start = values(make)
    stock, model = copy.deepcopy(make), make
    ours = prepare(name, model)
    for trained, optimizer, scaler in (ours, (stock, sgd(stock), Stock())):
        trained[0].eval()
        for seed in range(4):
            x, y = batch(seed)
            step(trained, optimizer, scaler, x / 1000, y)
    trained = [key for key in start if not key.startswith("0.")]
    start, found, expected = ({key: each[key] for key in trained} for each in (start, values(model), values(stock)))
    assert_near_fp32(name, start, found, expected, slack=2)


@way(may_refuse=["fp8-delayed"])
def test_whole_model_in_eval(name):
    """Fine-tuning in eval(): all of the model, except delayed scales, which record only while the root trains."""
    start, found, expected = both(name, in_eval)
    assert_near_fp32(name, start, found, expected, slack=2)


def in_eval(model, optimizer, scaler):
    model.eval()
    for seed in range(4):
        x, y = batch(seed)
        step(model, optimizer, scaler, x / 512, y)  # FP8 without scales would lose most of it


@way()
def test_several_optimizers(name):
    """Several optimizers: `halfstep.apply`, then `halfstep.optimize` for each; one scaler for all of them."""

    def both_steps(model, optimizers, scaler):
        for seed in range(4):
            x, y = batch(seed)
            scaler.scale(F.mse_loss(model(x), y)).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            model.zero_grad()

    def optimizers(model):
        weights = [p for p in model.parameters() if p.dim() > 1]
        return [
            torch.optim.SGD(weights, 0.1, 0.9),
            torch.optim.SGD([p for p in model.parameters() if p.dim() < 2], 0.05),
        ]

    stock = model_for(name)
    model, start = copy.deepcopy(stock), values(stock)
    given = optimizers(model)
    halfstep.apply(model, under(name))
    converted = [halfstep.optimize(model, optimizer) for optimizer in given]
    both_steps(model, [optimizer for optimizer, _ in converted], converted[0][1])
    both_steps(stock, optimizers(stock), Stock())
    assert_near_fp32(name, start, values(model), values(stock))


@way()
def test_two_steps(name):
    """In two steps: `halfstep.apply(model, recipe)`, then `halfstep.optimize(model, optimizer)`, is `prepare`."""
    model = model_for(name)
    optimizer = sgd(model)
    halfstep.apply(model, under(name))
    optimizer, scaler = halfstep.optimize(model, optimizer, generator=3)
    torch.manual_seed(1)
    losses = steps(model, optimizer, scaler)
    twin, twin_optimizer, twin_scaler = prepare(name, model_for(name))
    torch.manual_seed(1)
    expected = steps(twin, twin_optimizer, twin_scaler)
    assert relative_distance(values(model), values(twin), values(model_for(name))) <= tolerance(name)
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) <= tolerance(name)
