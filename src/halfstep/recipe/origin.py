"""Under which recipe a state was saved, and whether it goes on under another: the one rule of all state dicts."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from halfstep.errors import RecipeError
from halfstep.recipe.spec import Recipe
from halfstep.recipe.written import to_data


RECIPE = "recipe"
"""The key by which a state dict names the recipe that it was saved under: `Origin.mark`."""
CHANGES = ("refuse", "allow")
_WORDS = ("name", "summary", "source", "aliases", "notes", "why")  # which change no number


def digest(recipe: Recipe) -> str:
    """16 hex digits of what a recipe does, whatever it is called; of its name, where a scaling of one's own is in it.

    >>> from dataclasses import replace
    >>> from halfstep.recipe import get_recipe
    >>> mine = replace(get_recipe("bf16-mixed"), name="mine")
    >>> digest(mine), digest(mine) == digest(get_recipe("bf16-mixed"))
    ('e02f0062502a90fe', True)
    """
    try:
        plain = to_data(Recipe("", "", ""))  # what a later version adds changes no digest where it is not used
        data: Any = _numbers({key: value for key, value in to_data(recipe).items() if value != plain.get(key)})
    except RecipeError:
        data = recipe.name
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def _numbers(data: Any) -> Any:
    """The data without words for people, and with a rule for each glob."""
    if isinstance(data, dict):
        data = {key: _numbers(value) for key, value in data.items() if key not in _WORDS}
        if "rules" in data:
            data["rules"] = [{**rule, "path": glob} for rule in data["rules"] for glob in rule["path"].split("|")]
        return data
    return [_numbers(value) for value in data] if isinstance(data, list) else data


def check_change(change: object) -> None:
    """Refuse what is no answer to whether a run may go on under another recipe.

    Raises:
        RecipeError: it is none.
    """
    if change not in CHANGES:
        raise RecipeError(f"recipe_change = {change!r} given; expected one of {', '.join(map(repr, CHANGES))}")


@dataclass(frozen=True)
class Origin:
    """The recipe by which states are kept and saved, and whether those of another are taken: `refuse` or `allow`."""

    recipe: Recipe
    change: str = "refuse"

    @cached_property
    def mark(self) -> str:
        """The recipe's name and digest, for a state dict."""
        return f"{self.recipe.name} @{digest(self.recipe)}"

    def differs(self, mark: object, what: str) -> str | None:
        """The name of the recipe that a state was saved under, where it is another one than this and may be.

        None where it is the same one, and where the state names none: torch's own, and those of older versions.

        Raises:
            RecipeError: it is another one, and no change was asked for.
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
