"""examples/papers/falcon2.py: its noisy quadratic against the exact excess, spikes, and the documented figures."""

import importlib
import json
import runpy
import statistics
import sys
from pathlib import Path

import pytest
import torch


ROOT = Path(__file__).parents[2]
PAPERS = ROOT / "examples" / "papers"


@pytest.fixture
def falcon2(monkeypatch):
    monkeypatch.syspath_prepend(PAPERS)
    return importlib.import_module("falcon2")


@pytest.mark.slow
def test_noisy_quadratic_has_the_expected_excess(falcon2):
    """x - rate (x + noise / sqrt(B)) has variance rate / (2 - rate) / B; Adam divides by the noise's magnitude."""

    def variance(rate, batch):
        return rate / (2 - rate) / batch

    found, before = falcon2.quadratic(torch.optim.SGD, lr=0.05), variance(0.05, 1)
    assert found["batch doubled"] == pytest.approx(variance(0.05, 2) / before, rel=0.02)
    assert found["rate / sqrt 2"] == pytest.approx(variance(0.05 / 2**0.5, 1) / before, rel=0.02)
    assert found["rate / 2"] == pytest.approx(variance(0.025, 1) / before, rel=0.03)
    adam = falcon2.quadratic(torch.optim.Adam, lr=0.01, betas=(0.9, 0.95))
    assert adam["batch doubled"] == pytest.approx(adam["rate / sqrt 2"], rel=0.05)
    assert adam["batch doubled"] == pytest.approx(2**-0.5, rel=0.05)


def test_spikes_are_relative_to_the_preceding_window(falcon2):
    calm = [0.0, 1.0] * 25
    assert falcon2.spikes([*calm, 1.9]) == {"count": 0, "largest": 1.4}
    assert falcon2.spikes([*calm, 5.0, 1.0]) == {"count": 1, "largest": 4.5}


@pytest.mark.slow
def test_amount_of_curated_text_does_not_depend_on_its_position(falcon2, monkeypatch):
    """The stages' contexts, and the texts that batches come from, step by step."""
    drawn = []
    texts = falcon2.corpora()

    def batch(corpus, rows, context, generator):
        drawn.append((corpus is texts["curated"], rows * context, context))
        return original(corpus, rows, context, generator)

    original = falcon2.batch
    monkeypatch.setattr(falcon2, "batch", batch)
    counts = {}
    for name in ("stages", "curated text spread", "no curated text"):
        drawn.clear()
        falcon2.staged(0, falcon2.PLANS[name], 8, 20, texts, 2)
        counts[name] = [n for n, (curated, _, _) in enumerate(drawn) if curated]
        assert {tokens for _, tokens, _ in drawn} == {falcon2.TOKENS}
        assert [context for _, _, context in drawn] == [32] * 14 + [64] * 2 + [128] * 4
    assert counts == {"stages": [18, 19], "curated text spread": [9, 19], "no curated text": []}


@pytest.mark.slow  # takes seconds
def test_falcon2_study_resumes(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(PAPERS)
    printed = []
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["falcon2.py", "--quick", "--seeds", "2", "--out", str(tmp_path / "f.json")])
        runpy.run_path(str(PAPERS / "falcon2.py"), run_name="__main__")
        printed.append(capsys.readouterr().out)
    assert printed[0].endswith(printed[1]), "finished runs are kept"


def test_documentation_shows_the_falcon2_results():
    runs = json.loads((ROOT / "benchmarks" / "results" / "falcon2.json").read_text())["runs"]
    page = (ROOT / "docs" / "papers.md").read_text()
    for plan in ("stages", "128 throughout", "curated text spread", "stages, mxfp4"):
        found = [run for name, run in runs.items() if name.startswith(f"{plan}, seed")]
        assert len(found) >= 3
        assert f"| {plan} | {statistics.fmean(run['general'][-1] for run in found):.3f} (" in page
