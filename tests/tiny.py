"""Tiny models, and the loop that trains them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import halfstep
from halfstep import ops, recipe
from oracles.numbers import identical


ALL = recipe.list_recipes()
UNIT = [name for name in ALL if recipe.get_recipe(name).unit_scaled]  # these need unit-scaled models
EVERY = [name for name in ALL if name not in UNIT]
SMOOTH = [name for name in EVERY if recipe.get_recipe(name).smooth_glu]  # these need gated MLPs
RECIPES = [name for name in EVERY if name not in SMOOTH]
FAST = {
    "fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "bf16-collage-plus", "bf16-stochastic",
    "fp8-delayed", "fp8-current", "mxfp8", "fp8-block", "fp8-smooth-swiglu", "fp8lm-o3", "fp4-wang",
}  # fmt: skip
PROJECTED = [name for name in EVERY if recipe.get_recipe(name).projection]  # moments of projected gradients
SCALED = [name for name in EVERY if recipe.get_recipe(name).codes]  # weights and gradients are codes
FOUR = {n for n in EVERY if any(q.format.bits == 4 for r in recipe.get_recipe(n).rules for q in r.linear.quantizers)}
BREAKS = {"fp16-pure"}  # as documented: squares of small gradients underflow


def mostly_slow(names, *more):
    """Parameters for tests that take seconds per recipe: one fast recipe of each code path, the others marked slow.

    `more` gives the values of further parameters, the same for every name.
    """
    return [pytest.param(name, *more, marks=() if name in FAST else pytest.mark.slow) for name in names]


def fast_and_every(names, fast=FAST):
    """Parameters for tests that loop over recipes: a fast case with the recipes in `fast`, and a slow one with all."""
    return [
        pytest.param([name for name in names if name in fast], id="fast"),
        pytest.param(names, id="every", marks=pytest.mark.slow),
    ]


def mlp(seed=0):
    torch.default_generator.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


class Gated(nn.Module):
    """A gated MLP as Hugging Face's models write it."""

    def __init__(self, width=16, inner=24, bias=False):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def gated(seed=0):
    torch.default_generator.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), Gated(), nn.LayerNorm(16), nn.Linear(16, 4))


def model_for(name):
    """A tiny model that the recipe supports."""
    return gated() if name in SMOOTH else mlp()


def batch(seed=1, rows=12):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 4, generator=generator)


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **options})


def prepared(name, model=None, optimizer=None, **options):
    model = model_for(name) if model is None else model
    optimizer = adamw(model) if optimizer is None else optimizer
    return halfstep.prepare(model, optimizer, recipe=name, **{"generator": 3, **options})


def nameless(state):
    """An optimizer's or scaler's state as older versions wrote it, without the recipe's name."""
    state = copy.deepcopy(state)
    for part in (*state.get("param_groups", ()), state.get("halfstep", {})):
        part.pop("recipe", None)
    return state


class Estimated(TorchFunctionMode):
    """Stock linear layers with the weight gradient multiplied by a recipe's gradient estimator (the derivative it
    assumes for rounding), the reference for recipes that do not use the straight-through gradient."""

    def __init__(self, name):
        super().__init__()
        estimates = [rule.linear.output.rhs for rule in recipe.get_recipe(name).rules if rule.linear.estimates]
        self.weight = estimates[-1] if estimates else None

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.linear and self.weight is not None and args[1].numel():
            x, weight, *bias = args
            slope, weight = self.weight.derivative(weight.detach()), weight.view_as(weight)
            weight.register_hook(slope.__mul__)
            args = x, weight, *bias
        return function(*args, **(kwargs or {}))


def train(model, optimizer, scaler, steps=3, data=None, loss_of=F.mse_loss):
    """The documented loop on one repeated batch, without clipping; returns the losses."""
    x, y = batch() if data is None else data
    return descend(lambda: loss_of(model(x), y), optimizer, scaler, steps, max_norm=None)


def reverted(name, kind):
    """A model of the kind that trained under a recipe and was reverted, after checking that checkpointed and copied
    models train the same.

    `kind(again=True)` builds the checkpointed model.
    """

    run, again = prepared(name, kind()), prepared(name, kind(again=True))
    assert train(*run, 3) == train(*again, 3)
    copied = copy.deepcopy(run)
    assert train(*run, 3) == train(*copied, 3)
    model, stock = run[0], kind()
    stock.load_state_dict(model.state_dict())
    halfstep.revert(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]
    assert not [name for name, _ in model.named_buffers()]
    return model


def descend(loss_of, optimizer, scaler, steps, max_norm=1.0):
    """The documented loop, with `loss_of()` computing each step's loss; returns the losses."""
    losses = []
    for _ in range(steps):
        loss = loss_of()
        scaler.scale(loss).backward()
        if max_norm is not None:
            scaler.clip_grad_norm_(optimizer, max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def grads(model):
    """The gradients' values by name, decoded if they are codes."""
    return {name: ops.values_of(p.grad).clone() for name, p in model.named_parameters()}


def copied(state):
    """A copy of a nested state dict with cloned tensors."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return type(state)(map(copied, state)) if isinstance(state, (list, tuple)) else state


def are_same(actual, expected):
    """Whether nested states are identical, by a fast check; if not, `torch.testing` decides and explains."""
    if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
        return identical(actual, expected)
    if type(actual) is not type(expected) and not (isinstance(actual, dict) and isinstance(expected, dict)):
        return False
    if isinstance(actual, (list, tuple)):
        return len(actual) == len(expected) and all(map(are_same, actual, expected))
    if isinstance(actual, dict):
        return actual.keys() == expected.keys() and all(are_same(value, expected[key]) for key, value in actual.items())
    return isinstance(actual, (bool, int, float, str, type(None))) and actual == expected


def assert_same(actual, expected):
    """Assert equality of nested states, tensors bit for bit."""
    if not are_same(actual, expected):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def stored(recipe, name, values):
    """The tensor or codes that a recipe stores for a moment's values."""
    return ops.codes.store(recipe.moment(name, values.numel()), name, values)[name]
