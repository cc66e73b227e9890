"""The ledger as it stands: rows keep the rules, short rows have checks, and the page is current."""

import re
from pathlib import Path

import pytest
from claim_rules import ledger_problems

from families import for_each
from halfstep.claims import get_claim, load
from halfstep.claims.checks.base import checks, get_check
from halfstep.claims.claim import data, describe, markdown
from halfstep.errors import ClaimError


ROOT = Path(__file__).parents[2]
every_claim = for_each("claim", load(), ids=lambda claim: claim.id)


def test_every_row_keeps_the_rules():
    assert list(ledger_problems(data())) == []


@every_claim
def test_short_rows_have_callable_checks(claim):
    if claim.short:
        assert callable(get_check(claim.check).measure)


def test_every_check_has_a_row():
    assert sorted(checks()) == sorted(claim.check for claim in load() if claim.check)


@every_claim
def test_described_claim_holds_figure_and_command(claim):
    words = " ".join(describe(claim).split())
    assert words.startswith(f"{claim.id}: {claim.verdict} claim {claim.claim}")
    assert claim.figure in words
    assert claim.command in words


def test_the_page_is_current():
    assert (ROOT / "docs" / "claims.md").read_text(encoding="utf-8") == markdown(load()), "run `make docs`"


def test_kept_files_exist_in_benchmark_results():
    files = {file for claim in load() for file in claim.files}
    assert len(files) > 1
    assert sorted(file for file in files if not (ROOT / "benchmarks" / "results" / file).is_file()) == []


def test_page_has_every_claim_under_its_subject():
    page = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    subjects = list(dict.fromkeys(claim.subject for claim in load()))
    assert subjects == list(data()["subject"].values())
    assert re.findall("^## (.*)$", page, re.M) == subjects
    for claim, after in zip(load(), [*load()[1:], None], strict=True):
        assert page.index(f"## {claim.subject}\n") < page.index(f"### {claim.id}\n")
        if after is not None:
            assert page.index(f"### {claim.id}\n") < page.index(f"### {after.id}\n")


def test_unknown_id_suggests_the_nearest():
    with pytest.raises(ClaimError, match="unknown claim 'forum-byte'; nearest: forum-bytes"):
        get_claim("forum-byte")
    with pytest.raises(ClaimError, match="unknown check 'forum-byte'; nearest: forum-bytes"):
        get_check("forum-byte")
