"""The tab of the memory: the bytes that stay from step to step, of every architecture that has a name, by every recipe.

An account of a large model takes minutes, so they are kept in memory.json, which `python docs/memory_tables.py` writes.
Blocks of a model are alike, and every byte here is some parameter's or buffer's: two models of few blocks say what one
more takes. Recipes that count blocks from an end are measured on the whole model.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from typing import Any

from halfstep.accounting import account, architectures, named
from halfstep.errors import AccountError, HalfstepError
from halfstep.recipe import get_recipe, list_recipes
from halfstep.text import printable


ROLES = "weights", "buffers", "gradients", "master", "states", "scales", "state_scales"
COLUMNS = "parameters", "trained", *ROLES
"""What a row of the table holds: two counts, then the bytes of each role on a device that holds everything."""
RECIPE = "{recipe}"
"""What the page's script puts the recipe's name for, so that recipes which say the same share a row."""
_DEPTHS = "num_hidden_layers", "n_layer"
_FEW = 1, 2


def measure(model: str, recipe: str) -> list[int] | str:
    """A row: the numbers of `COLUMNS`, or why there are none."""
    config = architectures()[model]["config"]
    depth = next((key for key in _DEPTHS if key in config), None)
    try:
        if depth is None or any(rule.blocks for rule in get_recipe(recipe).rules):  # which count from an end
            return _row(model, recipe)
        few, more = (_row(model, recipe, **{depth: blocks}) for blocks in _FEW)
    except HalfstepError as error:
        return printable(str(error))
    return [two + (config[depth] - _FEW[1]) * (two - one) for one, two in zip(few, more, strict=True)]


def _row(model: str, recipe: str, **changes: int) -> list[int]:
    """What stays from step to step; nothing is run."""
    made = account(replace(named(model, **changes), batch=None), recipe)
    return [made.parameters, made.trained, *(getattr(made.bytes, role) for role in ROLES)]


def kept() -> dict[str, dict[str, Any]]:
    """memory.json: for each architecture each recipe's row, or why there is none."""
    return json.loads(files("halfstep.site").joinpath("memory.json").read_text("utf-8"))  # type: ignore[no-any-return]


def as_text(table: Mapping[str, Mapping[str, Any]]) -> str:
    """memory.json, a row a line."""
    models = (
        f' "{model}": {{\n' + ",\n".join(f'  "{recipe}": {json.dumps(row)}' for recipe, row in rows.items()) + "\n }"
        for model, rows in table.items()
    )
    return "{\n" + ",\n".join(models) + "\n}\n"


def table() -> dict[str, Any]:
    """What the page's script divides: each different row once, and its number for each architecture and recipe.

    Raises:
        AccountError: memory.json lacks a row.
    """
    rows: dict[str, int] = {}
    measured, names = kept(), list_recipes()
    models = {}
    for model, row in architectures().items():
        lacking = [name for name in names if name not in measured.get(model, {})]
        if lacking:
            raise AccountError(
                f"site/memory.json has no row of {model} for {', '.join(lacking[:3])}{' ...' * (len(lacking) > 3)}; "
                "`python docs/memory_tables.py` in the repository adds what it lacks"
            )
        said = [json.dumps(measured[model][name]).replace(f"'{name}'", RECIPE) for name in names]
        models[model] = {"source": row["source"], "rows": [rows.setdefault(each, len(rows)) for each in said]}
    recipes = [{"name": name, "summary": get_recipe(name).summary} for name in names]
    return {"columns": COLUMNS, "models": models, "recipes": recipes, "rows": [json.loads(row) for row in rows]}
