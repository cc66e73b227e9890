"""Under every recipe, an infinity or NaN in an activation or gradient reaches the results computed from it."""

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
"""Recipes scaled by earlier amaxes after so few steps (FP8-LM's begin later): an infinity saturates, as in Transformer
Engine; the recipes' notes say so."""
BAD = {"infinity": float("inf"), "minus-infinity": -float("inf"), "nan": float("nan")}
quick = pytest.mark.quick(*(f"{name}-infinity" for name in sorted({*FAST, "bf16-truncate"})))


def inputs():
    torch.manual_seed(1)
    return torch.randn(12, 16)


def layer(name):
    """A prepared linear layer after two training steps, so that delayed scaling has an amax history."""
    model = nn.Sequential(Gated(), nn.Linear(16, 16)) if name in SMOOTH else nn.Sequential(nn.Linear(16, 16))
    model, optimizer, scaler = prepared(name, model)
    train(model, optimizer, scaler, STEPS, (inputs(), inputs()))
    optimizer.zero_grad()
    return model


def saturates(name, bad):
    """Whether the results stay finite, since the layer's scales are delayed and `bad` is no NaN."""
    return name in DELAYED and bad != "nan"


@quick
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", EVERY)
def test_nonfinite_input_reaches_the_output(name, bad):
    model, x = layer(name), inputs()
    x[3, 5] = BAD[bad]
    assert bool(torch.isfinite(model(x)[3]).all()) == saturates(name, bad)


@quick
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", EVERY)
def test_nonfinite_gradient_reaches_the_weight_gradients(name, bad):
    model = layer(name)
    y = model(inputs())
    grad = torch.ones_like(y)
    grad[3, 5] = BAD[bad]
    y.backward(grad)
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    assert all(bool(torch.isfinite(w.grad.float()).all()) == saturates(name, bad) for w in weights)
