"""`Clock` notices optimizer steps that were not ended; `Schedule` counts steps and knows the stage in force.

`Recomputation` refuses to recompute a forward (activation checkpointing) in another stage than it ran in.
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

_SAMPLES = 16  # values of a weight that are compared, since writes through `.data` do not change its version


class Clock:
    """Notices optimizer steps that were not ended (by `scaler.update()` or `advance`), and steps without recorded
    amaxes. Otherwise scales would be stale, or a stage of the recipe last too long, unnoticed.

    Steps of an optimizer that is followed (`Scalings.follow`) are counted. For others, changes of weights between two
    forwards stand for steps: changes of their versions, and until the first `end` also of some of their values, since
    writes through `.data` change no version. One change may be a perturbation (SAM), a swapped-in average, a load or a
    clamp; the second is an error. Writes by a forward itself (`Embedding(max_norm)`) do not count, nor do changes
    before a gradient has come: a target network is an average and not trained.

    Args:
        moves: what an optimizer step advances, for error messages.
    """

    def __init__(self, moves: str = "scaling states have") -> None:
        self.moves = moves
        self.listens = True
        """Whether no optimizer is followed, so that gradients show whether the model is trained."""
        # Each optimizer's steps since the last `end`: None, or a scalar that is above 0 if the step was skipped.
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
        return Clock, (self.moves,)  # versions of a copy's tensors start at 0

    # ---- called by the model's forwards -------------------------------------------------------------------------

    def check(self, model: nn.Module) -> None:
        """Called before a forward with gradients on, in training or evaluation mode.

        Raises:
            RecipeError: weights have changed twice without a call of `end`.
        """
        if not self._steps:
            now = _look(model, values=not self._advanced)
            self._changes += self._has_gradients and _differ(self._left, now)
            if self._changes > 1:
                raise overdue(model, self.moves)
            self._left = now
        self._modes.add(model.training)

    def leave(self, model: nn.Module) -> None:
        """Called after that forward: the weights' present state is the one to compare with, so that what the forward
        wrote does not count."""
        if not self._steps:
            now = _look(model, values=not self._advanced)
            # Only parameters that were seen before the forward: FSDP replaces them by gathered ones meanwhile.
            self._left |= {key: seen for key, seen in now.items() if key in self._left}

    def watch_gradients(self, output: Any) -> None:
        """Called with a forward's output: registers hooks that note whether a gradient comes to it."""
        if self._has_gradients or torch._C._are_functorch_transforms_active():
            return
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(self._note_gradient)  # type: ignore[no-untyped-call]

    def _note_gradient(self, grad: Tensor) -> None:
        self._has_gradients = True

    # ---- called by optimizers -----------------------------------------------------------------------------------

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Count this optimizer's steps from now on, instead of comparing weights."""
        self._steps[optimizer] = []
        self.listens = False

    def step(self, optimizer: torch.optim.Optimizer, overflowed: Tensor | None = None) -> None:
        """Note a step of a followed optimizer; it was skipped if `overflowed` is above 0, which is read only later."""
        if optimizer in self._steps:
            self._steps[optimizer].append(overflowed)

    def is_pending(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer has stepped since the last `end`."""
        return any(overflowed is None or not float(overflowed) for overflowed in self._steps.get(optimizer, ()))

    # ---- called by scaling states -------------------------------------------------------------------------------

    def is_used(self) -> bool:
        """Whether a forward with gradients on was seen since the last `end`."""
        return bool(self._modes)

    def in_eval(self, model: nn.Module) -> bool:
        """Whether an optimizer has stepped since the last `end`, after forwards in eval() alone. Forwards in a graph of
        torch.compile are not seen; then the model's present mode counts."""
        if (self._modes or {model.training}) != {False}:
            return False
        now = {} if self._steps else _look(model, values=not self._advanced)
        return any(map(self.is_pending, list(self._steps))) or _differ(self._left, now) or _differ(self._begun, now)

    def begin(self, model: nn.Module) -> None:
        """Start again: weights were loaded or changed otherwise, which is no step."""
        self._forget()
        if not self._steps:
            self._begun = _look(model, values=not self._advanced)

    def end(self, model: nn.Module) -> None:
        """Note that an optimizer step was ended."""
        self._advanced = True
        self._forget()
        if not self._steps:
            self._begun = _look(model)


@dataclass(frozen=True)
class _Seen:
    """A weight, its version at some time, and a sample of its values then."""

    weight: Tensor
    version: int
    values: Tensor | None


def overdue(model: nn.Module, moves: str) -> RecipeError:
    """The error for optimizer steps that were not ended; `moves` names what they should have advanced."""
    return RecipeError(
        f"{type(model).__name__}'s weights have changed and its {moves} not moved on: call "
        "scaler.update() after every optimizer step, or halfstep.advance(model) where there is no scaler (in the "
        "closure, for an optimizer that calls it several times a step)"
    )


def _look(model: nn.Module, values: bool = False) -> dict[int, _Seen]:
    """The present state of the trained weights, by id; with a sample of their `values`."""
    return {
        id(p): _Seen(p, p._version, _some(p) if values else None)
        for p in model.parameters()
        if isinstance(p, nn.Parameter) and p.requires_grad and not p.is_inference() and not p.is_meta
    }


def _differ(before: dict[int, _Seen], now: dict[int, _Seen]) -> bool:
    """Whether a weight that is in both has changed in version or sample."""
    pairs = ((before[key], now[key]) for key in before.keys() & now.keys())
    return any(
        a.version != b.version or not (a.values is None or b.values is None or torch.equal(a.values, b.values))
        for a, b in pairs
    )


@torch.no_grad()
def _some(weight: Tensor) -> Tensor:
    """A copy of a few of this rank's values, as bytes, so that NaNs compare equal."""
    flat = (weight.to_local() if hasattr(weight, "to_local") else weight).detach().reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLES)][:_SAMPLES].contiguous().clone().view(torch.uint8)


