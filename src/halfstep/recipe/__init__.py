"""Recipes: which format each part of training lives in."""

from functools import cache

from halfstep.errors import RecipeError, unknown
from halfstep.recipe.spec import (
    MASTERS,
    STORABLE,
    BytesPerParameter,
    LinearSpec,
    LossScale,
    Matmul,
    Recipe,
    Rule,
    linear_spec,
)  # fmt: skip
from halfstep.registry import collect


__all__ = [
    "MASTERS",
    "STORABLE",
    "BytesPerParameter",
    "LinearSpec",
    "LossScale",
    "Matmul",
    "Recipe",
    "Rule",
    "get_recipe",
    "linear_spec",
    "list_recipes",
]


@cache
def _named() -> dict[str, Recipe]:
    return collect("halfstep.recipe.named", Recipe)


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
    """The recipe of that name or alias (`O0` to `O3` are apex's levels); a `Recipe` is returned as it is.

    Raises:
        RecipeError: no recipe has that name; the nearest ones are shown.
    """
    if isinstance(name, Recipe):
        return name
    own = _aliases().get(name, name)
    if own not in _named():
        raise RecipeError(unknown("recipe", name, [*list_recipes(), *_aliases()]))
    return _named()[own]
