"""Which memory is held while code runs, by role: each storage from the operator that makes it to its release."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfstep.kernels.blank import FOLLOW


PASSING = "passing"
"""The role of what operators make, until it is given another."""

_NOTHING = frozenset({"nothing"})
"""What memory is computed from that no operator has written to, as far as can be seen: a kernel may have."""


@dataclass
class _Held:
    nbytes: int
    role: str
    sources: frozenset[str]
    """Roles of what it was computed from."""
    ref: weakref.ref[Any]


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, every storage that torch's operators make or read is known: its bytes, its role, and from what it was
    computed. A tensor without memory (a FakeTensor) counts with the bytes that it stands for.

    Each storage counts once, whole, however many tensors show parts of it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held: dict[int, _Held] = {}
        self._now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        """Bytes by role, when they were most in all."""

    def give(self, role: str, tensors: Iterable[Tensor]) -> None:
        """Give the storages of tensors a role. What is computed from a role's tensors remembers it."""
        for tensor in tensors:
            for part in parts_of(tensor).values():
                held = self._known(part, role)
                self._now[held.role] -= held.nbytes
                self._now[role] += held.nbytes
                held.role, held.sources = role, held.sources | {role}
        self._note()

    def settle(self, sources: frozenset[str], role: str, otherwise: str) -> None:
        """Give what is passing a role: `role` where it was computed from nothing but those sources, or `otherwise`."""
        for held in self._held.values():
            if held.role == PASSING:
                held.role = role if held.sources and held.sources <= sources else otherwise
        self._now = Counter()
        for held in self._held.values():
            self._now[held.role] += held.nbytes

    def bytes_of(self, role: str) -> int:
        """The bytes that are held now in that role."""
        return self._now[role]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor made of others: its own dispatch brings those here
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if made:
            follows = func is FOLLOW
            leaves = tree_leaves(args[:1] if follows else (args, kwargs))
            given = [self._sources(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
            sources = frozenset[str]().union(*given) if given else _NOTHING
            for tensor in made:
                held = self._known(tensor, PASSING)
                held.sources = sources if follows else held.sources | sources
            self._note()
        return result

    def _sources(self, tensor: Tensor) -> frozenset[str]:
        held = self._held.get(tensor.untyped_storage()._cdata)
        return frozenset() if held is None else held.sources

    def _known(self, tensor: Tensor, role: str) -> _Held:
        storage = tensor.untyped_storage()
        key = storage._cdata
        held = self._held.get(key)
        if held is None:
            held = _Held(storage.nbytes(), role, frozenset(), weakref.ref(storage, partial(self._gone, key)))
            self._held[key] = held
            self._now[role] += held.nbytes
        return held

    def _gone(self, key: int, _: Any) -> None:
        held = self._held.pop(key)
        self._now[held.role] -= held.nbytes

    def _note(self) -> None:
        if self._now.total() > self.peak.total():
            self.peak = self._now.copy()


def parts_of(tensor: Any) -> dict[str, Tensor]:
    """The tensors with memory that one is made of, by name: itself, or codes and scales."""
    if not hasattr(tensor, "__tensor_flatten__") or hasattr(tensor, "device_mesh"):
        return {"": tensor}
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
