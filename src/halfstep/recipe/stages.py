"""`Stage`: a recipe that takes over from another one during training; and checks that stages are compatible."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypeVar

from halfstep.errors import RecipeError


ALIKE = (
    "weights", "grads", "master", "moments", "update_rounding", "codes", "projection", "loss_scale", "float32_modules",
    "float32_adapters", "communication",
)  # fmt: skip
"""The fields that must be equal in all stages of a recipe: how tensors are stored from step to step, and the loss
scale. Others may change, which say how the passes compute: rules, compute, attention, saved, smooth_glu."""

Kind = TypeVar("Kind")
"""`Recipe`, a type variable since `Recipe` has stages itself."""


@dataclass(frozen=True)
class Stage(Generic[Kind]):
    """A recipe that takes over after some of a run's steps; a step is one call of `scaler.update()`.

    Raises:
        RecipeError: `start` is neither an integer number of steps nor a fraction of the run.
    """

    recipe: Kind
    start: int | float
    """The number of steps after which it takes over (an int), or the fraction of the run (a float between 0 and 1)."""

    def __post_init__(self) -> None:
        steps = type(self.start) is int and self.start > 0
        if not steps and not (type(self.start) is float and 0.0 < self.start < 1.0):
            raise RecipeError(
                f"a stage with start = {self.start!r}; expected a number of steps (an integer from 1 on), or a "
                "fraction of the run between 0 and 1, such as 0.9"
            )

    @property
    def is_fraction(self) -> bool:
        """Whether `start` is a fraction of the run, whose length must then be known."""
        return isinstance(self.start, float)

    @property
    def when(self) -> str:
        """The start in words: `90%`, `step 900`."""
        return f"{100 * self.start:.12g}%" if self.is_fraction else f"step {self.start}"

    def steps(self, total: int | None) -> int:
        """The number of steps after which it takes over, in a run of `total` steps.

        >>> Stage("bf16-mixed", 0.9).steps(1000), Stage("bf16-mixed", 900).steps(None)
        (900, 900)
        """
        if isinstance(self.start, int):
            return self.start
        assert total is not None
        return round(self.start * total)


def check_stages(first: Any, stages: Sequence[Stage[Any]]) -> None:
    """Check that stages can follow a recipe.

    Raises:
        RecipeError: they are out of order, have stages themselves, or differ from the first recipe in a field of
            `ALIKE`.
    """
    for stage in stages:
        if stage.recipe.stages:
            raise RecipeError(
                f"recipe {first.name!r}: its stage {stage.recipe.name!r} has stages itself; list them all in one recipe"
            )
        for field in ALIKE:
            one, other = getattr(first, field), getattr(stage.recipe, field)
            if one != other:
                raise RecipeError(
                    f"recipe {first.name!r}: {field} = {_text(one)} at first and {_text(other)} in its stage "
                    f"{stage.recipe.name!r}. Stages are alike in {', '.join(ALIKE)}, and differ in how the passes "
                    f"compute: give that stage the same {field} (dataclasses.replace, or base = in a recipe's file)"
                )
    for kind in (True, False):
        starts = [stage.start for stage in stages if stage.is_fraction is kind]
        if starts != sorted(set(starts)):
            raise RecipeError(
                f"recipe {first.name!r}: its stages start at {', '.join(stage.when for stage in stages)}; expected "
                "each later than the one before it"
            )


def starts(name: str, stages: Sequence[Stage[Any]], total: int | None) -> tuple[int, ...] | None:
    """The number of steps after which each stage takes over; None if that depends on an unknown length of the run.

    Raises:
        RecipeError: a stage would have no step.
    """
    if total is None and any(stage.is_fraction for stage in stages):
        return None
    found = tuple(stage.steps(total) for stage in stages)
    ends = (0, *found, *([] if total is None else [total]))
    if any(start >= end for start, end in pairwise(ends)):
        run = "" if total is None else f" of a run of total_steps = {total}"
        raise RecipeError(
            f"recipe {name!r}: its stages begin after {', '.join(map(str, found))} steps{run}: one of them would have "
            "no step. Expected each to begin later than the one before it, and before the end"
        )
    return found


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    return repr(value) if isinstance(value, str) else str(value)
