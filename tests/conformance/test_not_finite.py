"""Under every recipe an infinity or NaN in an activation or gradient reaches what is computed of it, and the loss."""

import pytest
import torch
from torch import nn

from halfstep.recipe import get_recipe
from tiny import EVERY, FAST, SMOOTH, Gated, prepared, train


STEPS = 2
DELAYED = {
    name for name in EVERY for rule in get_recipe(name).rules for q in rule.linear.quantizers
    if q.scales is not None and getattr(q.scales.rule, "warmup", 9) < STEPS
}  # fmt: skip
"""Scaled by earlier steps' amaxes after so many steps (FP8-LM's begin later): an infinity saturates, as in Transformer
Engine, and the recipe's notes say so."""
BAD = {"infinity": float("inf"), "minus-infinity": -float("inf"), "nan": float("nan")}
quick = pytest.mark.quick(*(f"{name}-infinity" for name in sorted({*FAST, "bf16-truncate"})))


def inputs():
    torch.manual_seed(1)
    return torch.randn(12, 16)


def layer(name):
    """A prepared linear layer that has trained, so that scales of earlier steps are there."""
    model = nn.Sequential(Gated(), nn.Linear(16, 16)) if name in SMOOTH else nn.Sequential(nn.Linear(16, 16))
    model, optimizer, scaler = prepared(name, model)
    train(model, optimizer, scaler, STEPS, (inputs(), inputs()))
    optimizer.zero_grad()
    return model


def saturates(name, bad):
    """Whether the layer's results are finite all the same."""
    return name in DELAYED and bad != "nan"


@quick
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", EVERY)
def test_of_an_input(name, bad):
    model, x = layer(name), inputs()
    x[3, 5] = BAD[bad]
    assert bool(torch.isfinite(model(x)[3]).all()) == saturates(name, bad)


@quick
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", EVERY)
def test_of_a_gradient(name, bad):
    model = layer(name)
    y = model(inputs())
    grad = torch.ones_like(y)
    grad[3, 5] = BAD[bad]
    y.backward(grad)
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    assert all(bool(torch.isfinite(w.grad.float()).all()) == saturates(name, bad) for w in weights)
