"""How many calls one step of training makes, and of how many functions: no more than docs/design.md says."""

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
    """The functions of the package that a call goes through, with their files, and how often; lambdas and
    comprehensions too."""
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
    """The functions of each stage, of a model of two layers."""
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
def test_the_walk_is_no_longer_than_the_page_says(recipe):
    run(recipe)  # names are found and kernels compiled once
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
def test_a_step_makes_no_more_calls_than_the_page_says(recipe):
    """Of the first step, which decides what later ones find decided, and of a later one."""
    run(recipe), later_step(recipe)  # names are found and kernels compiled once
    first = [sum(seen.values()) for seen in run(recipe)]
    later = [sum(seen.values()) for seen in later_step(recipe)]
    for which, found in (("first", first), ("later", later)):
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{recipe}`, {which} |"))
        stated = [int(cell) for cell in row.split("|")[2:-1] if cell.strip() != "-"]
        for calls, most in zip(found, stated, strict=True):
            assert calls <= most, (which, found)
            if sys.version_info < (3, 12):  # newer ones inline comprehensions
                assert calls > most - 8, f"{which}: {found}; let the page say so"


def later_step(recipe):
    """The calls of the stages of the second step."""
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
