"""Update rules equal torch.optim's, or their papers', up to the order of float32 roundings."""

import numpy as np
import pytest
import torch

from halfstep.errors import OptimizerError
from halfstep.optim import Lamb, Lion, convert, rule_of, update_rules
from halfstep.recipe import get_recipe
from tiny import assert_same, copied


pytestmark = pytest.mark.cpu
ADAM = [
    {},
    {"weight_decay": 0.1},
    {"betas": (0.5, 0.9), "eps": 1e-3},
    {"maximize": True, "weight_decay": 0.01},
    {"lr": torch.tensor(0.02)},
    {"foreach": True},
    {"fused": True},
]
SGD = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "dampening": 0.5},
    {"momentum": 0.9, "weight_decay": 0.1, "maximize": True},
    {"weight_decay": 0.1},
    {"momentum": 0.5, "foreach": True},
    {"momentum": 0.5, "fused": True},
]
CASES = [(torch.optim.AdamW, o) for o in ADAM] + [(torch.optim.Adam, o) for o in ADAM]
CASES += [(torch.optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True})]
CASES += [(torch.optim.SGD, o) for o in SGD]
RMSPROP = [
    {},
    {"weight_decay": 0.1, "alpha": 0.9},
    {"momentum": 0.9, "maximize": True},
    {"centered": True, "eps": 1e-3},
    {"centered": True, "momentum": 0.5, "weight_decay": 0.01, "foreach": True},
    {"lr": torch.tensor(0.02)},
]
NADAM = [
    {},
    {"weight_decay": 0.1, "momentum_decay": 0.1},
    {"weight_decay": 0.1, "decoupled_weight_decay": True, "foreach": True},
    {"betas": (0.5, 0.9), "eps": 1e-3, "maximize": True},
    {"lr": torch.tensor(0.02)},
]
ADAGRAD = [{}, {"weight_decay": 0.1, "lr_decay": 0.1}, {"eps": 1e-3, "maximize": True}, {"foreach": True}]
CASES += [(torch.optim.Adagrad, o) for o in ADAGRAD]
CASES += [(torch.optim.RMSprop, o) for o in RMSPROP] + [(torch.optim.NAdam, o) for o in NADAM]


def twins(torch_class, options, shapes=((5, 3), (7,), (), (0,))):
    """Two of torch's optimizers on equal parameters."""
    torch.manual_seed(0)
    first = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    second = [torch.nn.Parameter(p.detach().clone()) for p in first]
    build = {"lr": 0.02, **options}
    return (torch_class(first, **build), first), (torch_class(second, **build), second)


