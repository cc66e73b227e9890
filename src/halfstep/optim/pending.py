"""What a loss scaler knows of each optimizer's gradients between two updates."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import LossScaleError
from halfstep.optim.gradients import gone, parameters_of, treated


class Pending:
    """What is known of one optimizer's gradients since the last update()."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.stage = "ready"  # -> "unscaled" -> "stepped"; "dropped" once gradients that were unscaled are gone
        self.found_inf: bool | Tensor | None = None  # a scalar above 0, where the host does not wait for it
        self.overflowed: tuple[str, ...] = ()
        self.lost: Tensor | None = None  # of those names, which; all of them where it is None
        self._versions = _versions(optimizer)

    def stepped_unread(self, optimizer: torch.optim.Optimizer) -> None:
        """The scaler's step has run, and wrote something unless `found_inf` says no."""
        self._versions = _versions(optimizer)

    def moved(self, optimizer: torch.optim.Optimizer) -> bool | Tensor:
        """Whether the optimizer has stepped, through the scaler or past it."""
        if self._versions != _versions(optimizer) or self.stage != "stepped":
            return self._versions != _versions(optimizer)
        return self.found_inf == 0 if isinstance(self.found_inf, Tensor) else not self.found_inf


class AllPending:
    """What is known of every optimizer that a scaler has seen since its last update(). It keeps no optimizer alive."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, Pending] = weakref.WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Pending]:
        return iter(self._known.values())

    def take(self) -> list[tuple[torch.optim.Optimizer, Pending]]:
        """Everything, which is forgotten with that."""
        taken = list(self._known.items())
        self._known.clear()
        return taken

    def look_back(self) -> None:
        """Another backward is about to run: find out which gradients have been dropped since they were unscaled."""
        for optimizer, pending in self._known.items():
            if pending.stage == "unscaled" and gone(optimizer):
                pending.stage = "dropped"

    def of(self, optimizer: torch.optim.Optimizer) -> Pending:
        """What is known of an optimizer; of one with the same groups, what is known of the other (`convert`).

        Raises:
            LossScaleError: its last gradients overflowed, and were dropped before update() heard of it.
        """
        same = [o for o in self._known if o is optimizer or o.param_groups is optimizer.param_groups]
        pending = self._known[same[0]] if same else None
        if pending is not None and pending.stage == "dropped" and treated(optimizer):
            pending.stage = "unscaled"  # they had been put aside
        if pending is not None and pending.stage == "dropped":
            if pending.found_inf:
                raise LossScaleError(
                    "the gradients of the last batch overflowed and were dropped before scaler.update(), so the loss "
                    "scale could not fall; call scaler.update() after every batch, even one whose step is left out"
                )
            pending = None
        if pending is None:
            pending = self._known[same[0] if same else optimizer] = Pending(optimizer)
        return pending


def unwrapped(optimizer: torch.optim.Optimizer) -> Any:
    """The optimizer itself, where accelerate's, Lightning's or Fabric's wrapper (their `.optimizer`) was given."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def _versions(optimizer: torch.optim.Optimizer) -> list[int]:
    """torch's count of writes to each parameter."""
    return [parameter._version for parameter in parameters_of(optimizer)]
