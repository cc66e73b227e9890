"""Measuring claims again: the quick ones are confirmed here, and what would not be is noticed."""

import json
import math
from dataclasses import replace

import pytest

from halfstep.claims import Number, get_claim, load
from halfstep.claims.checks.__main__ import main
from halfstep.claims.run import Outcome, run
from halfstep.errors import ClaimError


QUICK = [claim for claim in load() if claim.short and claim.seconds < 2]


@pytest.mark.parametrize("claim", QUICK, ids=lambda claim: claim.id)
def test_a_quick_claim_is_confirmed(claim):
    assert [name for name, agrees in run(claim).agreements().items() if not agrees] == []


@pytest.mark.slow
@pytest.mark.parametrize("claim", [c for c in load() if c.short and c not in QUICK], ids=lambda claim: claim.id)
def test_a_short_claim_is_confirmed(claim):
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
def test_numbers_are_compared_both_ways(measured, expected):
    claim = replace(get_claim("forum-bytes"), numbers={"a": Number(1.0), "b": Number(2.0, 0.1)})
    outcome = Outcome(claim, measured)
    assert outcome.agreements() == expected
    assert outcome.agrees == all(expected.values())


def test_a_long_claim_has_no_check():
    with pytest.raises(ClaimError, match="claim 'forum-loss' has no check to run: its command is 'halfstep compare"):
        run(get_claim("forum-loss"))


def test_the_command_of_a_check_prints_its_numbers(capsys):
    assert main(["autocast-cpu"]) == 0
    assert json.loads(capsys.readouterr().out) == {"operations": 24, "float32": 5, "named": 5}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["autocast"], "unknown check 'autocast'; nearest: autocast-cpu"), ([], "usage: "), (["a", "b"], "usage: ")],
)
def test_the_command_of_a_check_refuses(capsys, arguments, words):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
