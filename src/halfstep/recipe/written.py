"""A recipe as plain data, which `recipe.data` reads back."""

from dataclasses import fields, is_dataclass
from typing import Any

from halfstep.recipe.operands import KEEP, Data, Rule, accumulator_data, hadamard_data, quantizer_data, storage_data
from halfstep.recipe.products import LinearSpec, Matmul
from halfstep.recipe.storage import Storage, get_storage


_TABLES = ("loss_scale", "attention", "codes", "moments", "projection", "saved", "communication")
"""The fields of a recipe that are records of their own, beside its rules and stages; they come last."""


def to_data(recipe: Any) -> Data:
    """The data that `from_data` makes this recipe of, whole: nothing is left to a base or a default.

    Raises:
        RecipeError: it has a scaling of one's own, which data do not hold.
    """
    plain = [field.name for field in fields(recipe) if field.name not in (*_TABLES, "rules", "stages")]
    data: Data = {name: _written(getattr(recipe, name)) for name in (*plain, *_TABLES)}
    data["moments"] = _moments_data(recipe.moments)
    keeps = recipe.rules[: len(KEEP)] == KEEP
    rules = [_rule_data(rule) for rule in recipe.rules[len(KEEP) if keeps else 0 :]]
    stages = [{"start": stage.start, "recipe": to_data(stage.recipe)} for stage in recipe.stages]
    return {**data, "keep_heads": keeps, "rules": rules} | ({"stages": stages} if stages else {})


def _written(value: Any) -> Any:
    """A field as data: a record as a table of its fields."""
    if isinstance(value, LinearSpec):
        return _linear_data(value)
    if isinstance(value, Storage):
        return storage_data(value)
    if is_dataclass(value):
        return {field.name: _written(getattr(value, field.name)) for field in fields(value)}
    return "none" if value is None else list(value) if isinstance(value, tuple) else value


def _moments_data(moments: str | Storage | tuple[tuple[str, str | Storage], ...]) -> str | Data:
    if isinstance(moments, str):
        return moments
    pairs = moments if isinstance(moments, tuple) else (("*", moments),)
    return {glob: kind if isinstance(kind, str) else storage_data(get_storage(kind)) for glob, kind in pairs}


def _rule_data(rule: Rule) -> Data:
    words = [field.name for field in fields(Rule) if field.name != "linear"]
    return {**{key: _written(getattr(rule, key)) for key in words}, **_linear_data(rule.linear)}


def _linear_data(spec: LinearSpec) -> Data:
    data: Data = {}
    for product in (field.name for field in fields(LinearSpec)):
        matmul: Matmul = getattr(spec, product)
        sides = {side: quantizer_data(q) for side in ("lhs", "rhs") if (q := getattr(matmul, side)) is not None}
        if matmul.accumulate is not None:
            sides["accumulate"] = accumulator_data(matmul.accumulate)
        if matmul.multiplier is not None:
            sides["multiplier"] = _written(matmul.multiplier)
        if matmul.hadamard is not None:
            sides["hadamard"] = hadamard_data(matmul.hadamard)
        data |= {product: sides} if sides else {}
    return data