# ---- stages of a recipe ----------------------------------------------------------------------------------------------


class Schedule:
    """The number of steps that a model has made under a recipe with stages, and the stage in force.

    A step is one call of `scaler.update()`, or of `halfstep.advance(model)`, whether or not the optimizer's step was
    skipped.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.name = recipe.name
        self._recipe = recipe
        self.steps = 0
        self.stage = 0
        self.total_steps: int | None = None
        self._starts = starts(recipe.name, recipe.stages, None)

    def fix(self, total_steps: int | None) -> None:
        """Set the number of steps of the run; None keeps what was set.

        Raises:
            RecipeError: as `check`.
        """
        found = self.check(total_steps)
        if total_steps is not None:
            self._starts, self.total_steps = found, total_steps

    def check(self, total_steps: int | None) -> tuple[int, ...]:
        """The step after which each later stage of a run of `total_steps` begins.

        Raises:
            RecipeError: another number was set before; stages begin at fractions of the run, and no number is known; or
                a stage would have no step.
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
        """The step after which each later stage begins.

        Raises:
            RecipeError: that depends on the length of the run, which is not known.
        """
        if self._starts is None:
            raise unknown_length(self._recipe)
        return self._starts

    @property
    def due(self) -> int:
        """The index of the next step's stage."""
        return bisect_right(self.starts, self.steps)

    def state(self) -> dict[str, Any]:
        """The state to save, as data for JSON; empty while the length of the run is not known."""
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
    """Check that total_steps is a positive integer or None.

    Raises:
        RecipeError: it is not.
    """
    if total_steps is not None and (type(total_steps) is not int or total_steps < 1):
        raise RecipeError(
            f"total_steps = {total_steps!r} given; expected the number of calls of scaler.update() in the run, an "
            "integer from 1 on, or None"
        )


def unknown_length(recipe: Recipe) -> RecipeError:
    """The error for stages that begin at fractions of a run whose length is not known."""
    when = ", ".join(stage.when for stage in recipe.stages if stage.is_fraction)
    return RecipeError(
        f"recipe {recipe.name!r} changes after {when} of the run, whose length is not known: give "
        "total_steps, the number of calls of scaler.update(), to halfstep.prepare or halfstep.optimize; or name a step "
        "(until step 900)"
    )


# ---- recomputation in the backward pass ------------------------------------------------------------------------------


class Recomputation:
    """Knows the stage in which the forward of the current backward pass ran, to refuse recomputation in another one.

    Hooks on the model's outputs tell it if gradients were on. If they were off, as in a forward that is checkpointed as
    a whole with `use_reentrant=True`, autograd's sequence numbers do: nodes recorded before the stage began have
    smaller numbers than later ones. Each thread has numbers of its own.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._backward = (-1, 0)  # the id of the last backward pass that reached an output, and the output's stage
        self.begin_stage()

    def __reduce__(self) -> Any:
        return Recomputation, (self._schedule,)  # a copy has recorded nothing yet

    def begin_stage(self) -> None:
        """Note that a new stage begins: nodes recorded from now on belong to it."""
        self._thread, self._since = threading.get_ident(), torch._C._autograd._get_sequence_nr()

    def mark(self, output: Any) -> None:
        """Register hooks on a forward's output that note its stage in a backward pass."""
        if torch._C._are_functorch_transforms_active():
            return
        stage = self._schedule.stage

        def note(grad: Tensor) -> None:
            self._backward = (torch._C._current_graph_task_id(), stage)

        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(note)  # type: ignore[no-untyped-call]

    def check(self) -> None:
        """Raise if this call recomputes, in a backward pass, a forward of an earlier stage.

        Raises:
            RecipeError: it does.
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
        """Whether the autograd node that recomputes was recorded before this stage began."""
        node = torch._C._current_autograd_node()
        return node is not None and threading.get_ident() == self._thread and node._sequence_nr() < self._since