def step(optimizer, parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def assert_close(first, second):
    for p, q in zip(first, second, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("torch_class", "options"), CASES, ids=lambda v: v.__name__ if isinstance(v, type) else str(v))
def test_fifty_steps_match_torch(torch_class, options):
    (torchs, ps), (other, qs) = twins(torch_class, options)
    ours = convert(other, get_recipe("fp32"), {})
    start = copied(list(qs))
    for i in range(50):
        step(torchs, ps, i)
        step(ours, qs, i)
    assert_close(ps, qs)
    assert (start[0] - qs[0]).abs().mean() > 1e-2


@pytest.mark.parametrize(("torch_class", "options"), CASES, ids=lambda v: v.__name__ if isinstance(v, type) else str(v))
def test_moments_and_step_counts_are_taken_over(torch_class, options):
    (torchs, ps), (other, qs) = twins(torch_class, options)
    for i in range(5):
        step(torchs, ps, i)
        step(other, qs, i)
    ours = convert(other, get_recipe("fp32"), {})
    assert not other.state
    for i in range(5, 10):
        step(torchs, ps, i)
        step(ours, qs, i)
    assert_close(ps, qs)
    for p, q in zip(ps, qs, strict=True):
        for name, value in torchs.state[p].items():
            if value is not None:
                torch.testing.assert_close(ours.state[q][name], value, rtol=1e-6, atol=1e-6)


def test_a_closure_is_evaluated_with_gradients():
    (torchs, ps), (other, qs) = twins(torch.optim.SGD, {})
    ours = convert(other, get_recipe("fp32"), {})

    def closure(parameters):
        loss = sum((p**2).sum() for p in parameters)
        loss.backward()
        return loss

    expected, found = torchs.step(lambda: closure(ps)), ours.step(lambda: closure(qs))
    assert_same(found, expected)
    assert_close(ps, qs)


def test_parameters_without_a_gradient_keep_values_and_step_counts():
    _, (other, (first, second, *_)) = twins(torch.optim.AdamW, {})
    ours = convert(other, get_recipe("fp32"), {})
    before = second.detach().clone()
    first.grad = torch.ones_like(first)
    ours.step()
    assert_same(second.detach(), before)
    assert not any(state.any() for state in ours.state[second].values())
    assert ours.state[first]["step"] == 1


class Named(torch.optim.AdamW):
    """Has its own defaults and a method that no step calls."""

    def __init__(self, params, lr=0.02):
        super().__init__(params, lr=lr, weight_decay=0.1)
        self.note = "mine"

    def rates(self):
        return [group["lr"] for group in self.param_groups]


class Again(Named):
    pass


class Other(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


class Saving(torch.optim.SGD):
    def state_dict(self):
        return super().state_dict()


class Adafactor(torch.optim.Optimizer):
    """A stand-in for transformers' Adafactor."""

    def __init__(self, params):
        super().__init__(params, {})


@pytest.mark.parametrize("torch_class", [Named, Again])
def test_a_subclass_without_overrides_is_treated_as_its_base(torch_class):
    (torchs, ps), (other, qs) = twins(torch_class, {})
    assert rule_of(other).name == "adamw"
    ours = convert(other, get_recipe("fp32"), {})
    for i in range(5):
        step(torchs, ps, i)
        step(ours, qs, i)
    assert_close(ps, qs)


@pytest.mark.parametrize(("torch_class", "name", "base"), [(Other, "step", "AdamW"), (Saving, "state_dict", "SGD")])
def test_a_subclass_with_overrides_is_refused(torch_class, name, base):
    with pytest.raises(OptimizerError, match=rf"{base} that overrides {name}, .*Hand over a torch\.optim\.{base}\."):
        rule_of(torch_class([torch.nn.Parameter(torch.ones(2))]))


@pytest.mark.parametrize("torch_class", [torch.optim.Adadelta, Other, torch.optim.ASGD])
def test_unsupported_classes_are_refused_with_a_list_of_supported_ones(torch_class):
    optimizer = torch_class([torch.nn.Parameter(torch.ones(2))])
    words = rf"{torch_class.__name__} cannot be expressed.*torch.optim.Adam\b.*torch.optim.AdamW.*torch.optim.SGD"
    with pytest.raises(OptimizerError, match=words):
        rule_of(optimizer)


class Muon(Adafactor):
    """A Muon that is not torch's."""


@pytest.mark.parametrize("torch_class", [Adafactor, torch.optim.Adafactor, Muon])
def test_adafactor_and_foreign_muons_are_refused_with_advice(torch_class):
    optimizer = torch_class([torch.nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(OptimizerError, match=rf"[Ff]or .*{torch_class.__name__} itself call halfstep\.apply"):
        rule_of(optimizer)


def test_centered_rmsprop_of_equal_gradients_stays_finite():
    """torch takes the square root of a difference's rounding error, and its weights may become NaN."""
    parameter = torch.nn.Parameter(torch.zeros(1000))
    optimizer = convert(torch.optim.RMSprop([parameter], centered=True), get_recipe("fp32"), {})
    grad = torch.randn(1000)
    for _ in range(1500):
        parameter.grad = grad
        optimizer.step()
    assert parameter.isfinite().all()


@pytest.mark.parametrize(
    ("torch_class", "option", "reason"),
    [
        (torch.optim.AdamW, "amsgrad", "third moment"),
        (torch.optim.Adam, "amsgrad", "third moment"),
        (torch.optim.Adam, "differentiable", "without autograd"),
        (torch.optim.SGD, "differentiable", "without autograd"),
        (torch.optim.AdamW, "capturable", "step count on the host"),
    ],
)
def test_unsupported_options_are_refused(torch_class, option, reason):
    optimizer = torch_class([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.param_groups[0][option] = True
    with pytest.raises(OptimizerError, match=rf"{option}=True cannot be expressed: .*{reason}.*{option}=False"):
        convert(optimizer, get_recipe("fp32"), {})


def lion(weight, grads, lr, betas, decay):
    """Chen et al. 2023, arXiv 2302.06675, program 1, in float64."""
    moment = np.zeros_like(weight)
    for grad in grads:
        interpolated = grad + betas[0] * (moment - grad)
        weight = weight - lr * (np.sign(interpolated) + decay * weight)
        moment = grad + betas[1] * (moment - grad)
    return weight


def lamb(weight, grads, lr, betas, decay, eps=1e-6):
    """You et al. 2019, arXiv 1904.00962, algorithm 2, in float64. The trust ratio of a zero weight or direction is
    1."""
    first, second = np.zeros_like(weight), np.zeros_like(weight)
    for step, grad in enumerate(grads, 1):
        first = grad + betas[0] * (first - grad)
        second = grad**2 + betas[1] * (second - grad**2)
        direction = first / (1 - betas[0] ** step) / (np.sqrt(second / (1 - betas[1] ** step)) + eps) + decay * weight
        norms = np.sqrt((weight**2).sum()), np.sqrt((direction**2).sum())
        weight = weight - lr * (norms[0] / norms[1] if all(norms) else 1.0) * direction
    return weight


@pytest.mark.parametrize(("torch_class", "equation"), [(Lion, lion), (Lamb, lamb)])
@pytest.mark.parametrize("start", ["random", "zeros"])
@pytest.mark.parametrize("zero_first", [False, True])
def test_lion_and_lamb_match_their_papers(torch_class, equation, start, zero_first):
    """Betas are far apart, so that swapping them would show. The first gradient may be zero."""
    torch.manual_seed(1)
    weight = torch.randn(40) if start == "random" else torch.zeros(40)
    grads = [torch.zeros(40)] * zero_first + [torch.randn(40) for _ in range(6)]
    expected = equation(weight.double().numpy(), [g.double().numpy() for g in grads], 0.05, (0.3, 0.95), 0.1)
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = convert(torch_class([parameter], 0.05, (0.3, 0.95), weight_decay=0.1), get_recipe("fp32"), {})
    for grad in grads:
        parameter.grad = grad
        optimizer.step()
    torch.testing.assert_close(parameter.detach().double(), torch.from_numpy(expected), rtol=1e-5, atol=1e-6)


def test_every_rule_is_chosen_for_its_torch_class():
    muon = ["muon"] if hasattr(torch.optim, "Muon") else []  # of torch 2.9
    assert sorted(update_rules()) == ["adagrad", "adam", "adamw", "lamb", "lion", *muon, "nadam", "rmsprop", "sgd"]
    for rule in update_rules().values():
        assert rule_of(rule.torch_class([torch.nn.Parameter(torch.ones(2, 2))], lr=0.1)) is rule
