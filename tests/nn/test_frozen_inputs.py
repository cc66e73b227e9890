"""A layer with a frozen weight saves no input for the backward pass."""

import pytest
import torch
from torch import nn

from halfstep.ops.part import part_of
from halfstep.recipe import get_recipe
from tiny import RECIPES, SCALED, fast_and_every, prepared


ROUNDS = [name for name in RECIPES if any(rule.linear.rounds for rule in get_recipe(name).rules)]
ROUNDS = [name for name in ROUNDS if name not in SCALED]  # they store a frozen weight in another way
KINDS = {
    "linear": lambda: (nn.LayerNorm(24), nn.Linear(24, 40), (32, 24)),
    "convolution": lambda: (nn.GroupNorm(1, 8), nn.Conv2d(8, 12, 3, padding=1), (4, 8, 5, 5)),
}


def norm_and_layer(kind, name, frozen):
    torch.default_generator.manual_seed(0)
    norm, layer, shape = KINDS[kind]()
    layer.weight.requires_grad_(not frozen)
    model = nn.Sequential(norm, layer)
    prepared(name, model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    return model, torch.randn(shape, generator=torch.Generator().manual_seed(1))


def forward_and_saved(model, x):
    """The output, and the number of tensors of the input's size that the forward saves, the norm's input excluded."""
    found = {}

    def pack(saved):
        found[saved.untyped_storage().data_ptr()] = saved
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        y = model(x)
    return y, sum(saved.numel() == x.numel() for pointer, saved in found.items() if pointer != x.data_ptr())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", fast_and_every(ROUNDS))
def test_a_frozen_layer_saves_no_input_and_gives_the_same_gradients(kind, names):
    rounding = 0
    for name in names:
        grads, inputs = [], []
        for frozen in (False, True):
            model, x = norm_and_layer(kind, name, frozen)
            (norm, layer), (y, found) = model, forward_and_saved(model, x)
            inputs.append(found)
            y.square().sum().backward()
            assert (layer.weight.grad is None) == frozen
            grads.append((norm.weight.grad, layer.bias.grad))
        assert all(torch.equal(*pair) for pair in zip(*grads, strict=True)), name
        if (spec := part_of(layer).linear) is not None and spec.rounds:
            rounding += 1
            assert inputs[1] == inputs[0] - 1, (name, inputs)
    assert rounding
