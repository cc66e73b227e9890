"""`float32_modules`: modules that a recipe keeps in float32 by class or path: weights, matmuls and outputs."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep import get_recipe
from tiny import Gated, assert_same, batch, mlp, prepared, train


pytestmark = pytest.mark.usefixtures("products")


def recipe_keeping(name, *patterns):
    return replace(get_recipe(name), name="kept", aliases=(), float32_modules=patterns)


@pytest.mark.parametrize("name", ["fp16-mixed", "fp16-master", "bf16-nomaster", "fp8-current", "mxfp8"])
@pytest.mark.parametrize("pattern", ["3", "Linear"])
def test_a_kept_layer_equals_the_float32_layer(name, pattern):
    model, x = mlp(), torch.randn(5, 16)
    stock = copy.deepcopy(model[3])
    report = halfstep.apply(model, recipe_keeping(name, pattern))
    assert report.kept["3"] == "computes in float32"
    assert model[3].weight.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model[3](x.bfloat16())
    assert_same(found, stock(x.bfloat16().float()))
    assert ("0" in report.quantized) == (pattern == "3" and bool(get_recipe(name).rules))


def test_a_kept_container_keeps_its_submodules():
    model = nn.Sequential(nn.Linear(16, 16), Gated(), nn.Linear(16, 4))
    stock, x = copy.deepcopy(model[1]), torch.randn(3, 16)
    halfstep.apply(model, recipe_keeping("fp8-amax", "1"))
    assert {p.dtype for p in model[1].parameters()} == {torch.float32}
    assert {p.dtype for p in model[0].parameters()} == {torch.float16}
    with torch.autocast("cpu", dtype=torch.float16):
        found = model[1](x)
    assert_same(found, stock(x))


def test_a_kept_convolution_computes_in_float32():
    model, x = nn.Sequential(nn.Conv1d(2, 3, 2)), torch.randn(1, 2, 5)
    expected = F.conv1d(x, model[0].weight, model[0].bias)
    halfstep.apply(model, recipe_keeping("fp16-master", "0"))
    assert_same(model(x), expected)


def test_a_weight_shared_with_a_kept_module_stays_float32():
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    report = halfstep.apply(model, recipe_keeping("fp16-master", "head"))
    assert model["embed"].weight.dtype == torch.float32
    assert report.kept["embed.weight"] == "its module computes in float32"


def test_a_kept_weight_trains_without_a_master():
    model, optimizer, scaler = prepared(recipe_keeping("fp16-master", "3"), mlp())
    losses = train(model, optimizer, scaler, steps=8, data=batch())
    assert losses[-1] < losses[0]
    assert "master" in optimizer.state[model[0].weight]
    assert "master" not in optimizer.state[model[3].weight]
    halfstep.revert(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert type(model[3]) is nn.Linear
