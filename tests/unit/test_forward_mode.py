"""Forward-mode derivatives of scaled functions equal finite differences; functions without one raise."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

import halfstep
from halfstep import unit
from halfstep.errors import ModelError
from halfstep.ops.function import run


pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, in forward mode


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def branched(x):
    branch, skip = unit.residual_split(x, ratio=0.5)
    return unit.residual_add(branch.sin(), skip, ratio=0.5)


ONES = torch.ones(4, 5, dtype=torch.float64)
FUNCTIONS = {
    "gelu": unit.gelu,
    "gelu_tanh": lambda x: unit.gelu(x, "tanh", mult=1.5),
    "silu": lambda x: unit.silu(x, mult=0.5),
    "relu": unit.relu,
    "tanh": lambda x: unit.tanh(x, mult=2.0),
    "sigmoid": lambda x: unit.sigmoid(x, mult=2.0),
    "softmax": lambda x: unit.softmax(x, -1),
    "softmax of columns": lambda x: unit.softmax(x, 0, mult=2.0),
    "gated": lambda x: unit.gated_silu(x, x.flip(0), mult=1.3),
    "gated input": lambda x: unit.gated_silu(x, ONES),
    "gate": lambda x: unit.gated_silu(ONES, x),
    "residual": branched,
    "sum": lambda x: unit.add(x, x.sin()),
    "one term": lambda x: unit.add(ONES, x),
    "norm": lambda x: unit.layer_norm(x, (5,)),
    "cross-entropy": lambda x: unit.cross_entropy(x, torch.tensor([0, 1, 2, 1])),
    "squares": lambda x: unit.mse_loss(x, ONES),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tangents_equal_finite_differences(name):
    function, x, t = FUNCTIONS[name], draw(4, 5), draw(4, 5, seed=1)
    expected = (function(x + 1e-6 * t) - function(x - 1e-6 * t)) / 2e-6
    _, found = torch.func.jvp(function, (x,), (t,))
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(function(forward_ad.make_dual(x, t)))
    torch.testing.assert_close(dual.tangent, expected, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close((torch.func.jacfwd(function)(x) * t).sum((-2, -1)), found)


class Branched(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.branch = nn.Linear(5, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        return x + F.gelu(self.branch(x))


@pytest.mark.parametrize("model", [Branched(), nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3))])
def test_tangents_of_a_unit_scaled_model_equal_finite_differences(model):
    x = draw(4, 5).float()
    halfstep.unit_scale(model, x)
    found, expected = torch.func.jvp(model, (x,), (x,))[1], (model(1.001 * x) - model(0.999 * x)) / 0.002
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


class Twice(torch.autograd.Function):
    """An autograd Function without a forward-mode derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_a_function_without_a_forward_mode_derivative_raises():
    x = draw(4, 5)
    with pytest.raises(ModelError, match=r"forward-mode derivative .* operation that has none: take reverse"):
        torch.func.jvp(lambda x: run(Twice, x), (x,), (x,))
    assert torch.equal(torch.func.vjp(lambda x: run(Twice, x), x)[1](torch.ones(4, 5))[0], 2 * torch.ones(4, 5))
