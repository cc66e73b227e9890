"""The matrix of docs/integrations.md renders matrix.json, whose outcomes are checked by training."""

import json

import pytest
from matrix import KEPT, QUICK, TABLE, columns, refusals, render

from tiny import EVERY


RECORDED = json.loads(KEPT.read_text())
REST = tuple(recipe for recipe in EVERY if recipe not in QUICK)


def test_documentation_shows_the_recorded_matrix():
    assert TABLE.read() == render(RECORDED), "run python tests/integrations/matrix.py --render --write"


def test_every_column_is_recorded():
    assert [*RECORDED] == columns(), "run python tests/integrations/matrix.py --write NAME"


def test_no_cell_is_wrong():
    assert not [column for column, refused in RECORDED.items() if any("wrong" in cell for cell in refused.values())]


@pytest.mark.quick("accelerate-quick")
@pytest.mark.parametrize(
    "recipes", [pytest.param(QUICK, id="quick"), pytest.param(REST, id="rest", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("column", columns())
def test_recorded_refusals_equal_the_outcomes(column, recipes):
    recorded = RECORDED.get(column, {})
    assert refusals(column, recipes) == {recipe: recorded[recipe] for recipe in recipes if recipe in recorded}
