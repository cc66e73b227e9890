"""The calls and functions of one training step are no more than docs/design.md states."""

import collections
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import halfstep


ROOT = str(Path(halfstep.__file__).parent)
PAGE = (Path(__file__).parents[1] / "docs" / "design.md").read_text()
STAGES = ["prepare", "forward", "backward", "step", "update"]


def through(function):
    """A call's result, and a count of the package's functions that it runs, including lambdas and comprehensions."""
    seen = collections.Counter()

    def look(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            seen[code.co_filename, code.co_qualname] += 1

    sys.setprofile(look)
    try:
        result = function()
    finally:
        sys.setprofile(None)
    return result, seen


def run(recipe):
    """The functions of each stage, for a model of two layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    (model, optimizer, scaler), prepared = through(lambda: halfstep.prepare(model, optimizer, recipe))
    output, forward = through(lambda: model(torch.randn(8, 32)))
    loss = scaler.scale(output.square().mean())
    _, backward = through(loss.backward)
    _, step = through(lambda: scaler.step(optimizer))
    _, update = through(scaler.update)
    return [prepared, forward, backward, step, update]


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8lm-o2"])
def test_functions_and_files_of_a_step_are_at_most_documented(recipe):
    run(recipe)  # imports and compilation happen once
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{recipe}` |"))
    stated = [tuple(map(int, re.findall(r"\d+", cell))) for cell in row.split("|")[2:-1]]
    found = []
    for seen in run(recipe):
        named = {place for place in seen if not place[1].split(".")[-1].startswith("<")}
        found.append((len(named), len({file for file, _ in named})))
    assert len(stated) == len(STAGES)
    for stage, (functions, files), (most, most_files) in zip(STAGES, found, stated, strict=True):
        assert functions <= most, (stage, functions)
        assert files <= most_files, (stage, files)
        assert functions > most - 8, f"{stage}: {functions} functions; let the page say so"


@pytest.mark.parametrize("recipe", ["fp8-delayed", "coat"])
def test_calls_of_a_step_are_at_most_documented(recipe):
    """For the first step, which makes decisions that later steps reuse, and for a later one."""
    run(recipe), later_step(recipe)  # imports and compilation happen once
    first = [sum(seen.values()) for seen in run(recipe)]
    later = [sum(seen.values()) for seen in later_step(recipe)]
    for which, found in (("first", first), ("later", later)):
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{recipe}`, {which} |"))
        stated = [int(cell) for cell in row.split("|")[2:-1] if cell.strip() != "-"]
        for calls, most in zip(found, stated, strict=True):
            assert calls <= most, (which, found)
            if sys.version_info < (3, 12):  # newer versions inline comprehensions
                assert calls > most - 8, f"{which}: {found}; let the page say so"


def later_step(recipe):
    """The calls of each stage of the second step."""
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
    model, optimizer, scaler = halfstep.prepare(model, torch.optim.AdamW(model.parameters()), recipe)
    for _ in range(2):
        output, forward = through(lambda: model(torch.randn(8, 32)))
        loss = scaler.scale(output.square().mean())
        _, backward = through(loss.backward)
        _, step = through(lambda: scaler.step(optimizer))
        _, update = through(scaler.update)
        optimizer.zero_grad()
    return forward, backward, step, update
