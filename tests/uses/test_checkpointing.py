"""Activation checkpointing: activations recomputed in the backward pass."""

import warnings
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts
from ways import prepare, steps, values, way

from tiny import assert_same, batch, model_for


class Checkpointed(nn.Module):
    def __init__(self, how, name):
        super().__init__()
        self.how, self.first, self.body, self.head = how, nn.Linear(8, 8), model_for(name), nn.Linear(4, 4)

    def forward(self, x):
        h = self.first(x)
        return self.head(self.body(h) if self.how is None else checkpoint(self.body, h, **self.how))


def trained(name, how):
    torch.manual_seed(4)
    model = Checkpointed(how, name)
    inside = []
    model.body[0].register_forward_hook(lambda *_: inside.append(torch.is_autocast_enabled("cpu")))
    model, optimizer, scaler = prepare(name, model)
    torch.manual_seed(5)
    losses = steps(model, optimizer, scaler, 3)
    assert len(inside) == (3 if how is None else 6), "the activations were not recomputed"
    assert len(set(inside)) == 1, "recomputed under another autocast"
    return losses, values(model), scaler.state_dict()


@way()
def test_checkpointing(name):
    """Activation checkpointing: `torch.utils.checkpoint`, reentrant or not, or selective; no bit changes."""
    expected = trained(name, None)
    kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default])
    for how in ({"use_reentrant": False}, {"use_reentrant": True}, {"use_reentrant": False, "context_fn": kept}):
        assert_same(trained(name, how), expected)


def layer_by_layer(model, x):
    for layer in model:
        x = layer(x)
    return x


def checkpointed_layers(model, x):
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


def by_layers(name, call):
    """A run whose loop calls the layers instead of the model."""
    model, optimizer, scaler = prepare(name, model_for(name))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for seed in range(3):
            x, y = batch(seed)
            scaler.scale(F.mse_loss(call(model, x.requires_grad_()), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert all("with halfstep.following(model)" in str(warning.message) for warning in said)
    return values(model), scaler.state_dict()


@way()
def test_checkpointed_parts(name):
    """Parts that your own code checkpoints: `checkpoint_sequential(model, 2, x)`, or `checkpoint(layer, x)` in a loop,
    reentrant or not; no bit changes.
    """
    expected = by_layers(name, layer_by_layer)
    for reentrant in (False, True):
        sequential = partial(checkpoint_sequential, use_reentrant=reentrant)
        assert_same(by_layers(name, lambda model, x, call=sequential: call(model, 2, x)), expected)
    assert_same(by_layers(name, checkpointed_layers), expected)
