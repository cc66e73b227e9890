"""docs/using.md: its table is rendered from outcomes.json, which the tests of this folder check."""

import json

from table import OUTCOMES, TABLE, render, ways
from ways import WRONG


RECORDED = json.loads(OUTCOMES.read_text())


def test_the_table_of_using_md_is_current():
    assert TABLE.read() == render(RECORDED), "run python tests/uses/table.py --render --write"


def test_every_way_is_recorded_once():
    titles = [way.title for way in ways()]
    assert titles == [*RECORDED]
    assert len(set(titles)) == len(titles)
    assert all(way.how.endswith(".") for way in ways())


def test_no_outcome_is_wrong():
    wrong = {title: name for title, reasons in RECORDED.items() for name in reasons if WRONG in reasons[name]}
    assert not wrong
