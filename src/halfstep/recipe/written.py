"""A recipe as plain data, which `recipe.data` reads back."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from halfstep.recipe.operands import Data, accumulator_data, hadamard_data, quantizer_data, storage_data
from halfstep.recipe.products import AttentionSpec, LinearSpec, Matmul
from halfstep.recipe.rule import KEEP, Rule
from halfstep.recipe.storage import Codes, Communication, Saved, Storage, get_storage


_TABLES = ("loss_scale", "codes", "projection", "saved", "communication", "moments", "attention", "rules", "stages")
"""The fields of a recipe that are records of their own."""


def to_data(recipe: Any) -> Data:
    """The data that `from_data` makes this recipe of, whole: nothing is left to a base or a default.

    Raises:
        RecipeError: it has a scaling of one's own, which data do not hold.
    """
    plain = [field.name for field in fields(recipe) if field.name not in _TABLES]
    data: Data = {name: _plain(getattr(recipe, name)) for name in plain}
    data |= {"loss_scale": asdict(recipe.loss_scale) if recipe.loss_scale else "none", "attention": "none"}
    data |= {"codes": _codes_data(recipe.codes), "moments": _moments_data(recipe.moments)}
    data["projection"] = (
        "none"
        if recipe.projection is None
        else {field.name: _plain(getattr(recipe.projection, field.name)) for field in fields(recipe.projection)}
    )
    data |= {"saved": _saved_data(recipe.saved), "communication": _communication_data(recipe.communication)}
    keeps = recipe.rules[: len(KEEP)] == KEEP
    rules = [_rule_data(rule) for rule in recipe.rules[len(KEEP) if keeps else 0 :]]
    if recipe.attention is not None:
        parts = {field.name: getattr(recipe.attention, field.name) for field in fields(AttentionSpec)}
        data["attention"] = {name: _linear_data(spec) for name, spec in parts.items()}
    stages = [{"start": stage.start, "recipe": to_data(stage.recipe)} for stage in recipe.stages]
    return {**data, "keep_heads": keeps, "rules": rules} | ({"stages": stages} if stages else {})


def _plain(value: Any) -> Any:
    return "none" if value is None else list(value) if isinstance(value, tuple) else value


def _codes_data(codes: Codes | None) -> str | Data:
    kinds = {} if codes is None else {field.name: getattr(codes, field.name) for field in fields(Codes)}
    return {role: "none" if kind is None else storage_data(kind) for role, kind in kinds.items()} or "none"


def _saved_data(saved: Saved | None) -> str | Data:
    if saved is None:
        return "none"
    nonlinear = "none" if saved.nonlinear is None else storage_data(saved.nonlinear)
    return {"operands": saved.operands, "nonlinear": nonlinear}


def _communication_data(communication: Communication | None) -> str | Data:
    if communication is None:
        return "none"
    kinds = {role: getattr(communication, role) for role in ("gradients", "weights")}
    data = {
        role: (kind or "none") if not isinstance(kind, Storage) else storage_data(kind) for role, kind in kinds.items()
    }
    return {**data, "reduce": communication.reduce, "error_feedback": _plain(communication.error_feedback)}


def _moments_data(moments: str | Storage | tuple[tuple[str, str | Storage], ...]) -> str | Data:
    if isinstance(moments, str):
        return moments
    pairs = moments if isinstance(moments, tuple) else (("*", moments),)
    return {glob: kind if isinstance(kind, str) else storage_data(get_storage(kind)) for glob, kind in pairs}


def _rule_data(rule: Rule) -> Data:
    words = [field.name for field in fields(Rule) if field.name != "linear"]
    return {**{key: _plain(getattr(rule, key)) for key in words}, **_linear_data(rule.linear)}


def _linear_data(spec: LinearSpec) -> Data:
    data: Data = {}
    for product in (field.name for field in fields(LinearSpec)):
        matmul: Matmul = getattr(spec, product)
        sides = {side: quantizer_data(q) for side in ("lhs", "rhs") if (q := getattr(matmul, side)) is not None}
        if matmul.accumulate is not None:
            sides["accumulate"] = accumulator_data(matmul.accumulate)
        if matmul.multiplier is not None:
            sides["multiplier"] = asdict(matmul.multiplier)
        if matmul.hadamard is not None:
            sides["hadamard"] = hadamard_data(matmul.hadamard)
        data |= {product: sides} if sides else {}
    return data
