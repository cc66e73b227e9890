"""What unit scaling made of a module: one record, an attribute of the module."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from halfstep.recipe import LinearSpec


_NAME = "_halfstep_unit"


@dataclass(frozen=True)
class UnitPart:
    """A module's part of a unit-scaled model. Copies and pickles of the module carry it along."""

    multipliers: LinearSpec | None = None
    """What the products of a layer are multiplied by."""
    forward: Any = None
    """What its forward computes by: of one operation a `Whole`, of code of its own an `Own` (`nn.unit`)."""
    scaled: Any = None
    """Of a model that `unit_scale` was called on: its report, and what weights were divided by."""
    tags: Mapping[str, Any] = field(default_factory=dict)
    """What it says of its parameters, by name (`unit.roles`)."""
    depth: int | Callable[[Any], int] | None = None
    """How many blocks it has, as a residual stack."""
    readout: str | None = None
    """Of a readout: the constraint that it names."""


NONE, _PLAIN = UnitPart(), LinearSpec()


def unit_part(module: Any) -> UnitPart:
    """The module's record; an empty one where there is none."""
    return module.__dict__.get(_NAME, NONE)  # type: ignore[no-any-return]


def multipliers_of(module: Any) -> LinearSpec:
    """What the products of a layer that is unit-scaled are multiplied by; an empty spec of another."""
    return module.__dict__.get(_NAME, NONE).multipliers or _PLAIN


def set_unit_part(module: Any, **changes: Any) -> None:
    """Put those fields in the module's record; one in which nothing is left is taken away."""
    module.__dict__[_NAME] = changed = replace(unit_part(module), **changes)
    if changed == NONE:
        del module.__dict__[_NAME]
