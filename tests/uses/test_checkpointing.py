"""Activations computed again in the backward pass."""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from ways import prepare, steps, values, way

from tiny import assert_same, model_for


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
    assert len(inside) == (3 if how is None else 6), "the activations were not computed again"
    assert len(set(inside)) == 1, "computed again under another autocast"
    return losses, values(model), scaler.state_dict()


@way()
def test_checkpointing(name):
    """Activation checkpointing: `torch.utils.checkpoint`, reentrant or not, or selective; no bit changes."""
    expected = trained(name, None)
    kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default])
    for how in ({"use_reentrant": False}, {"use_reentrant": True}, {"use_reentrant": False, "context_fn": kept}):
        assert_same(trained(name, how), expected)
