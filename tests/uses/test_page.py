"""docs/using.md says what the tests found: its table renders outcomes.json, which every test here holds true."""

import json

import pytest
from table import OUTCOMES, PAGE, WRONG, part, render, ways
from ways import EVERY, MUST


RECORDED = json.loads(OUTCOMES.read_text())


def test_the_page_shows_what_was_recorded():
    assert part(PAGE.read_text())[1] == render(RECORDED), "run python tests/uses/table.py --render --write"


def test_every_way_is_on_the_page_once():
    titles = [way.title for way in ways()]
    assert titles == [*RECORDED]
    assert len(set(titles)) == len(titles)
    assert all(way.how.endswith(".") for way in ways())


def wrong(names):
    found = {title: sorted(n for n in names if reasons.get(n) == WRONG) for title, reasons in RECORDED.items()}
    return {title: names for title, names in found.items() if names}


def test_nothing_that_must_work_is_wrong():
    assert not wrong(MUST)


@pytest.mark.slow
def test_nothing_on_the_page_is_wrong():
    assert not wrong(EVERY)
