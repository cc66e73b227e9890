"""The cost of unit scaling in adopted models: factors are fused into operations instead of separate passes."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep.lab.models.gpt import GPT


TOKENS = torch.randint(0, 97, (8, 32), generator=torch.Generator().manual_seed(0))


class HandWritten(nn.Module):
    """GPT-2's own GELU, as people write it."""

    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class Called(nn.Module):
    """An activation function that a module's forward calls."""

    def __init__(self, function):
        super().__init__()
        self.first, self.function = nn.Linear(16, 32), function

    def forward(self, x):
        return self.function(self.first(x))


MODULES = [
    nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.ReLU(), nn.Tanh(), nn.Sigmoid(), HandWritten(),  # multiplied in place
    nn.ReLU(inplace=True), nn.ReLU6(), nn.ELU(), nn.Hardswish(),  # multiplied after
]  # fmt: skip
FUNCTIONS = [
    F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.silu, F.relu, torch.tanh, torch.sigmoid, torch.Tensor.relu,
    torch.relu_, lambda x: F.silu(x, inplace=True), F.elu, F.leaky_relu,
]  # fmt: skip


def value_and_gradient(function, x, grad):
    x = x.clone().requires_grad_()
    y = function(x * 1)  # a copy, since it may be written in place
    return y.detach(), torch.autograd.grad(y, x, grad)[0]


@pytest.mark.parametrize("activation", MODULES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_adopted_activation_equals_the_stock_one_times_its_factors(activation, dtype):
    model = nn.Sequential(nn.Linear(16, 32), activation, nn.Linear(32, 16))
    generator, wide = torch.Generator().manual_seed(1), 1 if dtype == torch.bfloat16 else 3
    x, grad = (torch.randn(64, 32, generator=generator).mul(wide).to(dtype) for _ in range(2))
    y, slope = value_and_gradient(activation, x.double(), grad.double())
    report = halfstep.unit_scale(model, torch.randn(64, 16))
    (factors,) = [op for op in report.operations if op.path == "1"]
    alpha, beta = float(factors.forward.removeprefix("times ")), factors.backward[0]
    found = value_and_gradient(model[1], x, grad)
    rtol = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.03}[dtype]  # the report gives 4 digits of alpha
    torch.testing.assert_close(found[0].double(), y * alpha, rtol=rtol, atol=2e-5 if rtol < 0.01 else 0.01)
    torch.testing.assert_close(found[1].double(), slope * beta, rtol=rtol, atol=2e-5 if rtol < 0.01 else 0.03)
    halfstep.revert(model)
    again = value_and_gradient(activation, x.double(), grad.double())
    assert torch.equal(again[0], y)
    assert torch.equal(again[1], slope)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_called_activation_equals_the_stock_one_times_its_factors(function):
    model = Called(function)
    report = halfstep.unit_scale(model, torch.randn(64, 16))
    (factors,) = [op for op in report.operations if op.path == "" and op.name != "nn.Linear"]
    x, grad = torch.randn(64, 16), torch.randn(64, 32)
    y, slope = value_and_gradient(lambda x: function(model.first(x)), x, grad)
    found = value_and_gradient(model, x, grad)
    torch.testing.assert_close(found[0], y * float(factors.forward.removeprefix("times ")), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found[1], slope * factors.backward[0], rtol=1e-3, atol=1e-5)


def test_an_in_place_activation_is_scaled_in_place():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 8)

        def forward(self, x):
            x = self.first(x)
            F.relu(x, inplace=True)  # its return value is not used
            return self.last(x)

    torch.manual_seed(0)
    model, x = InPlace(), torch.randn(64, 16)
    report = halfstep.unit_scale(model, x)
    assert [op.name for op in report.operations] == ["nn.Linear", "relu", "nn.Linear"]
    hidden = []
    model.last.register_forward_pre_hook(lambda module, args: hidden.append(args[0].detach().std()))
    model(x).sum().backward()
    assert abs(float(hidden[0]) - 1) < 0.1
    assert all(p.grad is not None for p in model.parameters())


class Multiplications(TorchDispatchMode):
    """The shapes of all products of a tensor and a scalar."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mul.Tensor and not (isinstance(args[1], torch.Tensor) and args[1].dim()):
            self.shapes.append(tuple(made.shape))
        return made


class WithLoss(nn.Module):
    """A GPT that returns its loss."""

    def __init__(self):
        super().__init__()
        self.model = GPT(97, 32, 2, 64, 4)

    def forward(self, tokens):
        return F.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())


def test_factors_of_matmuls_activations_and_losses_take_no_extra_pass():
    torch.manual_seed(0)
    model = WithLoss()
    report = halfstep.unit_scale(model, TOKENS)
    assert any(op.name == "cross_entropy" and op.backward[0] > 100 for op in report.operations)
    counted = Multiplications()
    with counted:
        model(TOKENS).backward()
    large = [shape for shape in counted.shapes if math.prod(shape) >= 8 * 32 * 64]
    assert {shape[-1] for shape in large} <= {64, 16}, (
        large
    )  # widths of the residual stream and of a head: no MLP's, no logits'
    blocks, stream = 2, [shape for shape in large if shape[-1] == 64]
    # Of the stream: each residual addition has one forward and one backward, each branch one where it begins; the sum
    # of tokens and positions has one, and the gradient of the embedding one.
    assert len(stream) <= 2 * blocks * 3 + 3, stream
    assert len(large) - len(stream) == 2 * blocks  # attention: its output and the gradient of that
