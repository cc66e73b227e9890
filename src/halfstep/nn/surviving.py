"""Buffers of a layer that survive `to_empty`, and are initialised again when they come from the meta device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Surviving:
    """The members of such a layer, for `adopt.extend`; its fields are functions of a module's top level."""

    held: Callable[[nn.Module], list[tuple[str, Tensor]]]
    """The buffers, by name."""
    initial: Callable[[nn.Module, str, torch.device], Tensor]
    """What one of them is before the first step."""

    def __call__(self, stock: type[nn.Module]) -> dict[str, Any]:
        held, initial = self.held, self.initial

        def _apply(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            before = dict(held(self))
            stock._apply(self, *args, **kwargs)  # type: ignore[no-untyped-call]
            with torch.no_grad():
                for name, state in held(self):
                    if state is not before[name] and state.dtype == before[name].dtype and not state.is_meta:
                        state.copy_(initial(self, name, state.device) if before[name].is_meta else before[name])
            return self

        def _load_from_state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            stock._load_from_state_dict(self, *args, **kwargs)  # which may put weights in the place of those on meta
            real = next((p.device for p in self.parameters() if not p.is_meta), None)
            for name, state in held(self):
                if state.is_meta and real is not None and name in self._non_persistent_buffers_set:
                    self.register_buffer(name, initial(self, name, real), persistent=False)

        return {"_apply": _apply, "_load_from_state_dict": _load_from_state_dict}
