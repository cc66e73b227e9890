"""Which of an optimizer's parameters are still the model's: nothing would train what replaces them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn

from halfstep.errors import OptimizerError
from halfstep.optim.shards import is_spread


Reference = Callable[[], nn.Module | None]
"""A weak reference to the model; it gives None once the model is gone."""


class Present:
    """Remembers what a model's parameters were when its optimizer was made."""

    def __init__(self, model: Reference) -> None:
        self._model = model
        self._known = {id(p): weakref.ref(p) for p in self._named().values()}
        self._dtypes = {id(p): p.dtype for p in self._named().values()}

    def name(self, parameter: Tensor) -> str | None:
        """The model's name for a parameter."""
        return next((name for name, p in self._named().items() if p is parameter), None)

    def _named(self) -> dict[str, nn.Parameter]:
        model = self._model()
        return {} if model is None else dict(model.named_parameters())

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Called before a step. Sharded parameters are left to whoever sharded them.

        Raises:
            OptimizerError: parameters of the optimizer have left the model, and others have come that it lacks; one
                has another dtype than it had.
        """
        model = self._model()
        if model is None:
            return
        now, held = _ids(model), [p for group in groups for p in group["params"]]
        for parameter in held:
            if parameter.dtype != self._dtypes.get(id(parameter), parameter.dtype) and self._was_known(parameter):
                was = self._dtypes[id(parameter)]
                raise OptimizerError(
                    f"{self.name(parameter)} was {was} when halfstep.prepare took it, and is {parameter.dtype} now. "
                    "The recipe says in how many bits weights are trained: cast the model (model.half(), model.to()) "
                    f"before halfstep.prepare, and not after it; assign to .data in {was}, or write with copy_"
                )
        if now.issuperset(map(id, held)):
            return
        gone = [p for p in held if id(p) not in now and self._was_known(p) and not is_spread(p)]
        if not gone:
            return
        held_ids, found = {id(p) for p in held}, self._named()
        new = [n for n, p in found.items() if p.requires_grad and id(p) not in held_ids and not self._was_known(p)]
        if not new:
            return
        advice = (
            "build the optimizer after what replaces parameters (resize_token_embeddings, pruning, a new head) and "
            "call halfstep.prepare then, or hand it the new ones with optimizer.add_param_group"
        )
        if is_spread(found[new[0]]):
            advice = (
                "under FSDP2 call halfstep.apply(model, recipe), then fully_shard, build the optimizer on the sharded "
                "parameters, and hand it to halfstep.optimize(model, optimizer)"
            )
        more = " ..." if len(new) > 3 else ""
        raise OptimizerError(
            f"{len(gone)} of this optimizer's {len(held)} parameters no longer belong to the model, and the model has "
            f"{len(new)} that this optimizer would never train ({', '.join(new[:3])}{more}): {advice}"
        )

    def _was_known(self, parameter: Tensor) -> bool:
        return id(parameter) in self._known and self._known[id(parameter)]() is parameter


def _ids(model: nn.Module) -> set[int]:
    """The identities of a model's parameters, ten times as fast as by their names: every step asks."""
    found: list[dict[str, Any]] = []
    seen: set[int] = set()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        found.append(module._parameters)
        seen.add(id(module))
        if module._modules:
            waiting.extend(part for part in module._modules.values() if part is not None and id(part) not in seen)
    return set(map(id, chain.from_iterable(map(dict.values, found))))
