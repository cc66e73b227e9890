"""Recipes: the format of each part of training. `get_recipe` finds them by name; `Origin` names one in state dicts.

`Origin` also decides, for all state dicts alike, whether a state may be loaded under another recipe.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cache, cached_property
from os.path import exists
from typing import Any

from halfstep.errors import RecipeError, unknown
from halfstep.recipe.data import (
    chain,
    from_data,
    integer_weights,
    is_chain,
    is_partial,
    is_reference,
    read,
    read_chain,
    with_a_number,
)
from halfstep.recipe.operands import HEADS, KEEP, Rule, to_data
from halfstep.recipe.products import (
    AttentionSpec,
    LinearSpec,
    Matmul,
    Multiplier,
    linear_spec,
    linear_text,
    matmul_texts,
)
from halfstep.recipe.projection import PROJECTOR, Projection, Subspace
from halfstep.recipe.spec import (
    MASTER,
    BytesPerParameter,
    LossScale,
    Recipe,
    is_master,
)  # fmt: skip
from halfstep.recipe.stages import Stage, starts
from halfstep.recipe.storage import (
    COAT,
    DTYPES,
    FP4,
    FP8,
    FP8_LM,
    OPERANDS,
    Codes,
    Communication,
    Saved,
    Storage,
    get_storage,
)
from halfstep.registry import family


__all__ = [
    "COAT",
    "FP4",
    "FP8",
    "FP8_LM",
    "HEADS",
    "KEEP",
    "OPERANDS",
    "MASTER",
    "DTYPES",
    "PROJECTOR",
    "AttentionSpec",
    "BytesPerParameter",
    "Codes",
    "Communication",
    "LinearSpec",
    "LossScale",
    "Matmul",
    "Multiplier",
    "Projection",
    "Recipe",
    "Rule",
    "Saved",
    "Stage",
    "Storage",
    "Subspace",
    "chain",
    "from_data",
    "get_recipe",
    "get_storage",
    "integer_weights",
    "is_chain",
    "is_master",
    "is_reference",
    "linear_spec",
    "linear_text",
    "list_recipes",
    "matmul_texts",
    "starts",
    "to_data",
]


# ---- recipes by name -------------------------------------------------------------------------------------------------

_MEANT = {
    **dict.fromkeys(("bf16", "bfloat16", "amp"), "bf16-mixed"),
    **dict.fromkeys(("fp16", "float16", "half"), "fp16-mixed"),
    **dict.fromkeys(("fp8", "float8"), "fp8-current"),
    **dict.fromkeys(("fp4", "float4"), "nvfp4"),
    **dict.fromkeys(("float32", "float"), "fp32"),
}
"""The recipe to suggest for names that users of other libraries may give."""


_named = family("halfstep.recipe.named", Recipe)


@cache
def _aliases() -> dict[str, str]:
    table: dict[str, str] = {}
    for recipe in _named().values():
        for alias in recipe.aliases:
            if alias in _named() or table.setdefault(alias, recipe.name) != recipe.name:
                raise RecipeError(f"{alias!r} names two recipes, {recipe.name} among them; drop one alias")
    return table


def list_recipes() -> list[str]:
    """The names of the recipes that come with halfstep: fp32 first, then by bytes per parameter, most first."""

    def order(name: str) -> tuple[bool, float, float, float, str]:
        size = _named()[name].bytes_per_parameter()
        return name != "fp32", -size.total, -size.weights, size.transient, name

    return sorted(_named(), key=order)


def get_recipe(name: str | Recipe) -> Recipe:
    """The recipe with that name or alias (`O0` to `O3` are apex's levels); a `Recipe` is returned as it is.

    `bits-eXmY` is bf16 with fewer bits, `bits-eXmY-nearest` the same rounded to nearest (`recipe.data`).

    A recipe of your own is named by its location: `my.toml`, `package.module:name` or `path.py:name`. Recipes that
    follow one another are written as `fp8-current until 90%, then bf16-mixed` (or `until step 900`; the comma is
    optional).

    Raises:
        RecipeError: no recipe has that name (the message has the nearest ones); `name` is no string; or as in
            `recipe.data`.
    """
    if isinstance(name, Recipe):
        return name
    if not isinstance(name, str):
        raise RecipeError(f"recipe = {name!r} found; expected a Recipe or text: a name, 'my.toml', 'module:name'")
    if name in _named():
        return _named()[name]
    if is_chain(name):
        return read_chain(name, get_recipe)
    if is_reference(name):
        recipe = read(name, _find)
        if _named().get(recipe.name, recipe) != recipe or recipe.name in _aliases():
            raise RecipeError(f"{name}: {recipe.name!r} is a recipe that comes with halfstep; give yours another name")
        return recipe
    return _find(name)


def _find(name: str) -> Recipe:
    if is_partial(name):
        return with_a_number(name)
    own = _aliases().get(name, name)
    if is_reference(name):
        raise RecipeError(f"{name!r} found; a file's base and stages are recipes that come with halfstep, by name")
    if own not in _named() and (name.endswith((".json", ".yaml", ".yml")) or exists(name)):
        raise RecipeError(f"{name!r} found; a recipe's file is TOML, and its name ends in .toml")
    if own not in _named():
        raise RecipeError(unknown("recipe", name, [*list_recipes(), *_aliases()], _MEANT.get(name.lower())))
    return _named()[own]


# ---- recipes of saved states -----------------------------------------------------------------------------------------

RECIPE = "recipe"
"""The key in a state dict of the recipe that it was saved under: `Origin.mark`."""
CHANGES = ("refuse", "allow")
_WORDS = ("name", "summary", "source", "aliases", "notes", "why")  # fields that do not affect training


def digest(recipe: Recipe) -> str:
    """16 hex digits that hash what a recipe does, not its name; its name if it has a custom scaling.

    >>> from dataclasses import replace
    >>> from halfstep.recipe import get_recipe
    >>> mine = replace(get_recipe("bf16-mixed"), name="mine")
    >>> digest(mine), digest(mine) == digest(get_recipe("bf16-mixed"))
    ('e02f0062502a90fe', True)
    """
    try:
        plain = to_data(Recipe("", "", ""))  # defaults are left out, so that new fields change no digest
        data: Any = _numbers({key: value for key, value in to_data(recipe).items() if value != plain.get(key)})
    except RecipeError:
        data = recipe.name
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def _numbers(data: Any) -> Any:
    """The data without `_WORDS`, and with one rule for each glob."""
    if isinstance(data, dict):
        data = {key: _numbers(value) for key, value in data.items() if key not in _WORDS}
        if "rules" in data:
            data["rules"] = [{**rule, "path": glob} for rule in data["rules"] for glob in rule["path"].split("|")]
        return data
    return [_numbers(value) for value in data] if isinstance(data, list) else data


def check_change(change: object) -> None:
    """Check a value of `recipe_change`.

    Raises:
        RecipeError: it is not one of `CHANGES`.
    """
    if change not in CHANGES:
        raise RecipeError(f"recipe_change = {change!r} given; expected one of {', '.join(map(repr, CHANGES))}")


@dataclass(frozen=True)
class Origin:
    """The recipe that states are saved under, and whether states of other recipes may be loaded ("refuse", "allow")."""

    recipe: Recipe
    change: str = "refuse"

    @cached_property
    def mark(self) -> str:
        """The recipe's name and digest, for a state dict."""
        return f"{self.recipe.name} @{digest(self.recipe)}"

    def differs(self, mark: object, what: str) -> str | None:
        """The name of the recipe that a state was saved under, if it is another one and a change is allowed.

        None if it is the same one, or if the state names none, as torch's states and those of older versions.

        Args:
            mark: the state's entry `RECIPE`.
            what: what the state is of, for the error.

        Raises:
            RecipeError: it is another recipe, and no change is allowed.
        """
        if not isinstance(mark, str) or mark.rpartition("@")[2] == self.mark.rpartition("@")[2]:
            return None
        name = mark.rpartition(" @")[0]
        other = f"recipe {name!r}" if name != self.recipe.name else f"another recipe of the name {name!r}"
        if self.change == "allow":
            return other
        raise RecipeError(
            f"{what} was saved under {other}, and this run follows {self.recipe.name!r}. Resume under the one that it "
            "was saved under; or, to change recipes on purpose, say recipe_change='allow' where the recipe is given "
            "(halfstep.prepare, halfstep.optimize, HalfstepTrainer, HalfstepPrecision): what is then rounded, dropped "
            "or started over is printed. Nothing was changed"
        )
