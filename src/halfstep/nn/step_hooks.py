"""Hooks that torch calls before every step of any optimizer, and that end by themselves."""

from __future__ import annotations

import torch
from torch.utils.hooks import RemovableHandle


_ENDED = "_halfstep_ended"
"""Where an optimizer has the handles of hooks that end with its step."""


def remove_after_step(optimizer: torch.optim.Optimizer, handle: RemovableHandle) -> None:
    """Remove a hook once this optimizer's step is over: in the step torch iterates over all of them, and fails if one
    goes, as one would whose model a garbage collection takes just then."""
    ended: list[RemovableHandle] | None = vars(optimizer).get(_ENDED)
    if ended is None:
        ended = vars(optimizer)[_ENDED] = []
        optimizer.register_step_post_hook(lambda *_: _remove(ended))
    ended.append(handle)


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()
