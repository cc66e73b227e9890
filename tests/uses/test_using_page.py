"""docs/using.md says what the tests found: its table renders outcomes.json, which every test here holds true."""

import json

from table import OUTCOMES, TABLE, render, ways
from ways import WRONG


RECORDED = json.loads(OUTCOMES.read_text())


def test_the_page_shows_what_was_recorded():
    assert TABLE.read() == render(RECORDED), "run python tests/uses/table.py --render --write"


def test_every_way_is_on_the_page_once():
    titles = [way.title for way in ways()]
    assert titles == [*RECORDED]
    assert len(set(titles)) == len(titles)
    assert all(way.how.endswith(".") for way in ways())


def test_nothing_is_wrong():
    wrong = {title: name for title, reasons in RECORDED.items() for name in reasons if WRONG in reasons[name]}
    assert not wrong
