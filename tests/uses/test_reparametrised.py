"""Parametrized weights, weights that a forward writes, and tied weights."""

import torch
from torch import nn
from torch.nn.utils import parametrizations
from ways import assert_near_fp32, both, steps, way

from tiny import model_for


def maker(name, change):
    def make():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), model_for(name))
        change(model[0])
        return model

    return make


@way()
def test_spectral_norm(name):
    """Spectral norm: `torch.nn.utils.parametrizations.spectral_norm`, or the older hook, before `prepare`."""
    for change in (parametrizations.spectral_norm, nn.utils.spectral_norm):
        start, found, expected = both(name, steps, maker(name, change))
        assert_near_fp32(name, start, found, expected, slack=3)


@way()
def test_weight_norm(name):
    """Weight norm: `torch.nn.utils.parametrizations.weight_norm` before `prepare`."""
    start, found, expected = both(name, steps, maker(name, parametrizations.weight_norm))
    assert_near_fp32(name, start, found, expected, slack=2)


class Embedded(nn.Module):
    """Eight inputs become eight tokens of four kinds, whose mean embedding is added."""

    def __init__(self, name):
        super().__init__()
        torch.manual_seed(3)
        self.tokens, self.body = nn.Embedding(4, 8, max_norm=1.0), model_for(name)

    def forward(self, x):
        return self.body(x + self.tokens((x > 0).long() + 2 * (x > 1).long()).mean(1))


@way()
def test_max_norm(name):
    """Embedding(max_norm=...): as always; the forward writes to its weight, which is not a step of the optimizer."""
    start, found, expected = both(name, steps, lambda: Embedded(name))
    assert_near_fp32(name, start, found, expected, slack=2)
    assert found["tokens.weight"].norm(dim=1).min() > 0


@way()
def test_tied(name):
    """Tied weights: tie them before `prepare`; they stay one parameter."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.up, self.body, self.down = nn.Linear(8, 8), model_for(name), nn.Linear(8, 8)
            self.down.weight = self.up.weight

        def forward(self, x):
            return self.body(self.down(nn.functional.gelu(self.up(x))))

    def loop(model, optimizer, scaler):
        steps(model, optimizer, scaler)
        assert model.down.weight is model.up.weight

    start, found, expected = both(name, loop, Tied)
    assert_near_fp32(name, start, found, expected, slack=2)
