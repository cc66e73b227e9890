"""benchmarks/fp4.py: judgements of known losses, run names, and cases."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from halfstep.recipe import from_data, get_recipe, to_data


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def fp4(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("fp4")


@pytest.fixture
def cases(fp4):
    return importlib.import_module("fp4_cases")


def case(losses, base=None, baseline="fp32"):
    runs = {
        str(seed): {"loss": loss, "diverged_at": 7 if loss is None else None, "seconds": 60, "curve": [[0, 5.5]]}
        for seed, loss in enumerate(losses)
    }
    return {"base": base, "baseline": baseline, "runs": runs}


KNOWN = {
    "fp32": case([2.0, 2.02, 1.98]),
    "good": case([2.002, 2.021, 1.982]),
    "bad": case([2.1, 2.13, 2.08]),
    "few": case([2.2, 2.22]),
    "lost": case([2.0, None, 2.0]),
    "none": case([]),
    "bad without a part": case([2.2, 2.235, 2.19], base="bad"),
    "bad with another": case([2.1, 2.14, 2.07], base="bad"),
    "bad without what harms": case([2.01, 2.04, 1.99], base="bad"),
    "bad without all": case([None], base="bad"),
}


def test_cases_are_judged_as_by_compare(fp4):
    found = fp4.judged(KNOWN)
    status = {name: row["status"] for name, row in found.items() if KNOWN[name]["base"] is None}
    assert status == {
        "fp32": "matches",
        "good": "matches",
        "bad": "degrades",
        "few": "cannot tell",
        "lost": "diverged",
        "none": "not measured yet",
    }
    assert found["bad"]["to_fp32"]["gap"] == pytest.approx(0.31 / 6.0)


def test_parts_are_better_or_worse_by_their_whole_interval(fp4):
    words = {name: row["to_base"]["status"] for name, row in fp4.judged(KNOWN).items() if "to_base" in row}
    assert words == {
        "bad without a part": "worse",
        "bad with another": "cannot tell",
        "bad without what harms": "better",
        "bad without all": "worse",
    }


@pytest.mark.slow
def test_page_and_figures_show_the_verdicts(fp4, tmp_path):
    model = {"layers": 4, "width": 192, "heads": 6, "parameters": 1_869_504}
    settings = fp4.experiment(fp4.CASES["fp32"]).to_dict() | {"model": model}
    machine = {"cpu": "one", "torch": "2"}
    costs = {"model": "llama", "tokens": 4096, "share": {"good": 0.5}}
    data = {"machine": machine, "experiment": settings, "costs": costs, "cases": KNOWN, "verdicts": fp4.judged(KNOWN)}
    page = fp4.page(data)
    assert "| `bad` | 3 | 2.1033 | +5.17% (" in page
    assert "| `lost` | 3 |  |  | diverged at step 7 |" in page
    assert "- Not measured yet: `none`." in page
    assert "- Worse than `bad`: `bad without a part` (+" in page
    assert "`bad without all` (diverged)" in page
    assert "| `good` | 50.0% |" in page
    fp4.plot(data, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"fp4.png", "fp4_final.png"}


@pytest.mark.slow
def test_page_without_finished_runs_says_so(fp4, tmp_path, monkeypatch):
    monkeypatch.setattr(fp4, "costs", dict)  # accounts have tests of their own
    monkeypatch.setattr(fp4, "RESULTS", tmp_path)
    data = fp4.results(tmp_path / "nowhere")
    page = fp4.page(data)
    assert "No run has ended yet." in page
    assert "| `nvfp4-plain` |  |  |  | not measured yet |" in page
    fp4.plot(data, tmp_path)


@pytest.mark.slow
def test_saved_runs_count_until_their_case_changes(fp4, tmp_path, monkeypatch):
    monkeypatch.setattr(fp4, "costs", dict)
    monkeypatch.setattr(fp4, "RESULTS", tmp_path)
    data, run = (
        fp4.results(tmp_path / "nowhere"),
        {"loss": 1.25, "diverged_at": None, "seconds": 9, "curve": [[1, 1.25]]},
    )
    for name in ("fp32", "nvfp4"):
        data["cases"][name]["runs"] = {"1": run}
    data["cases"]["nvfp4"]["identity"] = "another"
    (tmp_path / "fp4.json").write_text(json.dumps(data))
    cases = fp4.results(tmp_path / "nowhere")["cases"]
    assert cases["fp32"]["runs"] == {"1": run}
    assert cases["nvfp4"]["runs"] == {}


def test_run_identity_follows_what_affects_results(fp4):
    fp32, rounded = fp4.CASES["fp32"], fp4.CASES["nvfp4-plain"]
    recipe = rounded.make()
    name = fp4.identity(rounded, recipe)
    assert fp4.identity(rounded, replace(recipe, name="other", summary="Words.", notes=("More.",))) == name
    assert fp4.identity(rounded, replace(recipe, compute="fp32")) != name
    assert fp4.identity(rounded, replace(recipe, rules=recipe.rules[-1:])) != name
    assert fp4.identity(fp32, fp32.make()) != name
    assert fp4.identity(replace(rounded, constant=True), recipe) != name


def test_constant_rate_holds_after_warmup(fp4):
    cosine, constant = (fp4.experiment(replace(fp4.CASES["fp32"], constant=constant)) for constant in (False, True))
    assert constant.learning_rate(cosine.warmup // 2) == cosine.learning_rate(cosine.warmup // 2)
    assert constant.learning_rate(cosine.warmup) == constant.learning_rate(cosine.steps) == cosine.lr
    assert cosine.learning_rate(cosine.steps) < 1e-3 * cosine.lr


def test_cases_have_distinct_serializable_recipes(fp4):
    names = {}
    for case in fp4.CASES.values():
        recipe = case.make()
        assert from_data(to_data(recipe), get_recipe) == recipe, case.name
        assert case.base is None or fp4.CASES[case.base].baseline == case.baseline
        names.setdefault(fp4.identity(case, recipe), []).append(case.name)
    assert [alike for alike in names.values() if len(alike) > 1] == []


def test_removing_an_absent_part_raises(cases):
    with pytest.raises(ValueError, match=r"fp32 has these rules already; expected a part to take away"):
        cases.of_operands(get_recipe("fp32"), lambda operand: operand)


def test_unknown_case_names_the_nearest(fp4):
    with pytest.raises(SystemExit, match="nvfp4-plain"):
        fp4.cases_named("nvfp4-plane")
