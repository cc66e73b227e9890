"""Probes and mismatch run copies that share no weights with the original model."""

import functools
from types import MethodType

import pytest
import torch
from torch import nn

from halfstep.errors import ModelError
from halfstep.probe.batch import copied


class Wrapper:
    """Like accelerate's: calls the function it was given."""

    def __init__(self, forward):
        self.forward = forward

    def __call__(self, *args):
        return self.forward(*args)


def model():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def doubled(self, x):
    return 2 * type(self).forward(self, x)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda forward: functools.wraps(forward)(lambda *args: forward(*args)),
        lambda forward: lambda x, call=forward: call(x),
    ],
    ids=["closure", "default"],
)
@pytest.mark.parametrize("path", ["", "1"])
def test_forward_bound_to_the_original_raises(wrap, path):
    whole = model()
    part = whole.get_submodule(path)
    part.forward = wrap(part.forward)
    with pytest.raises(ModelError, match=rf"{path or 'the model'} has a forward that was set on the instance"):
        copied(whole)


@pytest.mark.parametrize(
    "give",
    [
        lambda m: MethodType(doubled, m),
        lambda m: functools.partial(doubled, m),
        lambda m: Wrapper(m.forward),
        lambda m: lambda x: 2 * x,
    ],
    ids=["method", "partial", "object", "function"],
)
def test_copied_forward_uses_the_copys_weights(give):
    whole = model()
    whole.forward = give(whole)
    other = copied(whole)
    x, before = torch.ones(1, 2), whole(torch.ones(1, 2))
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.fill_(9.0)
    assert torch.equal(other(x), before)
