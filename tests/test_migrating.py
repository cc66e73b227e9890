"""docs/migrating.md, the table for users of other libraries, names things that exist."""

import re
from pathlib import Path

import pytest

import halfstep
import halfstep.optim
import halfstep.recipe


PAGE = (Path(__file__).parents[1] / "docs" / "migrating.md").read_text()
ROWS = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| there")]
HERE = "\n".join(row[-1] for row in ROWS if row[0] != "| ---")
NAMES = sorted({*re.findall(r"\bhalfstep((?:\.\w+)+)", HERE)})
RECIPES = sorted({*re.findall(r'(?:recipe=|get_recipe\(|model, )"([^"]+)"', HERE), "nf4-double"})
FIELDS = [field for field in ("attention", "compute") if f"field `{field}`" in HERE]


def test_every_row_names_a_counterpart():
    assert len(ROWS) > 45
    assert all(len(row) == 2 and row[1].rstrip(" |") for row in ROWS), [row for row in ROWS if len(row) != 2]


@pytest.mark.parametrize("name", NAMES)
def test_names_exist(name):
    found = halfstep
    for part in name.strip(".").split("."):
        found = getattr(found, part)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_exist(name):
    halfstep.get_recipe(name)


def test_fields_and_quantizers_exist():
    assert len(FIELDS) == 2
    assert all(hasattr(halfstep.get_recipe("fp32"), field) for field in FIELDS)
    for name in re.findall(r'get_quantizer\("([^"]+)"\)', HERE):
        halfstep.get_quantizer(name)


@pytest.mark.parametrize(("level", "recipe"), re.findall(r'`recipe="(O\d)"`, which is `([^`]+)`', HERE))
def test_apex_levels_are_the_named_recipes(level, recipe):
    assert halfstep.get_recipe(level).name == recipe


def test_described_recipe_settings_are_right():
    scale = halfstep.recipe.LossScale(128.0, dynamic=False)
    assert (scale.init, scale.dynamic) == (128.0, False)
    megatron = halfstep.get_recipe("bf16-megatron")
    assert (megatron.weights, megatron.grad_format, megatron.master) == ("bf16", "fp32", "fp32")
    assert halfstep.get_recipe("fp16-master").loss_scale.init == 2.0**16
    assert halfstep.get_recipe("bf16-stochastic").update_rounding == "stochastic"
    assert len(NAMES) >= 10
    assert len(RECIPES) >= 25
