"""How a parameter is updated, and how its moments are stored: from the rule, the recipe and the parameter's shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from halfstep.optim.projected import projected
from halfstep.optim.rules.base import Group, UpdateRule
from halfstep.optim.states import kind_of
from halfstep.quant.masters import Master
from halfstep.recipe import Projection, Recipe, Storage


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """How parameters of one shape are updated."""

    rule: UpdateRule
    kinds: Mapping[str, Storage]
    """How the moments are kept, by name."""
    shapes: Mapping[str, Shape]
    """Their shapes."""
    parts: tuple[str, ...]
    """The names of all tensors that they are kept in."""
    held: frozenset[str]
    """The names of all that a state holds once it has begun."""
    coded: bool
    """Whether any is codes."""
    master: Master
    """What takes the update of a weight of this dtype."""


def plan_of(
    rule: UpdateRule, recipe: Recipe, group: Group, parameter: Tensor, projection: Projection | None, master: Master
) -> Plan:
    """The plan of a parameter.

    Raises:
        OptimizerError, RecipeError: as `projected`.
    """
    shape, rule = tuple(parameter.shape), rule.of(group)
    if projection is not None:
        rule = projected(rule, projection, shape)
    shapes = {name: rule.shape(name, shape) for name in rule.moments(group)}
    kinds: dict[str, Storage] = {}
    parts: list[str] = []
    coded = False
    for name, own in shapes.items():
        kind = kinds[name] = kind_of(recipe, rule.kept_as(name, group), own, parameter)
        parts += (name,) if kind.dtype is not None and not kind.residual else kind.parts(name)
        coded |= kind.dtype is None
    return Plan(rule, kinds, shapes, tuple(parts), frozenset({"step", *kinds}), coded, master)
