"""Properties of every update rule: pure, elementwise where stated, and applied unchanged by the optimizer."""

import inspect
import itertools
import math
from dataclasses import replace

import pytest
import torch

from families import in_turn
from halfstep.optim import convert, update_rules
from halfstep.optim.rules import no_fused_update
from halfstep.recipe import Recipe, get_recipe
from oracles.numbers import same_bits
from tiny import assert_same, copied


RULES = update_rules()
OPTIONS = {"sgd": {"momentum": 0.9}, "rmsprop": {"momentum": 0.9, "centered": True}}
"""Options that a rule's tests need to have any effect."""
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
SHAPES = [(), (0,), (0, 3), (1,), (7,), (3, 5)]


def shape_for(rule, shape):
    """`shape`, or a matrix shape of as many elements for rules that only take matrices."""
    size = math.prod(shape)
    return (
        shape if rule.dims in (None, len(shape)) else (size // math.gcd(size, 4), math.gcd(size, 4)) if size else (0, 2)
    )


def options_of(rule):
    decays = "weight_decay" in inspect.signature(rule.torch_class).parameters
    return {"lr": 0.1, **({"weight_decay": 0.1} if decays else {}), **OPTIONS.get(rule.name, {})}


def group_of(rule, **more):
    """A parameter group as the rule's torch.optim class makes it."""
    parameter = torch.nn.Parameter(torch.ones(shape_for(rule, (1,))))
    options = {**options_of(rule), **more}
    return rule.torch_class([parameter], **options).param_groups[0]


def arguments(rule, shape=(3, 5), **more):
    group = group_of(rule, **more)
    generator, shape = torch.Generator().manual_seed(1), shape_for(rule, shape)
    weight, grad = (torch.randn(shape, generator=generator) for _ in range(2))
    moments = {name: torch.rand(rule.shape(name, shape), generator=generator) for name in rule.moments(group)}
    return weight, grad, moments, 4, group


@every_rule
@pytest.mark.parametrize("shape", SHAPES)
def test_update_is_pure_and_keeps_shapes_and_float32(rule, shape):
    given = arguments(rule, shape)
    before = copied(list(given[:3]))
    weight, moments = rule.update(*given)
    assert_same(list(given[:3]), before)
    assert moments.keys() == given[2].keys()
    for tensor, own in ((weight, given[0].shape), *((moments[name], given[2][name].shape) for name in moments)):
        assert (tensor.shape, tensor.dtype) == (own, torch.float32)


@every_rule
def test_elementwise_rules_are_elementwise(rule):
    if not rule.elementwise:
        pytest.skip("norms of whole tensors enter")
    weight, grad, moments, step, group = arguments(rule)
    whole, new = rule.update(weight, grad, moments, step, group)
    turned = {name: moment.t() for name, moment in moments.items()}
    part, part_new = rule.update(weight.t(), grad.t(), turned, step, group)
    assert_same(part.t(), whole)
    assert_same({name: moment.t() for name, moment in part_new.items()}, new)


@every_rule
def test_zero_learning_rate_changes_only_moments(rule):
    given = arguments(rule, lr=0.0)
    weight, moments = rule.update(*given)
    same_bits(weight, given[0])
    for name, moment in moments.items():
        assert not torch.equal(moment, given[2][name])


@every_rule
def test_step_opposes_the_gradient_unless_maximizing(rule):
    if "maximize" not in inspect.signature(rule.torch_class).parameters:
        pytest.skip("its torch class only minimizes")
    down, up = (group_of(rule, weight_decay=0.0, maximize=maximize) for maximize in (False, True))
    grad = torch.tensor([1.0, -2.0])
    zeros = {name: torch.zeros(rule.shape(name, (2,))) for name in rule.moments(down)}
    step = rule.update(torch.zeros(2), grad, zeros, 1, down)[0]
    assert (step * grad < 0).all()
    same_bits(rule.update(torch.zeros(2), grad, zeros, 1, up)[0], -step)


@every_rule
def test_nan_and_infinite_gradients_reach_the_weight(rule):
    weight, grad, moments, step, group = arguments(rule, (3,))
    grad.view(-1)[:2] = torch.tensor([float("nan"), float("inf")])
    moved, _ = rule.update(weight, grad, moments, step, group)
    whole = rule.dims == 2  # all elements of a matrix are affected
    assert (moved.isfinite() == torch.tensor([False, False, not whole]).view(weight.shape)).all()


@every_rule
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_optimizer_applies_the_rule(rule, fused, shape):
    """Moments start at zero, steps count from 1, and the gradient is divided by the loss scale first."""
    torch.manual_seed(2)
    shape = shape_for(rule, shape)
    parameter = torch.nn.Parameter(torch.randn(shape))
    expected, moments = parameter.detach().clone(), None
    options = options_of(rule)
    optimizer = convert(rule.torch_class([parameter], **options), get_recipe("fp32"), {})
    if not fused:
        optimizer.rule = replace(rule, fused=no_fused_update)
    group = optimizer.param_groups[0]
    for step in (1, 2, 3):
        parameter.grad = torch.randn(shape)
        moments = moments or {name: torch.zeros(rule.shape(name, shape)) for name in rule.moments(group)}
        expected, moments = rule.update(expected, parameter.grad / 4, moments, step, group)
        optimizer.grad_scale = torch.tensor(4.0)
        optimizer.step()
        assert_same(parameter.detach(), expected)
        for name, moment in moments.items():
            assert_same(optimizer.state[parameter][name], moment)
    assert optimizer.state[parameter]["step"] == 3


ROUNDINGS = ["nearest_even", "nearest_away", "toward_zero", "stochastic"]
WEIGHTS = ["fp16", "bf16"]


@pytest.mark.quick(*map("-".join, in_turn(["nearest_even-fp16", "stochastic-bf16"], [*RULES])))
@every_rule
@pytest.mark.parametrize(("rounding", "weights"), [*itertools.product(ROUNDINGS, WEIGHTS)])
def test_rounded_update_is_a_neighbour_of_the_float32_update(rule, weights, rounding):
    """The stored weight is one of the two neighbours of the float32 update, for every rounding."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[weights]
    shape = shape_for(rule, (500,))
    parameter = torch.nn.Parameter(torch.randn(shape).to(dtype))
    recipe = Recipe("made", "", "", weights=weights, update_rounding=rounding)
    optimizer = convert(rule.torch_class([parameter], **options_of(rule)), recipe, {}, generator=1)
    group = optimizer.param_groups[0]
    parameter.grad = torch.randn(shape).to(dtype)
    zeros = {name: torch.zeros(rule.shape(name, shape)) for name in rule.moments(group)}
    exact, _ = rule.update(parameter.detach().float(), parameter.grad.float(), zeros, 1, group)
    optimizer.step()
    found = parameter.detach().float()
    exponent = (torch.frexp(exact)[1] - 1).clamp(min=torch.frexp(torch.tensor(torch.finfo(dtype).tiny))[1] - 1)
    gap = 2.0 ** exponent.float() * torch.finfo(dtype).eps
    assert ((found - exact).abs() <= gap * (0.5 if "nearest" in rounding else 1)).all()
    if rounding == "toward_zero":
        assert (found.abs() <= exact.abs()).all()
