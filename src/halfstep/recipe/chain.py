"""Recipes one after another, in text: `fp8-current until 90%, then bf16-mixed`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from halfstep.errors import RecipeError
from halfstep.recipe.spec import Recipe
from halfstep.recipe.stages import Stage


def is_chain(text: str) -> bool:
    """Whether that is recipes one after another, in words or as `chain` calls them, rather than the name of one."""
    return re.search(r"\suntil\s", _in_words(text)) is not None


def _in_words(text: str) -> str:
    """The name that `chain` gives, as the text it was read from; any other text as it is."""
    text = re.sub(r"-until-([\d.]+)pct-then-", r" until \1% then ", text)
    return re.sub(r"-until-step-(\d+)-then-", r" until step \1 then ", text)


def read_chain(text: str, named: Callable[[str], Recipe]) -> Recipe:
    """The recipe whose stages the text lists, with or without commas; `named` finds each of them.

    Raises:
        RecipeError: it is not of the form `NAME until 90%, then NAME` (`until step 900`, further stages after another
            `until`); or as `Recipe` for stages that do not go together.
    """
    *before, last = re.split(r"\s*,?\s+then\s+", _in_words(text.strip()))
    found = [re.fullmatch(r"(.*\S)\s+until\s+(?:(\d+(?:\.\d+)?)\s*%|step\s+(\d+))", part) for part in before]
    if not before or not all(found) or is_chain(last):
        raise RecipeError(
            f"recipe {text!r} found; expected 'NAME until 90%, then NAME' or 'NAME until step 900, then NAME', and "
            "more stages after another 'until'"
        )
    matches = [match for match in found if match is not None]
    recipes = [named(name) for name in (*(match[1] for match in matches), last)]
    starts = [int(match[3]) if match[3] else float(match[2]) / 100 for match in matches]
    return chain(recipes[0], *map(Stage, recipes[1:], starts))


def chain(first: Recipe, *stages: Stage[Recipe]) -> Recipe:
    """A recipe followed by others, called by their names and starts: `fp8-current-until-90pct-then-bf16-mixed`.

    Raises:
        RecipeError: as `Recipe`; the first has stages already.
    """
    if first.stages:
        raise RecipeError(f"recipe {first.name!r} has stages already; list them all in one recipe")
    name, summary, notes = first.name, first.name, list(first.notes)
    for stage in stages:
        name += f"-until-{stage.when.replace(' ', '-').replace('%', 'pct')}-then-{stage.recipe.name}"
        summary += f" until {stage.when}, then {stage.recipe.name}"
        notes += [note for note in stage.recipe.notes if note not in notes]
    sources = dict.fromkeys((first.source, *(stage.recipe.source for stage in stages)))
    return replace(
        first, name=name, summary=f"{summary}.", source="; ".join(sources), aliases=(), notes=tuple(notes),
        stages=stages,
    )  # fmt: skip
