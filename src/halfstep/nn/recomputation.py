"""Activation checkpointing computes a forward again in a backward pass: never in another stage of the recipe."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from halfstep.errors import RecipeError
from halfstep.nn.schedule import Schedule


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
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
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
        if torch.compiler.is_compiling() or (now := torch._C._current_graph_task_id()) == -1:
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
