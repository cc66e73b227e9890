"""The matrix of docs/integrations.md says what training found: it renders matrix.json, which is held true here."""

import json

import pytest
from matrix import KEPT, QUICK, TABLE, columns, refusals, render

from tiny import EVERY


RECORDED = json.loads(KEPT.read_text())
REST = tuple(recipe for recipe in EVERY if recipe not in QUICK)


def test_the_page_shows_the_matrix_that_was_recorded():
    assert TABLE.read() == render(RECORDED), "run python tests/integrations/matrix.py --render --write"


def test_every_column_was_recorded():
    assert [*RECORDED] == columns(), "run python tests/integrations/matrix.py --write NAME"


def test_no_cell_is_wrong():
    assert not [column for column, refused in RECORDED.items() if any("wrong" in cell for cell in refused.values())]


@pytest.mark.quick("accelerate-quick")
@pytest.mark.parametrize(
    "recipes", [pytest.param(QUICK, id="quick"), pytest.param(REST, id="rest", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("column", columns())
def test_the_matrix_is_what_happens(column, recipes):
    recorded = RECORDED.get(column, {})
    assert refusals(column, recipes) == {recipe: recorded[recipe] for recipe in recipes if recipe in recorded}
