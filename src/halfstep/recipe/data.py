"""Recipes as plain data (what TOML and JSON hold), and back."""

import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from functools import partial
from typing import Any

from halfstep.errors import HalfstepError, RecipeError
from halfstep.quant import Accumulator, Hadamard, Quantizer
from halfstep.recipe.operands import (
    KEEP,
    At,
    Data,
    Rule,
    accumulator,
    check_keys,
    hadamard,
    operand,
    storage,
    table_of,
    typed,
)
from halfstep.recipe.products import AttentionSpec, LinearSpec, Matmul, Multiplier
from halfstep.recipe.projection import Projection
from halfstep.recipe.spec import LossScale, Recipe
from halfstep.recipe.stages import Stage
from halfstep.recipe.storage import OPERANDS, Codes, Communication, Saved, Storage


_USES = {
    "input": (("output", "lhs"), ("grad_weight", "rhs")),
    "weight": (("output", "rhs"), ("grad_input", "rhs")),
    "grad_output": (("grad_input", "lhs"), ("grad_weight", "lhs")),
}
_SIDES = ("lhs", "rhs")
_PRODUCTS = tuple(field.name for field in fields(LinearSpec))
_TYPES: dict[str, Any] = typing.get_type_hints(Recipe)


# ---- data to a recipe -----------------------------------------------------------------------------------------------


def from_data(data: Mapping[str, Any], named: Callable[[str], Recipe]) -> Recipe:
    """The recipe that the data say; what they leave out is as in their `base`, or as `Recipe` has it.

    Rules stand in for the base's own. Unless `keep_heads` is false, the rules that keep output heads and routers out
    (`rule.KEEP`) come before them.

    Args:
        named: finds the base.

    Raises:
        At: an unknown key, a wrong type, a value that means nothing.
    """
    check_keys(data, (*_TYPES, "base", "keep_heads"), "key")
    plain = _TYPES.keys() & data.keys() - _TABLES.keys() - {"rules", "stages"}
    given: Data = {key: typed(data[key], _TYPES[key], key) for key in plain}
    if "stages" in data:
        stages = typed(data["stages"], list, "stages")
        given["stages"] = tuple(_stage(stage, i, named) for i, stage in enumerate(stages))
    given |= {key: _TABLES[key](data[key]) for key in _TABLES.keys() & data.keys()}
    keep = typed(data.get("keep_heads", True), bool, "keep_heads")
    if "rules" in data:
        rules = typed(data["rules"], list, "rules")
        given["rules"] = (KEEP if keep else ()) + tuple(_rule(rule, i) for i, rule in enumerate(rules))
    elif "keep_heads" in data:
        raise At("keep_heads found without [[rules]], which it goes before; give both", "keep_heads")
    if "name" not in given:
        raise At('no name found; expected at least a line such as name = "mine"', "name")
    if not is_name(given["name"]):
        raise At(f"name = {given['name']!r} found; expected a name of letters, digits and - _ . +", "name")
    try:
        if "base" not in data:
            return Recipe(**{"summary": "", "source": "", **given})
        base = named(typed(data["base"], str, "base"))
        changed = ", ".join(sorted(given.keys() - {"name"})) or "nothing"
        said = {"summary": f"{base.name}, except for {changed}.", "source": f"one's own, from {base.name}"}
        return replace(base, **{**said, "aliases": (), "notes": (), **given})
    except HalfstepError as error:
        named_in = [key for key in data if key != "name" and re.search(rf"\b{key}( =|s? ')", str(error))]
        raise At(str(error), *named_in[:1] or ["base" if "base" in data else "name"]) from error


def is_name(name: object) -> bool:
    """Whether a recipe of one's own may be called so: runs have folders of that name."""
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name, re.ASCII) is not None


def _record(name: str, kind: type, data: Any) -> Any:
    """A record of that kind from its table at `name`; None where it says "none".

    A storage among its fields is a format's name or a table, and "none" leaves it out.
    """
    if data == "none":
        return None
    if not isinstance(data, dict):
        raise At(f"{name} = {data!r} found; expected a table or 'none'", name)
    hints = typing.get_type_hints(kind)
    check_keys(data, tuple(hints), f"key of {name}", name)
    for field in fields(kind):
        if field.default is MISSING and field.name not in data:
            wanted = f"expected how they are kept, such as {field.name} = 'mxfp8_e4m3'"
            raise At(f"{name} without {field.name}; {wanted}", name)
    given = {key: _field(value, hints[key], name, key) for key, value in data.items()}
    try:
        return kind(**given)
    except RecipeError as error:
        named = [key for key in given if re.search(rf"{name} {key} =|unknown {key} ", str(error))]
        raise At(str(error), name, *named) from error


def _field(value: Any, expected: Any, *path: str) -> Any:
    kinds = (expected, *typing.get_args(expected))
    if Storage not in kinds:
        return typed(value, expected, *path)
    return value if value == OPERANDS and str in kinds else None if value == "none" else storage(value, *path)


