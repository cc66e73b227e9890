"""A layer whose weight is frozen (beside adapters, in fine-tuning) keeps nothing of its input for the backward pass."""

import pytest
import torch
from torch import nn

from halfstep.ops.part import part_of
from halfstep.recipe import get_recipe
from tiny import RECIPES, SCALED, fast_and_every, prepared


ROUNDS = [name for name in RECIPES if any(rule.linear.rounds for rule in get_recipe(name).rules)]
ROUNDS = [name for name in ROUNDS if name not in SCALED]  # which store a frozen weight otherwise
KINDS = {
    "linear": lambda: (nn.LayerNorm(24), nn.Linear(24, 40), (32, 24)),
    "convolution": lambda: (nn.GroupNorm(1, 8), nn.Conv2d(8, 12, 3, padding=1), (4, 8, 5, 5)),
}


def made(kind, name, frozen):
    torch.default_generator.manual_seed(0)
    norm, layer, shape = KINDS[kind]()
    layer.weight.requires_grad_(not frozen)
    model = nn.Sequential(norm, layer)
    prepared(name, model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    return model, torch.randn(shape, generator=torch.Generator().manual_seed(1))


def kept(model, x):
    """The output, and how many tensors of the size of the layer's input the forward keeps, beside the norm's."""
    found = {}

    def pack(saved):
        found[saved.untyped_storage().data_ptr()] = saved
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        y = model(x)
    return y, sum(saved.numel() == x.numel() for place, saved in found.items() if place != x.data_ptr())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", fast_and_every(ROUNDS))
def test_it_keeps_no_input_and_passes_the_same_gradients_on(kind, names):
    rounding = 0
    for name in names:
        grads, inputs = [], []
        for frozen in (False, True):
            model, x = made(kind, name, frozen)
            (norm, layer), (y, found) = model, kept(model, x)
            inputs.append(found)
            y.square().sum().backward()
            assert (layer.weight.grad is None) == frozen
            grads.append((norm.weight.grad, layer.bias.grad))
        assert all(torch.equal(*pair) for pair in zip(*grads, strict=True)), name
        if (spec := part_of(layer).linear) is not None and spec.rounds:
            rounding += 1
            assert inputs[1] == inputs[0] - 1, (name, inputs)
    assert rounding
