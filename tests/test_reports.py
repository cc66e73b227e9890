"""Every public report prints as at most 60 lines and converts to plain data."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import halfstep
from halfstep.recipe import list_recipes
from halfstep.text import shortened


LAYERS = 80


def checkpoint(folder, name, dtype):
    tensors = {f"layers.{i}.mlp.up_proj.weight": torch.randn(8, 16) for i in range(LAYERS)}
    save_file({key: value.to(dtype) for key, value in tensors.items()}, folder / name)
    return folder / name


def inspection(folder):
    return halfstep.inspect(checkpoint(folder, "a.safetensors", torch.bfloat16)), "bfloat16 -> 10,240"


def difference(folder):
    files = [checkpoint(folder, f"{dtype}.safetensors", dtype) for dtype in (torch.float32, torch.bfloat16)]
    return halfstep.diff(*files), "80 tensors"


def recipe(folder):
    return halfstep.get_recipe("nvfp4"), "bytes/param  weights 4 + grads 4"


def plan(folder):
    return halfstep.plan(nn.Sequential(*(nn.Linear(8 + i, 9 + i) for i in range(LAYERS))), "fp8-current"), "80 of 80"


def audit(folder):
    model = nn.Sequential(*(nn.Linear(8 + i, 9 + i) for i in range(LAYERS)))
    model, optimizer = halfstep.prepare(model, torch.optim.AdamW(model.parameters()), "nvfp4")[:2]
    return halfstep.audit(model, optimizer), "under nvfp4"


@pytest.mark.parametrize("make", [inspection, difference, recipe, plan, audit])
def test_report_has_at_most_60_lines_and_converts_to_data(make, tmp_path):
    report, said = make(tmp_path)
    text = str(report)
    assert len(text.split("\n")) <= 60
    assert said.split(" -> ")[0] in text
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))


@pytest.mark.parametrize("name", list_recipes())
def test_printed_recipe_equals_the_command_and_reads_back(name):
    made = halfstep.get_recipe(name)
    assert str(made) == shortened(made.describe().split("\n"))
    assert halfstep.recipe.from_data(made.to_dict(), halfstep.get_recipe) == made


def test_omitted_lines_are_counted():
    lines = [str(i) for i in range(100)]
    assert shortened(lines).split("\n") == [*lines[:58], "(41 more lines)", "99"]
    assert shortened(lines[:60]) == "\n".join(lines[:60])
