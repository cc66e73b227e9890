"""unit.Linear and unit.LinearReadout: unit scale, roles, and recipes that round their operands."""

import copy
import pickle

import pytest
import torch
from torch import nn

import halfstep
from halfstep.unit.modules.linear import SAME, Linear, LinearReadout, multipliers_of
from halfstep.unit.roles import roles


def stds(layer, rows=512):
    x = torch.randn(rows, layer.in_features, requires_grad=True)
    y = layer(x)
    y.backward(torch.randn_like(y))
    return [float(t.std()) for t in (y.detach(), x.grad, layer.weight.grad)]


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        ("none", (1, 1, 1)),
        ("geometric_mean", (0.707, 1.414, 1)),
        ("to_output", (1, 2, 1)),
        ("to_grad_input", (0.5, 1, 1)),
        (SAME, (1, 2, (512 / 256) ** 0.5)),
    ],
)
def test_standard_deviations_by_constraint(constraint, expected):
    """256 -> 1024, 512 rows."""
    torch.manual_seed(0)
    assert stds(Linear(256, 1024, constraint=constraint)) == pytest.approx(expected, rel=0.02)


def test_a_readouts_output_shrinks_with_the_root_of_the_width():
    torch.manual_seed(0)
    for width in (64, 1024):
        y, dx, dw = stds(LinearReadout(width, 100))
        assert y == pytest.approx(width**-0.5, rel=0.05)
        assert (dx, dw) == pytest.approx((1, 1), rel=0.05)


def test_the_same_factor_gives_the_true_gradients():
    torch.manual_seed(0)
    layer, x = Linear(48, 80, bias=True, constraint=SAME).double(), torch.randn(7, 48, dtype=torch.float64)
    layer.bias.data.normal_()
    true = [t.detach().clone().requires_grad_() for t in (x, layer.weight, layer.bias)]
    expected = nn.functional.linear(true[0], true[1] * 48**-0.5)  # the bias is added after the factor
    x = x.requires_grad_()
    y = layer(x)
    torch.testing.assert_close(y, expected + layer.bias, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(y)
    y.backward(grad)
    (expected + true[2]).backward(grad)
    for mine, tensor in zip((x, layer.weight, layer.bias), true, strict=True):
        torch.testing.assert_close(mine.grad, tensor.grad, rtol=1e-12, atol=1e-12)


def test_state_dicts_copies_and_roles():
    layer = Linear(6, 4, bias=True, ends_branch=True)
    assert list(layer.state_dict()) == list(nn.Linear(6, 4).state_dict())
    assert not Linear(6, 4).bias
    assert bool((layer.bias == 0).all())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert multipliers_of(other) == multipliers_of(layer)
        assert roles(other) == roles(layer)
    assert roles(layer)["weight"].ends_branch
    assert roles(LinearReadout(6, 4))["weight"].kind == "readout"
    assert not multipliers_of(nn.Linear(2, 2)).multiplies


@pytest.mark.parametrize("recipe", ["bf16-mixed", "fp16-mixed-unscaled", "bf16-nomaster", "fp8-current", "mxfp8"])
def test_recipes_round_operands_and_keep_the_factors(recipe):
    """The output differs from float32 by the recipe's rounding alone."""
    torch.manual_seed(0)
    model = nn.Sequential(Linear(64, 256, bias=True), nn.Tanh(), Linear(256, 32))
    x = torch.randn(128, 64)
    exact = model(x).detach()
    followed = copy.deepcopy(model)
    report = halfstep.apply(followed, recipe)
    y = followed(x)
    loss = (y * torch.randn_like(y)).sum()
    loss.backward()
    error = float((y.detach() - exact).norm() / exact.norm())
    assert 1e-5 < error < 0.06
    assert ("0" in report.quantized) == recipe.startswith(("fp8", "mx"))
    halfstep.revert(followed)
    if recipe != "bf16-nomaster":
        assert torch.equal(followed(x), exact)


def test_a_recipe_without_rules_equals_the_layer_under_autocast():
    torch.manual_seed(0)
    model, x = nn.Sequential(Linear(40, 24, bias=True)), torch.randn(9, 40)
    followed = copy.deepcopy(model)
    halfstep.apply(followed, "bf16-mixed")
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    assert torch.equal(followed(x), expected.float())


def test_a_copy_of_a_model_under_a_recipe_keeps_its_factors():
    model = nn.Sequential(Linear(64, 64))
    halfstep.apply(model, "fp8-current")
    x = torch.randn(8, 64)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    halfstep.revert(model)
    assert "_halfstep" not in vars(model[0])
    assert multipliers_of(model[0]).multiplies
