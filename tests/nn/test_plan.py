"""`halfstep.plan` of a model equals what `prepare` does and what runs afterwards."""

import copy
import json
import logging
import unittest
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep.nn.plan import grouped
from halfstep.ops.part import part_of
from tiny import ALL, UNIT, adamw, assert_same, batch, copied, mlp, model_for, mostly_slow, prepared


class Matmuls(TorchDispatchMode):
    """The dtypes of all matrix multiplications."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.dtypes.add(str(args[-1].dtype).removeprefix("torch."))
        return function(*args, **(kwargs or {}))


def planned_dtypes(plan):
    """The dtypes of the plan's matmuls."""
    ways = {layer.computed.removeprefix("emulated in ").split(" (")[0] for layer in plan.layers.values()}
    return {dtype for way in ways for dtype in way.split(" and ")}


def model_fitting(name):
    """A model of which the recipe rounds all layers."""
    if name not in UNIT:
        return model_for(name)
    model = mlp()
    halfstep.unit_scale(model, batch()[0])
    return model


@pytest.mark.parametrize("name", mostly_slow(ALL))
def test_the_plan_equals_what_runs_and_changes_nothing(name):
    model = model_fitting(name)
    optimizer = adamw(model)
    before, random = copied(model.state_dict()), torch.get_rng_state()
    classes = [type(module) for module in model.modules()]
    planned = halfstep.plan(model, name, optimizer)
    assert_same(model.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert [type(module) for module in model.modules()] == classes
    assert "_halfstep" not in vars(model)
    assert not optimizer.state

    model, optimizer, scaler = prepared(name, model, optimizer, total_steps=5)
    assert halfstep.plan_of(model) == planned
    assert planned.states == sum("_halfstep_scaling_" in name for name, _ in model.named_buffers())
    rounded = [path for path, module in model.named_modules() if part_of(module).linear]
    assert {*planned.layers} <= {*rounded}
    x, y = batch()
    model(x)  # gives delayed scalings their first scales
    with Matmuls() as seen:
        scaler.scale(F.mse_loss(model(x), y)).backward()
    matmuls = {text for layer in planned.layers.values() for text in layer.matmuls}
    plain = {planned.compute.rpartition(" ")[2]} if not matmuls or any(" - x -" in text for text in matmuls) else set()
    sums = any(rule.linear.accumulates for rule in halfstep.get_recipe(name).rules)
    own = {"int8", "float32"} if sums else {"int8"}  # computed by kernels, not by torch.mm
    assert planned_dtypes(planned) - own <= seen.dtypes
    assert not planned.layers or seen.dtypes <= planned_dtypes(planned) | plain


@pytest.mark.parametrize("name", ["bf16-master", "fp8-delayed", "fp8lm-o2", "coat"])
def test_stored_parameters_are_as_planned(name):
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    planned = halfstep.plan(model, name)
    halfstep.apply(model, name)
    found = {}
    for parameter in model.parameters():
        dtype = str(parameter.dtype).removeprefix("torch.")
        found[dtype] = found.get(dtype, 0) + parameter.numel()
    assert planned.stored == found


def test_plan_refuses_what_prepare_refuses():
    with pytest.raises(halfstep.HalfstepError, match="matched no layer whose matmuls"):
        halfstep.plan(nn.LayerNorm(4), "fp8-current")
    with pytest.raises(halfstep.HalfstepError, match="follows no recipe"):
        halfstep.plan_of(mlp())
    model = mlp()
    with pytest.raises(halfstep.HalfstepError, match="holds none of the model's parameters"):
        halfstep.plan(model, "fp8-current", adamw(mlp()))


def test_a_large_model_on_the_meta_device_fits_a_terminal():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj, self.out = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    with torch.device("meta"):
        model = nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(40)), "lm_head": nn.Linear(64, 99)})
    planned = halfstep.plan(model, "nvfp4")
    text = str(planned)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) <= 60
    assert "layers.0-33.{q,k}_proj (68)" not in text, "siblings are one group"
    assert "layers.0-33.{q_proj,k_proj,out} (102)" in text
    assert "layers.34-39.{q_proj,k_proj,out} (18)" in text
    assert json.loads(json.dumps(planned.to_dict()))["layers"].keys() == planned.layers.keys()


def test_prepare_logs_the_headline():
    with unittest.TestCase().assertLogs("halfstep", logging.INFO) as logged:
        model, _, _ = prepared("fp8-current")
    assert [record.getMessage() for record in logged.records] == [halfstep.plan_of(model).headline]


def test_plan_of_works_for_stages_and_copies():
    model, _, _ = prepared("fp8-delayed until 90%, then bf16-mixed", total_steps=10)
    planned = halfstep.plan_of(model)
    ((when, last),) = planned.later
    assert f"from {when}: {last.recipe.name}" in str(planned)
    assert (len(planned.layers), len(last.layers)) == (2, 0)
    assert halfstep.plan_of(copy.deepcopy(model)) == planned
    audit = halfstep.audit(model)
    assert audit.plan in str(audit)
    assert "not seen" in audit.plan


def expanded(pattern):
    """The paths that a pattern stands for."""
    parts = [[]]
    for part in pattern.replace("{", "\0{").replace("}", "}\0").split("\0"):
        if part.startswith("{"):
            parts[-1].append(part[1:-1].split(","))
        else:
            for number, piece in enumerate(part.split(".")):
                if number:
                    parts.append([])
                numeric = piece and all(end.isdecimal() for run in piece.split(",") for end in run.split("-"))
                ranges = [[int(end) for end in run.split("-")] for run in piece.split(",")] if numeric else []
                parts[-1].append([str(n) for run in ranges for n in range(run[0], run[-1] + 1)] if numeric else [piece])
    return {".".join(path) for path in product(*(["".join(each) for each in product(*part)] for part in parts))}


names = st.sampled_from(["q_proj", "k_proj", "layers", "mlp", "0", "1", "2", "7"])


@given(st.lists(st.lists(names, min_size=1, max_size=4).map(".".join), unique=True, max_size=12))
def test_grouped_patterns_expand_to_exactly_the_paths(paths):
    patterns = grouped(paths)
    found = [path for pattern in patterns for path in expanded(pattern)]
    assert sorted(found) == sorted(paths)
    assert {pattern: len(expanded(pattern)) for pattern in patterns} == patterns


def test_a_plan_for_tensor_cores_advises_cuda_graphs_for_small_layers(monkeypatch):
    def text(recipe):
        return " ".join(str(halfstep.plan(nn.Linear(64, 64), recipe)).split())

    advice = "replay whole steps, halfstep.GraphedStep"
    assert advice not in text("fp8-current")
    monkeypatch.setattr("halfstep.kernels.scaled_mm.capability", lambda device: (9, 0))
    assert "native" in text("fp8-current")
    assert advice in text("fp8-current")
    assert advice not in text("bf16-mixed")
