"""Every rule of the ledger finds its violation and says what to write instead."""

import pytest
from claim_rules import ledger_problems, problems


MACHINES, SUBJECTS = {"box": "a box"}, {"sums": "Sums"}
KEPT = ["sums.json", "one and one"]
ROW = {
    "id": "toy-claim",
    "subject": "sums",
    "claim": "One and one is two.",
    "reference": {"authors": "A. Author", "title": "Sums", "arxiv": "2001.00001", "where": "p. 1", "read": "text"},
    "conditions": "none",
    "command": "python -m halfstep.claims.checks toy-claim",
    "seconds": 1,
    "figure": "it is {sum:g}",
    "numbers": {"sum": {"value": 2, "tolerance": 0.1}},
    "machine": "box",
    "date": "2026-11-21",
    "verdict": "holds",
}  # fmt: skip
OPEN = {key: ROW[key] for key in ("id", "subject", "claim", "reference", "conditions")} | {"verdict": "open"}


def test_valid_rows_have_no_problems():
    assert list(problems(ROW, MACHINES, SUBJECTS)) == []
    assert list(problems(OPEN, MACHINES, SUBJECTS)) == []
    assert list(problems({**OPEN, "command": "halfstep compare", "seconds": 300}, MACHINES, SUBJECTS)) == []
    long = {"command": "python benchmarks/sums.py", "seconds": 300, "numbers": {"sum": {"value": 2, "kept": KEPT}}}
    assert list(problems({**ROW, **long}, MACHINES, SUBJECTS)) == []


THREE = dict.fromkeys(("sum", "sum_least", "sum_most"), ROW["numbers"]["sum"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"subject": "sum"}, "unknown subject 'sum'; nearest: sums"),
        ({"id": "Toy"}, "id 'Toy': expected lower-case words"),
        ({"claim": ""}, "claim is empty"),
        ({"claim": 3}, "claim: found 3"),
        ({"clam": "x"}, "unknown field 'clam'; nearest: claim"),
        ({"verdict": "hold"}, "unknown verdict 'hold'; nearest: holds"),
        ({"verdict": "open"}, "is open, and has date, figure, machine, numbers"),
        ({"note": "UNVERIFIED: from memory"}, "says 'unverified'"),
        ({"reference": {**ROW["reference"], "read": "all"}}, "unknown read 'all'"),
        ({"reference": {**ROW["reference"], "arxiv": "17.1"}}, "reference.arxiv: found '17.1'"),
        ({"reference": {"authors": "A. Author"}}, "reference.title is missing"),
        ({"command": "rm -rf x"}, "command 'rm -rf x': expected halfstep"),
        (
            {"command": "python -m halfstep.claims.checks other"},
            "expected halfstep ..., python benchmarks/NAME.py ... or examples/papers/NAME.py ..., or python -m",
        ),
        ({"command": "halfstep compare"}, "seconds = 1: a row under 60 seconds runs a check"),
        ({"command": "python benchmarks/../sums.py"}, "expected halfstep ..., python benchmarks/NAME.py"),
        ({"numbers": {}, "figure": "two"}, "records no numbers"),
        ({"command": "halfstep compare", "seconds": 300, "numbers": {}, "figure": "two"}, "records no numbers"),
        ({"command": "halfstep compare", "seconds": 300}, "numbers.sum is measured by no check; kept = [file"),
        ({"numbers": {"sum": {"value": 2, "kept": KEPT}}}, "numbers.sum.kept: the row's check measures"),
        ({"command": "halfstep a", "seconds": 300, "numbers": {"sum": {"value": 2, "kept": ["x"]}}}, "kept = [file"),
        ({"numbers": {**ROW["numbers"], "other": {"value": 1}}}, "number 'other' stands in only one"),
        ({"figure": "it is {sun:g}"}, "number 'sun' stands in only one"),
        (
            {"figure": "{sum:g} ({sum_least:g} to {sum_most:g})", "numbers": THREE},
            "least and a greatest number stand as (a to b)",
        ),
        ({"numbers": {"sum": {"tolerance": 1}}}, "numbers.sum.value is missing"),
        ({"numbers": {"sum": {"value": True}}}, "numbers.sum.value: found True"),
        ({"machine": "bx"}, "unknown machine 'bx'; nearest: box"),
        ({"date": "yesterday"}, "date 'yesterday': expected YYYY-MM-DD"),
    ],
)
def test_broken_rule_is_named(change, message):
    assert any(message in problem for problem in problems({**ROW, **change}, MACHINES, SUBJECTS))


@pytest.mark.parametrize("name", ["id", "subject", "claim", "reference", "conditions", "verdict", "command", "figure"])
def test_missing_field_is_named(name):
    row = {key: value for key, value in ROW.items() if key != name}
    assert any(f"{name} is missing" in problem for problem in problems(row, MACHINES, SUBJECTS))


def test_ids_are_unique():
    found = list(ledger_problems({"machine": MACHINES, "subject": SUBJECTS, "claim": [ROW, ROW]}))
    assert found == ["claim 'toy-claim': 2 rows have this id; give each its own"]


def test_subject_without_rows_is_a_problem():
    found = list(ledger_problems({"machine": MACHINES, "subject": {**SUBJECTS, "more": "More"}, "claim": [ROW]}))
    assert found == ["subject 'more' has no row; give it one, or take it out"]