def _moments(data: Any) -> str | tuple[tuple[str, str | Storage], ...]:
    """One format for all, or each moment's by a glob on its name."""
    if isinstance(data, str):
        return data
    table = table_of(data, "moments")
    return tuple(
        (glob, kind if isinstance(kind, str) else storage(kind, "moments", glob)) for glob, kind in table.items()
    )


def _rule(data: Any, number: int) -> Rule:
    path = ("rules", number)
    table = typed(data, dict, *path)
    check_keys(table, (*sorted(_WORDS), "accumulate", *_USES, *_PRODUCTS), "key of a rule", *path)
    if "path" not in table:
        raise At("a rule without a path; expected a glob on module paths, such as '*' or '*.mlp.*'", *path)
    words = {key: typed(table[key], _WORDS[key], *path, key) for key in table.keys() & _WORDS.keys()}
    linear = _linear(table, *path)
    try:
        return Rule(linear=linear, **words)
    except RecipeError as error:
        raise At(str(error), *path, "blocks") from error


_WORDS: dict[str, Any] = {key: kind for key, kind in typing.get_type_hints(Rule).items() if key != "linear"}


def _stage(data: Any, number: int, named: Callable[[str], Recipe]) -> Stage[Recipe]:
    """A start, and a recipe: by name, or as a table of its own."""
    path = ("stages", number)
    table = typed(data, dict, *path)
    check_keys(table, ("start", "recipe"), "key of a stage", *path)
    if table.keys() != {"start", "recipe"}:
        raise At("a stage takes a start (0.9, or 900 steps) and a recipe (a name, or a table)", *path)
    start, recipe = table["start"], table["recipe"]
    if type(start) not in (int, float):
        raise At(f"start = {start!r} found; expected steps, such as 900, or a fraction, such as 0.9", *path, "start")
    try:
        found = named(recipe) if isinstance(recipe, str) else from_data(table_of(recipe, "recipe"), named)
    except RecipeError as error:
        raise At(str(error), *path, "recipe") from error
    try:
        return Stage(found, start)
    except RecipeError as error:
        raise At(str(error), *path, "start") from error


def _attention(data: Any) -> AttentionSpec | None:
    if data == "none":
        return None
    table = typed(data, dict, "attention")
    check_keys(table, tuple(field.name for field in fields(AttentionSpec)), "product of attention", "attention")
    specs = {}
    for name in table:
        sides = typed(table[name], dict, "attention", name)
        check_keys(sides, ("accumulate", *_USES, *_PRODUCTS), "key of a product", "attention", name)
        specs[name] = _linear(sides, "attention", name)
    try:
        return AttentionSpec(**specs)
    except RecipeError as error:
        raise At(str(error), "attention") from error


_TABLES: dict[str, Callable[[Any], Any]] = {
    "loss_scale": partial(_record, "loss_scale", LossScale),
    "codes": partial(_record, "codes", Codes),
    "projection": partial(_record, "projection", Projection),
    "saved": partial(_record, "saved", Saved),
    "communication": partial(_record, "communication", Communication),
    "moments": _moments,
    "attention": _attention,
}


def _linear(table: Mapping[str, Any], *path: str | int) -> LinearSpec:
    """Three products, from the tensors that each use or product by product."""
    operands: dict[tuple[str, str], Quantizer] = {}
    every = accumulator(table["accumulate"], *path, "accumulate") if "accumulate" in table else None
    sums: dict[str, Accumulator | None] = dict.fromkeys(_PRODUCTS, every)
    times: dict[str, Multiplier] = {}
    turns: dict[str, Hadamard | None] = {}
    for name, uses in _USES.items():
        if name in table:
            operands |= dict.fromkeys(uses, operand(table[name], *path, name))
    for product in _PRODUCTS:
        sides = typed(table.get(product, {}), dict, *path, product)
        check_keys(sides, (*_SIDES, "accumulate", "multiplier", "hadamard"), f"operand of {product}", *path, product)
        operands |= {(product, side): operand(sides[side], *path, product, side) for side in sides.keys() & _SIDES}
        if "accumulate" in sides:
            sums[product] = accumulator(sides["accumulate"], *path, product, "accumulate")
        if "multiplier" in sides:
            times[product] = _multiplier(sides["multiplier"], *path, product, "multiplier")
        if "hadamard" in sides:
            turns[product] = hadamard(sides["hadamard"], *path, product, "hadamard")
    try:
        products = {
            name: Matmul(
                operands.get((name, "lhs")), operands.get((name, "rhs")), sums[name], times.get(name), turns.get(name)
            )
            for name in _PRODUCTS
        }
        return LinearSpec(**products)
    except RecipeError as error:
        raise At(str(error), *path) from error


def _multiplier(data: Any, *path: str | int) -> Multiplier:
    """A table of powers of the product's sizes, and a constant."""
    table = typed(data, dict, *path)
    check_keys(table, tuple(typing.get_type_hints(Multiplier)), "key of a multiplier", *path)
    try:
        return Multiplier(**{key: typed(value, float, *path, key) for key, value in table.items()})
    except At:
        raise
    except RecipeError as error:
        raise At(str(error), *path) from error
