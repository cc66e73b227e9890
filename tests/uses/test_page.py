"""docs/using.md says what the tests found: its table renders outcomes.json, which every test here holds true."""

import json

from table import OUTCOMES, PAGE, part, render, ways
from ways import EVERY, MUST, WRONG

from tiny import SCALED


RECORDED = json.loads(OUTCOMES.read_text())


def test_the_page_shows_what_was_recorded():
    assert part(PAGE.read_text())[1] == render(RECORDED), "run python tests/uses/table.py --render --write"


def test_every_way_is_on_the_page_once():
    titles = [way.title for way in ways()]
    assert titles == [*RECORDED]
    assert len(set(titles)) == len(titles)
    assert all(way.how.endswith(".") for way in ways())


def wrong(names):
    found = {title: sorted(n for n in names if WRONG in reasons.get(n, "")) for title, reasons in RECORDED.items()}
    return {title: names for title, names in found.items() if names}


def test_nothing_that_must_work_is_wrong():
    assert not wrong(MUST)


def test_what_is_wrong_as_yet_are_weights_that_are_codes():
    assert not wrong(set(EVERY) - set(SCALED))
