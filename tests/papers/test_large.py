"""examples/papers/large.py: byte counts, rounded values, and the documented figures."""

import importlib
import json
import math
import re
import runpy
import statistics
import sys
from pathlib import Path

import pytest
import torch

from halfstep.lab.models.gpt import GPT


ROOT = Path(__file__).parents[2]
PAPERS = ROOT / "examples" / "papers"


@pytest.fixture
def large(monkeypatch):
    monkeypatch.syspath_prepend(PAPERS)
    return importlib.import_module("large")


def parts(model):
    matrices = {name: p for name, p in model.named_parameters() if p.dim() == 2}
    return matrices, sum(p.numel() for p in model.parameters() if p.dim() != 2)


@pytest.mark.slow
def test_bytes_count_codes_scales_and_unquantized_parameters(large):
    torch.manual_seed(0)
    model = GPT(256, 64, 1, 16, 4)
    matrices, vectors = parts(model)
    numbers = sum(p.numel() for p in matrices.values())
    for method, bits, tile in (("int8", 8, 64), ("int3", 3, 64), ("mxfp4", 4, 32)):
        scale = 1 if method == "mxfp4" else 4
        scales = sum(p.shape[0] * math.ceil(p.shape[1] / tile) for p in matrices.values())
        assert large.smaller(model, method)[1] == numbers * bits / 8 + scales * scale + 2 * vectors
    assert large.smaller(model, "bf16")[1] == 2 * (numbers + vectors)
    pruned = large.smaller(model, "pruned 75%")
    left = sum(int((p != 0).sum()) for p in parts(pruned[0])[0].values())
    assert abs(left / numbers - 0.25) < 0.001
    assert pruned[1] == pytest.approx(2 * (left + vectors) + numbers / 8, abs=2)


def test_int4_values_are_multiples_of_the_block_step(large):
    torch.manual_seed(0)
    model = GPT(256, 64, 1, 64, 4)
    rounded = large.smaller(model, "int4")[0]
    weight = model.blocks[0].mlp[2].weight.detach().view(64, 4, 64)
    step = weight.abs().amax(2, keepdim=True) / 7
    expected = (weight / step).round() * step
    torch.testing.assert_close(rounded.blocks[0].mlp[2].weight.detach(), expected.view(64, 256))


def test_costs_are_interpolated_at_a_common_loss(large):
    def runs(*points):
        return {
            (16, share): [{"bf16": loss, "int4": loss + cost}]
            for share, (loss, cost) in zip((1, 2), points, strict=True)
        }

    found = runs((3.0, 0.1), (2.0, 0.3))
    assert large.at_loss(found, 16, "int4", 0, 2.25) == pytest.approx(0.25)
    assert large.at_loss(found, 16, "int4", 0, 3.1) is None
    assert large.front({(1, "a"): (10, 3.0), (2, "a"): (20, 3.1), (2, "b"): (15, 2.0)}) == [(1, "a"), (2, "b")]


@pytest.mark.slow  # takes seconds
def test_large_study_resumes(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(PAPERS)
    printed = []
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["large.py", "--quick", "--seeds", "2", "--out", str(tmp_path / "large.json")])
        runpy.run_path(str(PAPERS / "large.py"), run_name="__main__")
        printed.append(capsys.readouterr().out)
    assert printed[0].endswith(printed[1]), "finished runs are kept"
    kept = json.loads((tmp_path / "large.json").read_text())
    assert len(kept["runs"]) == 1 + 2 * 2 * 2


def test_documentation_shows_the_large_results():
    runs = json.loads((ROOT / "benchmarks" / "results" / "large.json").read_text())["runs"]
    page = (ROOT / "docs" / "papers.md").read_text()
    for width in (16, 32, 64, 128):
        found = [run for name, run in runs.items() if name.startswith(f"width {width}, 1 of")]
        assert len(found) >= 3
        shown = re.search(rf"^\| {width} \| \d+ \| .*\| ([\d.]+) \([\d.]+ to [\d.]+\) \|$", page, re.MULTILINE)
        assert shown[1] == f"{statistics.fmean(run['bf16'] for run in found):.3f}"
