"""The plan matches what runs: which layers round, and the stored bytes; an altered plan changes what runs."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import golden
import halfstep
from halfstep.nn.apply import decide
from halfstep.recipe import LinearSpec, get_recipe
from tiny import EVERY, FAST, SMOOTH, adamw, fast_and_every, prepared


MODELS = golden.models()
FEW = [name for name in EVERY if any(q.format.bits <= 8 for r in get_recipe(name).rules for q in r.linear.quantizers)]
LOST = 0.003  # relative to an output's norm: rounding to 8 bits loses more, to bf16 less


def model_of(kind):
    torch.manual_seed(0)
    return MODELS[kind][0]()


def rounding_errors(model, batch):
    """The rounding error of each linear layer's output, relative to its norm, by path."""
    found, handles = {}, []

    def look(path, dtype):
        def hook(module, inputs, output):
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                bias = None if module.bias is None else module.bias.double()
                weight = halfstep.ops.values_of(module.weight.detach()).to(dtype).double()
                exact = F.linear(inputs[0].to(dtype).double(), weight, bias)
                found[path] = float((output.double() - exact).norm() / exact.norm())

        return hook

    dtype = halfstep.plan_of(model).recipe.by_stage[0].autocast or torch.float32
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            handles.append(module.register_forward_hook(look(path, dtype)))
    model(batch)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("names", fast_and_every(FEW))
@pytest.mark.parametrize("kind", MODELS)
def test_exactly_the_planned_layers_round(kind, names):
    for name in names:
        if kind == "gpt" and name in SMOOTH:
            continue
        model, batch = model_of(kind), MODELS[kind][1]
        planned = halfstep.plan(model, name)
        halfstep.apply(model, name)
        for path, share in rounding_errors(model, batch).items():
            layer = planned.layers.get(path)
            rounds = layer is not None and any((layer.spec.output.lhs, layer.spec.output.rhs))
            assert (share > LOST) == rounds, (name, path, share)


@pytest.mark.parametrize("names", fast_and_every(FEW, FAST | {"coat"}))
def test_layer_removed_from_the_plan_does_not_round(names):
    for name in names:
        model, batch = model_of("mlp"), MODELS["mlp"][1]
        found = decide(model, name)
        stages = tuple(replace(each, specs={**each.specs, "first": LinearSpec()}) for each in found.stages)
        replace(found, stages=stages).carry_out(model)
        assert rounding_errors(model, batch)["first"] < LOST, name


@pytest.mark.parametrize(
    "names", fast_and_every(EVERY, {"fp32", "bf16-master", "coat", "adamw-8bit", "fp8lm-o2", "bf16-kahan"})
)
def test_stored_bytes_per_parameter_equal_the_plan(names):
    """For matrices of 16,384 elements: scales and step counts add less than 2%."""
    for name in names:
        model = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False))
        if name in SMOOTH or get_recipe(name).projection:
            continue
        model, optimizer, scaler = prepared(name, model, adamw(model))
        scaler.scale(model(torch.randn(8, 128)).square().mean()).backward()
        scaler.step(optimizer)
        rows = halfstep.audit(model, optimizer, scaler).rows
        planned = halfstep.plan_of(model).bytes
        held = sum(row.nbytes for row in rows if row.kind not in ("scales", "buffers")) / (2 * 128 * 128)
        assert held == pytest.approx(planned.total, rel=0.02), (name, held, planned)
