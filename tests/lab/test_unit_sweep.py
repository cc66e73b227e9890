"""benchmarks/unit_sweep.py: its results for known losses, and its control recipe."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import halfstep
from halfstep import formats
from halfstep.ops import round_to
from halfstep.recipe import from_data, get_recipe, to_data


@pytest.fixture
def sweep(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("unit_sweep")


def losses(sweep, recipe, table):
    """Runs of a recipe; `table` gives the losses of seeds 0, 1, ... by learning rate."""
    return [
        sweep.Run("gpt", "adamw", recipe, rate, seed, loss)
        for rate, found in table.items()
        for seed, loss in enumerate(found)
    ]


def test_best_rate_has_the_lowest_mean_without_divergence(sweep):
    found = sweep.best(losses(sweep, "fp32", {0.1: [3.0, 3.2], 0.2: [2.0, 2.2], 0.4: [1.0, None], 0.8: [0.5]}))
    assert (found.lr, found.mean, found.at_edge, found.runs, found.diverged) == (0.2, 2.1, False, 7, 1)
    assert sweep.best(losses(sweep, "fp32", {0.1: [3.0], 0.2: [2.0]})).at_edge
    assert sweep.best(losses(sweep, "fp32", {0.1: [None], 0.2: [None]})) is None


def test_verdict_needs_three_seeds(sweep):
    fp32 = {seed: 2.0 + 0.01 * seed for seed in range(3)}
    three = losses(sweep, "fp32", {0.1: list(fp32.values())})
    worse = losses(sweep, "bad", {0.1: [2.5, 2.51, 2.53], 0.2: [2.3, 2.31, 2.32]})
    lost = losses(sweep, "lost", {0.1: [None] * 3})
    table = sweep.table([*worse, *three, *lost, *losses(sweep, "two", {0.1: [2.0, 2.01]})])
    lines = {line.split("|")[3].strip(): [cell.strip() for cell in line.split("|")] for line in table.splitlines()}
    assert lines["`fp32`"][4:8] == ["0.1, at the edge", "2.0100", "the baseline", "3"]
    assert lines["`bad`"][4:8] == ["0.2, at the edge", "2.3100", "degrades (+14.93%)", "6"]
    assert lines["`two`"][6] == "no verdict: fewer than three seeds"
    assert lines["`lost`"][4:8] == ["", "", "diverged at every rate", "3"]
    assert list(lines)[2] == "`fp32`"


def test_control_recipe_is_a_plain_cast(sweep):
    """Unlike `fp8-cscale`, which scales its loss, stores weights in fp16 and rounds to the fnuz formats."""
    plain = sweep.recipe_of("fp8-plain")
    assert plain.loss_scale is None
    assert get_recipe("fp8-cscale").loss_scale is not None
    assert from_data(to_data(plain), get_recipe) == plain
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 8)), torch.randn(4, 16) * 2.0**-7
    stock = nn.Linear(16, 8)
    stock.load_state_dict(model[0].state_dict())
    halfstep.apply(model, replace(plain, rules=plain.rules[-1:]))  # the only layer is not a head here
    e4m3 = formats.get("e4m3fn")
    expected = round_to(x, e4m3) @ round_to(stock.weight.detach(), e4m3).T + stock.bias.detach()
    torch.testing.assert_close(model(x).detach(), expected, rtol=2e-3, atol=1e-4)
    assert not torch.allclose(model(x).detach(), stock(x).detach(), rtol=2e-3, atol=1e-4)
    (2.0**-20 * model(x)).sum().backward()
    assert not model[0].weight.grad.any()  # 2^-20 is zero in E5M2 without a scale


def test_runs_are_trained_once_saved_and_plotted(sweep, tmp_path, monkeypatch):
    fields = {"batch": 2, "context": 16, "steps": 3, "warmup": 1, "validations": 1, "statistics": 1, "checkpoints": 1}
    (tmp_path / "text.txt").write_text("some text to learn from\n" * 200)
    make = lambda: nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))  # noqa: E731
    case = sweep.Case("lm", make, {"sgd": 0.5}, {**fields, "data": str(tmp_path / "text.txt")})
    monkeypatch.setattr(sweep, "CASES", {"small": case})
    monkeypatch.setattr(sweep, "KEPT", tmp_path / "kept.json")
    asked = ("small", "sgd", ["fp32", "fp16-mixed-unscaled"], [0, 1], 2, tmp_path / "out")
    found = list(sweep.runs(*asked))
    assert {run.key[2:] for run in found} == {
        (recipe, rate, seed) for recipe in ("fp32", "fp16-mixed-unscaled") for rate in (0.5, 1.0) for seed in (0, 1)
    }
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("metrics.jsonl")}
    assert list(sweep.runs(*asked)) == found
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("metrics.jsonl")} == stamps
    sweep.keep(found[:3])
    sweep.keep(found[2:])
    assert sorted(sweep.kept()) == sorted(found)
    assert [run.loss for run in sorted(sweep.kept())] == [run.loss for run in sorted(found)]
    assert json.loads((tmp_path / "kept.json").read_text())["cases"]["small"]["steps"] == 3
    diverged = replace(found[0], lr=4.0, loss=None)
    drawn = sweep.picture("small", {"sgd": sweep.grouped([*found, diverged])["small", "sgd"]})
    (axes,) = drawn.axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["fp32", "fp16-mixed-unscaled"]
    assert [4.0] in [
        line.get_xdata() if isinstance(line.get_xdata(), list) else list(line.get_xdata()) for line in axes.lines
    ]
