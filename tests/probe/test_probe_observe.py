"""The tensors observed in a pass and their order; hooks are removed afterwards."""

import pytest
import torch
from torch import nn

import halfstep
import planted
from halfstep.probe.observe import observed
from halfstep.probe.trial import blocks


def sites(model, x):
    seen = []
    with observed(model, lambda site, tensor: seen.append(str(site))):
        model(x).sum().backward()
    return seen


def test_tensors_are_observed_in_the_order_of_the_pass():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    assert sites(model, torch.ones(2, 3)) == [
        "input of the model (Sequential)",
        "input of 0 (Linear)",
        "output of 0 (Linear)",
        "input of 1 (ReLU)",
        "output of 1 (ReLU)",
        "output of the model (Sequential)",
        "gradient of the output of the model (Sequential)",
        "gradient of the output of 1 (ReLU)",
        "gradient of the input of 1 (ReLU)",
        "gradient of the output of 0 (Linear)",
    ]


def test_backward_matmuls_are_attributed_to_their_module():
    seen = sites(planted.Attention(), torch.randn(2, 3, planted.WIDTH))
    assert seen.count("product of the model (Attention)") == 2
    assert seen.count("gradient of the product of the model (Attention)") == 4
    assert not any("product of q" in site or "product of o" in site for site in seen)


def test_overflowing_gradient_is_named_by_its_layer():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    with torch.no_grad():
        model[0].weight *= 1e-4
        model[1].weight *= 1e4
    report = halfstep.probe_model(model, data=[torch.randn(1, 8)], loss=lambda model, x: 1e3 * model(x).sum())
    assert report.findings == ()
    assert report.first_failure == "gradient of the input of 1 (Linear)"


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_are_removed(fails):
    model, x = planted.healthy(), planted.tokens()

    def see(site, tensor):
        if fails and site.role == "product":
            raise KeyboardInterrupt

    if fails:
        with pytest.raises(KeyboardInterrupt), observed(model, see):
            model(x)
    else:
        with observed(model, see):
            model(x)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_blocks_are_same_class_list_members_with_submodules():
    assert blocks(planted.healthy()) == {"blocks.0", "blocks.1"}
    assert blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == set()
