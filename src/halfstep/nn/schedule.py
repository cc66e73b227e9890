"""Where a run stands in the stages of its recipe, and that nothing is recomputed in another stage than its own."""

import threading
from bisect import bisect_right
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from halfstep.errors import RecipeError
from halfstep.recipe import Recipe
from halfstep.recipe.stages import starts


class Schedule:
    """How many steps a model has made under a recipe with stages, and which stage is in force.

    A step is one call of `scaler.update()`, or of `halfstep.advance(model)`, whether or not an optimizer was skipped.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.name = recipe.name
        self._recipe = recipe
        self.steps = 0
        self.stage = 0
        self.total_steps: int | None = None
        self._starts = starts(recipe.name, recipe.stages, None)

    def fix(self, total_steps: int | None) -> None:
        """Say how many steps the run makes; None leaves what was said.

        Raises:
            RecipeError: as `check`.
        """
        found = self.check(total_steps)
        if total_steps is not None:
            self._starts, self.total_steps = found, total_steps

    def check(self, total_steps: int | None) -> tuple[int, ...]:
        """After how many steps each later stage of a run of so many begins.

        Raises:
            RecipeError: another number was said before; stages begin at fractions of the run, and no number is given; a
                stage would have no step.
        """
        if total_steps is None:
            return self.starts
        if self.total_steps not in (None, total_steps):
            raise RecipeError(
                f"recipe {self.name!r}: total_steps = {total_steps} given, and {self.total_steps} before for this "
                "model; the stages of all its optimizers change together: give the same number"
            )
        found = starts(self.name, self._recipe.stages, total_steps)
        assert found is not None
        return found

    @property
    def starts(self) -> tuple[int, ...]:
        """After how many steps each later stage begins.

        Raises:
            RecipeError: that depends on the length of the run, which is not known.
        """
        if self._starts is None:
            raise unknown_length(self._recipe)
        return self._starts

    @property
    def due(self) -> int:
        """The stage of the next step."""
        return bisect_right(self.starts, self.steps)

    def state(self) -> dict[str, Any]:
        """What to save of it, as JSON holds it; empty while the length of the run is not known."""
        if self._starts is None:
            return {}
        return {"steps": self.steps, "stage": self.stage, "starts": list(self.starts), "total_steps": self.total_steps}

    def __str__(self) -> str:
        number = f"stage {self.stage + 1} of {len(self._recipe.by_stage)}"
        stage = self._recipe.stages[self.stage - 1].recipe.name if self.stage else "its first"
        if self.stage == len(self._recipe.stages):
            return f"{number}, {stage}, to the end"
        until = f"step {self._starts[self.stage]}" if self._starts else self._recipe.stages[self.stage].when
        return f"{number}, {stage}, until {until}"


def check_total(total_steps: object) -> None:
    """Refuse what is no number of steps.

    Raises:
        RecipeError: it is none.
    """
    if total_steps is not None and (type(total_steps) is not int or total_steps < 1):
        raise RecipeError(
            f"total_steps = {total_steps!r} given; expected how often the run calls scaler.update(), a whole number "
            "from 1 on, or None"
        )


def unknown_length(recipe: Recipe) -> RecipeError:
    """What to say where stages begin at fractions of a run whose length is not known."""
    when = ", ".join(stage.when for stage in recipe.stages if stage.is_fraction)
    return RecipeError(
        f"recipe {recipe.name!r} changes after {when} of the run, whose length is not known: give "
        "total_steps, the number of calls of scaler.update(), to halfstep.prepare or halfstep.optimize; or name a step "
        "(until step 900)"
    )


class Recomputation:
    """Knows of which stage the forward was that a backward pass goes through.

    The outputs of the model say it, where gradients were on. Where they were off, as in a forward that is checkpointed
    as a whole with `use_reentrant=True`, torch's count of operations does: what was recorded before the stage began has
    a smaller number than what came after. Each thread counts for itself.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._backward = (-1, 0)  # the last backward pass that came to an output, and the stage that this is of
        self.begin_stage()

    def __reduce__(self) -> Any:
        return Recomputation, (self._schedule,)  # what was recorded so far is not a copy's

    def begin_stage(self) -> None:
        """What is recorded from now on is of another stage."""
        self._thread, self._since = threading.get_ident(), torch._C._autograd._get_sequence_nr()

    def mark(self, output: Any) -> None:
        """Have a backward pass say of which stage of the recipe the output is that it begins at."""
        if torch._C._are_functorch_transforms_active():
            return
        stage = self._schedule.stage

        def note(grad: Tensor) -> None:
            self._backward = (torch._C._current_graph_task_id(), stage)

        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(note)  # type: ignore[no-untyped-call]

    def check(self) -> None:
        """Refuse to compute something again, in a backward pass, in another stage than it was computed in.

        Raises:
            RecipeError: this is such a call.
        """
        if (now := torch._C._current_graph_task_id()) == -1:
            return
        schedule, (task, stage) = self._schedule, self._backward
        if stage == schedule.stage if now == task else not self._is_older():
            return
        of = f"stage {stage + 1}" if now == task else "an earlier stage"
        raise RecipeError(
            f"recipe {schedule.name!r}: activation checkpointing computes a forward of {of} again in "
            f"stage {schedule.stage + 1}, so its gradients would be of neither. Expected the backward pass before "
            "the step that changes the stage: loss.backward() before scaler.update() or halfstep.advance(model)"
        )

    def _is_older(self) -> bool:
        """Whether the operation whose backward pass computes something again was recorded before this stage began."""
        node = torch._C._current_autograd_node()
        return node is not None and threading.get_ident() == self._thread and node._sequence_nr() < self._since
