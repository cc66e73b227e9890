"""Linear layers of other libraries are rounded; `apply` warns if many weights are in layers without an adapter."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.falcon.modeling_falcon import FalconLinear

import halfstep
from families import for_each
from tiny import assert_same


NAMES = ("fp8-current", "mxfp8", "fp8lm-o2")


class Linear(nn.Module):
    """A copy of PyTorch Geometric's linear layer."""

    __module__ = "torch_geometric.nn.dense.linear"

    def __init__(self, width, out):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(out, width)), nn.Parameter(torch.randn(out))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class Scaled(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x):
        return 2 * super().forward(x)


def twins(layer):
    """A model with that layer, and one of nn.Linear's with the same weights."""
    first, second = nn.Sequential(nn.Linear(32, 32), layer), nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    second.load_state_dict(first.state_dict())
    return first, second


@for_each("name", NAMES)
@for_each("kind", [Linear, FalconLinear], ids=lambda kind: kind.__name__)
def test_a_librarys_linear_layer_rounds_like_torchs(kind, name):
    model, twin = twins(kind(32, 32))
    if kind is FalconLinear:
        model[1].bias = twin[1].bias = None
    x, found = torch.randn(4, 32), []
    for each in (model, twin):
        assert halfstep.apply(each, name).quantized == ("0", "1")
        y = each(x)
        y.square().sum().backward()
        found.append((y, [p.grad for p in each.parameters()]))
    assert_same(*found)
    halfstep.revert(model)
    assert type(model[1]) is kind


def test_falcon_adds_its_bias_to_the_rounded_matmul():
    model, twin = twins(FalconLinear(32, 32))
    bias, twin[1].bias, x = model[1].bias.detach(), None, torch.randn(4, 32)
    for each in (model, twin):
        halfstep.apply(each, "fp8-current")
    assert_same(model(x), twin(x) + bias)


def missing(share):
    """A model of 10 layers; a share of them has a forward of its own."""
    return nn.Sequential(*(Scaled(8, 8) if i < share * 10 else nn.Linear(8, 8) for i in range(10)))


def test_apply_warns_of_unrounded_weights_by_class():
    with pytest.warns(UserWarning, match=r"'fp8-current' does not round 30% .* those of Scaled \(3\), such as 0: "):
        halfstep.apply(missing(0.3), "fp8-current")
    with pytest.warns(UserWarning, match=r"does not round 20%"):
        halfstep.quantize_model(missing(0.2), "mxfp8")


def test_apply_does_not_warn_of_few_or_excluded_weights():
    class Positions(nn.Linear):  # nn.Linear's forward, and a table that no matmul uses
        def __init__(self):
            super().__init__(8, 8)
            self.position_embeddings = nn.Parameter(torch.zeros(512, 8))

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.pos_embed = Positions(), nn.Parameter(torch.zeros(512, 8))

        def forward(self, x):
            return self.layer(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        halfstep.apply(missing(0.1), "fp8-current")
        halfstep.apply(missing(0.5), "fp8-current", lambda module, path: type(module) is nn.Linear)
        halfstep.apply(missing(0.5), "bf16-mixed")
        halfstep.apply(Holder(), "fp8-current")
