"""Parameters on a CPU that one kernel call steps together: the bits of separate steps."""

import contextlib

import pytest
import torch
from torch import nn

import halfstep
from halfstep import formats
from halfstep.errors import ModelError
from halfstep.kernels.cpu import optimizer as kernels
from halfstep.optim import LowBitAdamW, stepping
from halfstep.quant import Quantizer, Scales, Tile
from halfstep.quant.scaling import get_scaling
from halfstep.recipe import get_storage
from tiny import assert_same


SHAPES = [(40,), (3, 256), (), (129, 256), (0, 256), (1,)]


@pytest.fixture
def kernel_calls(monkeypatch):
    """The number of elements of each kernel call."""
    made, kernel = [], kernels.step
    monkeypatch.setattr(kernels, "step", lambda size, *rest: made.append(size) or kernel(size, *rest))
    return made


@pytest.fixture
def step_separately(monkeypatch):
    """A function after whose call parameters are stepped one by one."""
    return lambda: monkeypatch.setattr(stepping, "batched", lambda ways: ([], list(ways)))


def stepped(recipe, between=lambda optimizer, weights: None, steps=3, make=torch.optim.AdamW):
    """The states and weights of an optimizer after some steps."""
    torch.manual_seed(0)
    weights = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in SHAPES)
    _, optimizer, _ = halfstep.prepare(weights, make(weights.parameters(), lr=0.1), recipe)
    for number in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape).to(weight.dtype)
        between(optimizer, weights) if number == 1 else None
        optimizer.step()
    return optimizer.state_dict()["state"], [weight.detach() for weight in weights]


@pytest.mark.parametrize("recipe", ["fp32", "bf16-stochastic", "bf16-master", "bf16-kahan", "bf16-split", "adamw-8bit"])
def test_one_kernel_call_equals_separate_steps(recipe, kernel_calls, step_separately):
    found = stepped(recipe)
    kinds = len(kernel_calls) // 3
    step_separately()
    assert_same(stepped(recipe), found)
    assert kinds == 1 if recipe != "adamw-8bit" else kinds > 1  # small tensors' moments stay in float32
    assert len(kernel_calls) == 3 * kinds + 3 * len(SHAPES)


def write_to_a_count(optimizer, weights):
    optimizer.state[weights[1]]["step"].fill_(7)


def count_in_float64(optimizer, weights):
    optimizer.state[weights[1]]["step"] = optimizer.state[weights[1]]["step"].double()


def freeze_one(optimizer, weights):
    weights[0].grad = None


def load(optimizer, weights):
    optimizer.load_state_dict(optimizer.state_dict())


def change_a_rate(optimizer, weights):
    optimizer.param_groups[0]["lr"] = 0.3


@pytest.mark.parametrize("between", [write_to_a_count, count_in_float64, freeze_one, load, change_a_rate])
def test_changes_between_steps_take_effect(between, step_separately):
    found = stepped("bf16-stochastic", between, 4)
    step_separately()
    assert_same(stepped("bf16-stochastic", between, 4), found)


def test_rules_with_scalar_moments_are_stepped_separately_with_group_options(kernel_calls, step_separately):
    def grouped(parameters, lr):
        first, *others = parameters
        return torch.optim.NAdam([{"params": [first]}, {"params": others, "weight_decay": 0.5}], lr=lr)

    found = stepped("fp32", make=grouped)  # one moment of NAdam is a scalar per tensor
    assert len(kernel_calls) == 3 * len(SHAPES)
    step_separately()
    assert_same(stepped("fp32", make=grouped), found)


@pytest.mark.parametrize("recipe", ["bf16-stochastic", pytest.param("adamw-8bit", marks=pytest.mark.slow)])
def test_the_number_of_threads_changes_no_bit(recipe):
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(stepped(recipe))
    finally:
        torch.set_num_threads(before)
    assert_same(*found)


def test_parameters_smaller_than_a_codebook_are_stepped_together():
    """The 256 values of a dynamic map, with the other moment in float32."""
    first = Quantizer(formats.get("dynamic8"), scales=Scales(Tile(1, 64), get_scaling("absmax")))
    found = []
    for separately in (False, True):
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(shape)) for shape in [(3, 64), (64,), (5, 64)]]
        moments = (("exp_avg", get_storage(first, flat=True)), ("*", "fp32"))
        optimizer = LowBitAdamW(weights, lr=0.1, moments=moments)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn(weight.shape)
            with optimizer.watched(lambda update: None) if separately else contextlib.nullcontext():
                optimizer.step()
        found.append((optimizer.state_dict()["state"], weights))
    assert_same(*found)


def test_a_gradient_without_storage_is_refused_without_changes():
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    _, optimizer, _ = halfstep.prepare(nn.ParameterList(weights), torch.optim.SGD(weights, lr=0.1), "fp32")
    for weight in weights:
        weight.grad = torch.zeros(3)
    optimizer.step()
    weights[0].grad, weights[1].grad = torch.ones(3), torch._efficientzerotensor(3)
    with pytest.raises(ModelError, match=r"of shape \(3,\) has no storage"):
        optimizer.step()
    assert_same(weights, [torch.ones(3)] * 2)
