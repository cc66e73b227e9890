"""Which of an optimizer's parameters are still the model's: nothing would train what replaces them."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

from torch import Tensor, nn

from halfstep.errors import OptimizerError
from halfstep.optim.shards import is_spread


Reference = Callable[[], nn.Module | None]
"""A weak reference to the model; it gives None once the model is gone."""

_dtype = attrgetter("dtype")
_parts_of, _parameters_of = attrgetter("_modules"), attrgetter("_parameters")
_params: Any = itemgetter("params")
_alive: Any = weakref.ref.__call__


class Present:
    """Remembers what a model's parameters were when its optimizer was made, which holds some of them."""

    def __init__(self, model: Reference, groups: Iterable[Mapping[str, Any]]) -> None:
        self._model = model
        # Not by weak references: torch.utils.swap_tensors, which parametrizes codes, takes no tensor that has one.
        self._held = {parameter for group in groups for parameter in group["params"]}
        self._known = {id(p): weakref.ref(p) for p in self._named().values() if p not in self._held}
        self._dtypes = {id(p): p.dtype for p in self._named().values()}
        self._seen: _Seen | None = None

    def name(self, parameter: Tensor) -> str | None:
        """The model's name for a parameter."""
        return next((name for name, p in self._named().items() if p is parameter), None)

    def _named(self) -> dict[str, nn.Parameter]:
        model = self._model()
        return {} if model is None else dict(model.named_parameters())

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Called before a step. Sharded parameters are not looked for.

        Raises:
            OptimizerError: parameters of the optimizer have left the model, and others have come that it lacks; one
                has another dtype than it had.
        """
        model = self._model()
        if model is None:
            return
        held = list(chain.from_iterable(map(_params, groups)))
        if self._seen is not None and self._seen.stands(held):
            return
        self._seen, modules = None, _modules(model)
        now = set(map(id, chain.from_iterable(map(dict.values, map(_parameters_of, modules)))))
        for parameter in held:
            if parameter.dtype != self._dtypes.get(id(parameter), parameter.dtype) and self._was_known(parameter):
                was = self._dtypes[id(parameter)]
                raise OptimizerError(
                    f"{self.name(parameter)} was {was} when halfstep.prepare took it, and is {parameter.dtype} now. "
                    "The recipe says in how many bits weights are trained: cast the model (model.half(), model.to()) "
                    f"before halfstep.prepare, and not after it; assign to .data in {was}, or write with copy_"
                )
        if now.issuperset(map(id, held)):
            self._seen = _Seen(modules, held)
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
        known = self._known.get(id(parameter))
        return parameter in self._held or (known is not None and known() is parameter)


class _Seen:
    """A check that found every parameter of the optimizer in the model, each of the dtype that it had. As long as each
    module has the parts and the parameters that it had then, the model has all of these still. No module is kept alive.
    """

    def __init__(self, modules: Sequence[nn.Module], held: Sequence[Tensor]) -> None:
        self._wholes: list[Any] = []
        self._owners: list[Any] = []
        for module in modules:
            if module._modules:
                self._wholes.append(weakref.ref(module))
            if module._parameters:
                self._owners.append(weakref.ref(module))
        self._found = self._now(held)

    def stands(self, held: Sequence[Tensor]) -> bool:
        """Whether another check of these would find the same."""
        return self._now(held) == self._found

    def _now(self, held: Sequence[Tensor]) -> tuple[list[Any], ...] | None:
        wholes, owners = list(map(_alive, self._wholes)), list(map(_alive, self._owners))
        if None in wholes or None in owners:
            return None
        parts = list(map(id, chain.from_iterable(map(dict.values, map(_parts_of, wholes)))))
        parameters = list(map(id, chain.from_iterable(map(dict.values, map(_parameters_of, owners)))))
        return parts, parameters, list(map(id, held)), list(map(_dtype, held))


def _modules(model: nn.Module) -> list[nn.Module]:
    """A model's modules, faster than by their names."""
    found, waiting = {id(model): model}, [model]
    while waiting:
        for module in waiting.pop()._modules.values():
            if module is not None and id(module) not in found:
                found[id(module)] = module
                waiting.append(module)
    return list(found.values())
