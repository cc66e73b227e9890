"""What has happened since the last optimizer step, and where a run stands in the stages of its recipe.

What is noted of a step is what scaling states and stages depend on.
"""

import threading
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from halfstep.errors import RecipeError
from halfstep.recipe import Recipe
from halfstep.recipe.stages import starts


# ---- optimizer steps -------------------------------------------------------------------------------------------------

_SAMPLES = 16  # values of a weight that are compared where torch's count of writes says nothing


class Clock:
    """Notices an optimizer step that was not ended, and steps that nothing was recorded for: stale scales, or a stage
    of the recipe that is over, would go on unseen.

    The steps of an optimizer that is followed (`Scalings.follow`) are counted. Of others, the weights tell: what
    changed between two forwards, by torch's count of writes; and by some of their values until `end` is called for the
    first time, since writes through `.data` are not counted. One change may be a perturbation (SAM), an average put in
    place, a load, a clamp: the second is an error. What a forward itself writes (`Embedding(max_norm)`) does not count,
    nor does what changes before a gradient has come: a target network is an average, and nothing trains it.

    Args:
        moves: what an optimizer step moves on, for what it raises.
    """

    def __init__(self, moves: str = "scaling states have") -> None:
        self.moves = moves
        self.listens = True
        """Whether no optimizer reports its steps, so that gradients say whether there may be any."""
        # What was found of the gradients of each step: a scalar above 0 says that it was none.
        self._steps: WeakKeyDictionary[torch.optim.Optimizer, list[Tensor | None]] = WeakKeyDictionary()
        self._advanced = False
        self._forget()

    def _forget(self) -> None:
        self._modes: set[bool] = set()
        self._has_gradients = False
        self._changes = 0
        self._left: dict[int, _Seen] = {}
        self._begun: dict[int, _Seen] = {}
        for optimizer in list(self._steps):
            self._steps[optimizer] = []

    def __reduce__(self) -> Any:
        return Clock, (self.moves,)  # torch starts its count of writes again in a copy

    # ---- what the model tells -----------------------------------------------------------------------------------

    def check(self, model: nn.Module) -> None:
        """Called before a forward with gradients, in either mode.

        Raises:
            RecipeError: weights have changed twice, and `end` was not called.
        """
        if not self._steps:
            now = _look(model, values=not self._advanced)
            self._changes += self._has_gradients and _differ(self._left, now)
            if self._changes > 1:
                raise overdue(model, self.moves)
            self._left = now
        self._modes.add(model.training)

    def leave(self, model: nn.Module) -> None:
        """Called after that forward: what it wrote itself is no change of the weights."""
        if not self._steps:
            now = _look(model, values=not self._advanced)
            # The others are not those that came in: FSDP puts its gathered weights in their place meanwhile.
            self._left |= {key: seen for key, seen in now.items() if key in self._left}

    def hear(self, output: Any) -> None:
        """Called with what a forward gives back: a gradient that comes to it is training."""
        if self._has_gradients or torch._C._are_functorch_transforms_active():
            return
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(self._note_gradient)  # type: ignore[no-untyped-call]

    def _note_gradient(self, grad: Tensor) -> None:
        self._has_gradients = True

    # ---- what an optimizer tells --------------------------------------------------------------------------------

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """From now on that optimizer reports its steps, and weights are not compared."""
        self._steps[optimizer] = []
        self.listens = False

    def step(self, optimizer: torch.optim.Optimizer, overflowed: Tensor | None = None) -> None:
        """A followed optimizer has stepped, unless `overflowed` is above 0: that is read when it is needed."""
        if optimizer in self._steps:
            self._steps[optimizer].append(overflowed)

    def is_pending(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it has stepped since the last `end`."""
        return any(overflowed is None or not float(overflowed) for overflowed in self._steps.get(optimizer, ()))

    # ---- what the scaling states tell ---------------------------------------------------------------------------

    def is_used(self) -> bool:
        """Whether a forward with gradients is known since the last `end`."""
        return bool(self._modes)

    def in_eval(self, model: nn.Module) -> bool:
        """Whether an optimizer has stepped since the last `end`, after forwards in eval() alone. A graph of
        torch.compile records no forwards: there the mode is the one that the model is in."""
        if (self._modes or {model.training}) != {False}:
            return False
        now = {} if self._steps else _look(model, values=not self._advanced)
        return any(map(self.is_pending, list(self._steps))) or _differ(self._left, now) or _differ(self._begun, now)

    def begin(self, model: nn.Module) -> None:
        """The weights are new from here on, and nothing has happened yet."""
        self._forget()
        if not self._steps:
            self._begun = _look(model, values=not self._advanced)

    def end(self, model: nn.Module) -> None:
        """An optimizer step has ended."""
        self._advanced = True
        self._forget()
        if not self._steps:
            self._begun = _look(model)


@dataclass(frozen=True)
class _Seen:
    """A weight as it was at some time."""

    weight: Tensor
    version: int
    values: Tensor | None


def overdue(model: nn.Module, moves: str) -> RecipeError:
    """What to say when optimizer steps were not ended; `moves`: what should have moved on with them."""
    return RecipeError(
        f"{type(model).__name__}'s weights have changed and its {moves} not moved on: call "
        "scaler.update() after every optimizer step, or halfstep.advance(model) where there is no scaler (in the "
        "closure, for an optimizer that calls it several times a step)"
    )


def _look(model: nn.Module, values: bool = False) -> dict[int, _Seen]:
    """The weights that are trained, as they are."""
    return {
        id(p): _Seen(p, p._version, _some(p) if values else None)
        for p in model.parameters()
        if isinstance(p, nn.Parameter) and p.requires_grad and not p.is_inference() and not p.is_meta
    }


def _differ(before: dict[int, _Seen], now: dict[int, _Seen]) -> bool:
    """Whether a weight that is in both has changed."""
    pairs = ((before[key], now[key]) for key in before.keys() & now.keys())
    return any(
        a.version != b.version or not (a.values is None or b.values is None or torch.equal(a.values, b.values))
        for a, b in pairs
    )


@torch.no_grad()
def _some(weight: Tensor) -> Tensor:
    """A few of the values that this rank holds, as bytes: a NaN is itself."""
    flat = (weight.to_local() if hasattr(weight, "to_local") else weight).detach().reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLES)][:_SAMPLES].contiguous().clone().view(torch.uint8)


# ---- stages of a recipe ----------------------------------------------------------------------------------------------


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


# ---- recomputation in the backward pass ------------------------------------------------------------------------------


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
