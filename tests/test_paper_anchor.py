"""examples/papers/anchor.py, the study of rotary positions and anchors: its arithmetic, and a quick run."""

import json
import math
import runpy
import statistics
import sys
from pathlib import Path

import pytest
import torch


ROOT = Path(__file__).parents[1]
PAPERS = ROOT / "examples" / "papers"


@pytest.fixture(scope="module")
def anchor():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PAPERS)
        return runpy.run_path(str(PAPERS / "reader.py")) | runpy.run_path(str(PAPERS / "anchor.py"))


def shift_error(rotated, q, k, dtype, shift=16, rounds=None, tables=None):
    """The root-mean-square change of causal logits under a shift, with q and k rotated in `dtype` and rounded to
    `rounds`."""
    length = q.shape[-2]

    def logits(start):
        positions = torch.arange(start, start + length)
        turned = (rotated(t.to(dtype), positions) if tables is None else tables(t, positions) for t in (q, k))
        one, two = (t.to(rounds or dtype).double() for t in turned)
        return (one @ two.mT)[torch.ones(length, length).tril() > 0]

    return float((logits(0) - logits(shift)).square().mean().sqrt())


@pytest.mark.slow  # importing the plotting code takes seconds
def test_errors_of_rounded_rotations_equal_the_papers(anchor):
    torch.manual_seed(0)
    q, k = torch.randn(2, 512, 128).double()
    rotated = anchor["rotated"]

    def tables16(t, positions):
        wide = rotated(torch.ones(512, 128).double(), positions)  # cos - sin, sin + cos
        cos, sin = ((wide[:, 64:] + wide[:, :64]) / 2).bfloat16(), ((wide[:, 64:] - wide[:, :64]) / 2).bfloat16()
        one, two = t.bfloat16().chunk(2, -1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)

    assert shift_error(rotated, q, k, torch.float64) < 1e-10
    assert 1e-7 < shift_error(rotated, q, k, torch.float32) < 1e-5
    bf16 = shift_error(rotated, q, k, torch.float32, rounds=torch.bfloat16)
    assert bf16 == pytest.approx(3.7e-2, rel=0.05)
    assert shift_error(rotated, q, k, torch.float32, tables=tables16) == pytest.approx(5.8e-2, rel=0.1)
    assert bf16 / shift_error(rotated, q, k, torch.float32, rounds=torch.float16) == pytest.approx(8.0, rel=0.1)
    far = shift_error(rotated, q, k, torch.float32, 4000, torch.bfloat16)
    assert far == pytest.approx(bf16, rel=0.1)  # rounding errors, which do not grow with the shift


@pytest.mark.slow
def test_attention_sink_has_a_large_share_of_the_change(anchor):
    torch.manual_seed(0)
    q, k = torch.randn(2, 512, 128).double()
    q += 1.0
    shares = []
    for sink in (False, True):
        if sink:
            k[0] = 3 * q.mean(0)

        def weights(start, k=k):
            positions = torch.arange(start, start + 512)
            one, two = (anchor["rotated"](t, positions).bfloat16().double() for t in (q, k))
            logits = (one @ two.mT) / math.sqrt(128)
            return logits.masked_fill(torch.ones(512, 512).triu(1) > 0, -math.inf).softmax(-1)

        change = (weights(0) - weights(16)).abs().sum(0) / torch.arange(512, 0, -1)
        shares.append(float(change[0] / change.sum()))
    assert shares[1] > 5 * shares[0]
    assert shares[1] > 0.05  # for one of 512 columns


@pytest.mark.slow
def test_resets_and_anchors_are_equal_only_where_expected(anchor):
    torch.manual_seed(0)
    model = anchor["Reader"]()
    for seed in range(3):
        found = anchor["anchor_differences"](model, seed)
        assert max(found["mask"], found["documents by themselves"]) < 1e-12
        assert found["no anchor"] > 0.01
    tokens, doc, *_ = anchor["windows"](2, 128, 0, 4, shared=False)
    with torch.no_grad():
        ways = {
            dtype: [model(tokens, *anchor["layout"](doc, way), dtype) for way in ("documents", "reset")]
            for dtype in (torch.float64, torch.bfloat16)
        }
    assert (ways[torch.float64][0] - ways[torch.float64][1]).abs().max() < 1e-11
    assert (ways[torch.bfloat16][0] - ways[torch.bfloat16][1]).abs().max() > 1e-5


@pytest.mark.slow
def test_answers_equal_a_loop_over_the_document(anchor):
    for shared in (True, False):
        tokens, doc, answers, far = anchor["windows"](3, 60, 5, 4, shared)
        for row in range(3):
            seen = {}
            for at, (key, value) in enumerate(tokens[row].tolist()):
                place = (int(doc[row, at]), key)
                was = seen.get(place)
                assert int(answers[row, at]) == (anchor["VALUES"] if was is None else was[1])
                assert int(far[row, at]) == (0 if was is None else at - was[0])
                seen[place] = (at, value)


@pytest.mark.slow
def test_study_resumes_and_its_page_shows_the_saved_figures(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(PAPERS)
    printed = []
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["anchor.py", "--quick", "--seeds", "2", "--out", str(tmp_path / "a.json")])
        runpy.run_path(str(PAPERS / "anchor.py"), run_name="__main__")
        printed.append(capsys.readouterr().out)
    assert printed[0].endswith(printed[1]), "finished runs are kept"
    assert (tmp_path / "a.png").stat().st_size > 10_000
    runs = json.loads((ROOT / "benchmarks" / "results" / "anchor.json").read_text())["runs"]
    page = (ROOT / "docs" / "papers.md").read_text().splitlines()
    for way in ("full", "documents", "reset", "anchor"):
        for recipe in ("fp32", "bf16-mixed"):
            far = [run["far"] for name, run in runs.items() if name.startswith(f"{way}, {recipe}, seed")]
            row = next(line for line in page if line.startswith(f"| {way} | {recipe} |"))
            assert len(far) == 4
            assert f" | {statistics.fmean(far):.3f} (" in row
    assert max(runs["anchor by FlexAttention, float64"][name] for name in ("mask", "documents by themselves")) < 1e-12
