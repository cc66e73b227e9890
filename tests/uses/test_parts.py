"""Submodules and methods called instead of the model's forward, and replaced forwards."""

import types
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from ways import Stock, assert_near_fp32, prepare, sgd, values, way

import halfstep
from tiny import assert_same, batch, model_for


class Coder(nn.Module):
    """An encoder and a decoder, with methods that call them."""

    def __init__(self, name):
        super().__init__()
        torch.manual_seed(3)
        self.encoder = model_for(name)
        self.decoder = nn.Sequential(nn.Linear(4, 8), model_for(name))

    def encode(self, x):
        return self.encoder(x)

    def decode(self, h):
        return self.decoder(F.gelu(h))

    def forward(self, x):
        return self.decode(self.encode(x))

    def training_step(self, pair, index):
        """Lightning's training_step: the loss, computed from submodules."""
        x, y = pair
        return F.mse_loss(self.decode(self.encode(x)), y)

    def configure_optimizers(self):
        return sgd(self)


def by_forward(model, x, y):
    return F.mse_loss(model(x), y)


def by_methods(model, x, y):
    return F.mse_loss(model.decode(model.encode(x)), y)


def by_parts(model, x, y):
    return F.mse_loss(model.decoder(F.gelu(model.encoder(x))), y)


def by_training_step(model, x, y):
    return model.training_step((x, y), 0)


def by_forward_itself(model, x, y):
    return F.mse_loss(model.forward(x), y)


def following(loss_of):
    def inside(model, x, y):
        with halfstep.following(model):
            return loss_of(model, x, y)

    return inside


def run(model, optimizer, scaler, loss_of, times=4):
    torch.manual_seed(7)
    for seed in range(times):
        loss = loss_of(model, *batch(seed))
        assert loss.dtype == torch.float32
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return values(model)


def compared(name, loss_of):
    """The values after a run by `loss_of`, which must be near fp32's but not equal: it must not compute in fp32
    silently."""
    model, stock = Coder(name), Coder(name)
    start = values(stock)
    ours = prepare(name, model)
    expected = run(stock, sgd(stock), Stock(), by_forward)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = run(*ours, loss_of)
    assert all("with halfstep.following(model)" in str(warning.message) for warning in said)
    assert len(said) <= 1
    assert_near_fp32(name, start, found, expected, slack=2)
    return found


@way()
def test_methods(name):
    """Methods beside forward: call `model.decode(model.encode(x))` as always."""
    compared(name, by_methods)


@way()
def test_parts(name):
    """Parts: call a container's `model.D(x)` as always; it follows the recipe."""
    compared(name, by_parts)


@way()
def test_training_step(name):
    """Lightning's training_step: prepare the module and call `module.training_step(batch, index)` as always."""
    compared(name, by_training_step)


@way()
def test_forward_itself(name):
    """model.forward(x): the same as `model(x)`, bit for bit."""
    assert_same(compared(name, by_forward_itself), compared(name, by_forward))


@way()
def test_following(name):
    """Around a whole step: `with halfstep.following(model):`; functional calls between parts follow the recipe too."""
    for loss_of in (by_methods, by_parts):
        assert_same(compared(name, following(loss_of)), compared(name, by_forward))


def autocast_of_layers(model):
    """A list that gets autocast's dtype in each call of the first layer."""
    seen = []
    model.encoder[0].register_forward_hook(
        lambda *_: seen.append(torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"))
    )
    return seen


def patched(name, how, before):
    """The run of a model whose forward was replaced on the instance before or after `prepare`, and its autocast
    dtypes."""

    def patch(model):
        stock = model.forward
        if how is types.MethodType:
            model.forward = types.MethodType(lambda self, x: 2 * stock(x), model)
        else:
            model.forward = lambda x: 2 * stock(x)

    model = Coder(name)
    seen = autocast_of_layers(model)
    optimizer = sgd(model)
    if before:
        patch(model)
    model, optimizer, scaler = prepare(name, model, optimizer)
    if not before:
        patch(model)
    return run(model, optimizer, scaler, by_forward), seen


class Doubled(Coder):
    def forward(self, x):
        return 2 * super().forward(x)


@way()
def test_patched_forward(name):
    """A forward replaced on the instance, as TRL does, before `prepare` or after: it follows the recipe."""
    model = Doubled(name)
    expected = autocast_of_layers(model)
    weights = run(*prepare(name, model), by_forward)
    for how in (types.MethodType, types.FunctionType):
        for before in (False, True):
            found, seen = patched(name, how, before)
            assert seen == expected, (how, before)
            assert_same(found, weights)
