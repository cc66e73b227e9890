"""Measuring claims again: quick claims are confirmed, and planted differences are found."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from halfstep.claims import Number, get_claim, load
from halfstep.claims.checks.__main__ import main
from halfstep.claims.run import Outcome, run
from halfstep.errors import ClaimError


ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
KEPT = [claim for claim in load() if claim.files]
QUICK = [claim for claim in load() if claim.short and claim.seconds < 1]


@pytest.mark.parametrize("claim", QUICK, ids=lambda claim: claim.id)
def test_quick_claims_are_confirmed(claim):
    assert [name for name, agrees in run(claim).agreements().items() if not agrees] == []


@pytest.mark.slow
@pytest.mark.parametrize("claim", [c for c in load() if c.short and c not in QUICK], ids=lambda claim: claim.id)
def test_short_claims_are_confirmed(claim):
    assert [name for name, agrees in run(claim).agreements().items() if not agrees] == []


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ({"a": 1.0, "b": 2.05}, {"a": True, "b": True}),
        ({"a": 1.0, "b": 2.2}, {"a": True, "b": False}),
        ({"a": math.nan, "b": 2.0}, {"a": False, "b": True}),
        ({"b": 2.0}, {"a": False, "b": True}),
        ({"a": 1.0, "b": 2.0, "c": 3.0}, {"a": True, "b": True, "c": False}),
    ],
)
def test_missing_and_additional_numbers_disagree(measured, expected):
    claim = replace(get_claim("forum-bytes"), numbers={"a": Number(1.0), "b": Number(2.0, 0.1)})
    outcome = Outcome(claim, measured)
    assert outcome.agreements() == expected
    assert outcome.agrees == all(expected.values())


def test_claim_without_check_or_figures_raises():
    with pytest.raises(
        ClaimError, match=r"claim 'collage-speed' has no check to run and no saved .* figures.* \'not written yet\'"
    ):
        run(get_claim("collage-speed"))


@pytest.mark.quick(
    "micikevicius-mandarin",
    "micikevicius-speech",
    "fedus-speed",
    "fp8lm-moments",
    "fp8lm-master-training",
    "narayan-munit",
)
@pytest.mark.parametrize("claim", KEPT, ids=lambda claim: claim.id)
def test_claims_agree_with_benchmark_results(claim):
    """If this fails, a benchmark was run again: `halfstep claims --check` lists the figures with their new values."""
    assert {
        name: run(claim, RESULTS).measured[name]
        for name, right in run(claim, RESULTS).agreements().items()
        if not right
    } == {}


@pytest.mark.quick(
    "micikevicius-mandarin", "kalamkar-domains", "lee-fp8-robust", "blake-u-mup", "zhao-8bit", "malartic-stages"
)
@pytest.mark.parametrize("claim", KEPT, ids=lambda claim: claim.id)
def test_changed_benchmark_figure_is_found(claim, tmp_path):
    """Each figure in turn is changed in its file by more than its tolerance."""
    for name, number in claim.numbers.items():
        file = tmp_path / number.kept[0]
        for other in claim.files:
            shutil.copy(RESULTS / other, tmp_path / other)
        data = json.loads(file.read_text())
        *path, last = number.kept[1:]
        here = data
        for key in path:
            here = here[int(key)] if isinstance(here, list) else here[key]
        last = int(last) if isinstance(here, list) else last
        here[last] += 3 * number.tolerance + 1e-6
        file.write_text(json.dumps(data))
        wrong = [other for other, right in run(claim, tmp_path).agreements().items() if not right]
        assert name in wrong
        assert all(claim.numbers[other].kept == number.kept for other in wrong)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, r"toy.json cannot be read \(No such file or directory\); saved figures are compared in a clone"),
        ("{", "toy.json is not JSON"),
        ('{"runs": [{"gain": 1}]}', "under runs / 0: unknown key 'gap'; nearest: gain"),
        ('{"runs": 3}', "under runs: unknown key '0'"),
        ('{"runs": [{"gap": null}]}', "runs / 0 / gap: found None, expected a number"),
        ('{"runs": [{"gap": true}]}', "found True, expected a number"),
    ],
)
def test_missing_or_malformed_figure_raises(tmp_path, content, words):
    number = Number(1.0, kept=("toy.json", "runs", "0", "gap"))
    claim = replace(get_claim("forum-loss"), numbers={"gap": number})
    if content is not None:
        (tmp_path / "toy.json").write_text(content)
    with pytest.raises(ClaimError, match=words):
        run(claim, tmp_path)


def test_check_command_prints_its_numbers(capsys):
    assert main(["autocast-cpu"]) == 0
    assert json.loads(capsys.readouterr().out) == {"operations": 24, "float32": 5, "named": 5}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["autocast"], "unknown check 'autocast'; nearest: autocast-cpu"), ([], "usage: "), (["a", "b"], "usage: ")],
)
def test_check_command_rejects_bad_arguments(capsys, arguments, words):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
