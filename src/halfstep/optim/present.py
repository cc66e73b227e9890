"""Checks before a step: the model still has the parameters (`Present`), at the same addresses (`AddressRecord`)."""

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, compress
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import OptimizerError
from halfstep.kernels.cpu.coded import Coded
from halfstep.ops import CodeTensor
from halfstep.optim.shards import is_spread, part, placed


Reference = Callable[[], nn.Module | None]
"""A weak reference to the model; it returns None once the model is gone."""
Places = tuple[list[int], list[int]]
"""The addresses of gradients, and of the scales of those that are codes."""

_grad, _dtype, _layout, _device = map(attrgetter, ("grad", "dtype", "layout", "device"))
_parts_of, _parameters_of = attrgetter("_modules"), attrgetter("_parameters")
_coding = attrgetter("quantizer", "is_whole")
_params: Any = itemgetter("params")
_seed, _values, _alive = methodcaller("get", "rounding_seed"), methodcaller("values"), weakref.ref.__call__


# ---- parameters of the model: those that replace them would not be trained -------------------------------------------


class Present:
    """Records a model's parameters when its optimizer is made, to detect later that they were replaced."""

    def __init__(self, model: Reference, groups: Iterable[Mapping[str, Any]]) -> None:
        self._model = model
        # Strong references: torch.utils.swap_tensors, for parametrized CodeTensors, refuses tensors with weak ones.
        self._held = {parameter for group in groups for parameter in group["params"]}
        self._known = {id(p): weakref.ref(p) for p in self._named().values() if p not in self._held}
        self._were = {id(p): (p.dtype, p.shape) for p in self._named().values()}
        self._seen: _Seen | None = None

    def name(self, parameter: Tensor) -> str | None:
        """The parameter's name in the model; None if it has none."""
        return next((name for name, p in self._named().items() if p is parameter), None)

    def _named(self) -> dict[str, nn.Parameter]:
        model = self._model()
        return {} if model is None else dict(model.named_parameters())

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Check, before a step, that the optimizer still has the model's parameters. Sharded ones are not checked.

        Raises:
            OptimizerError: parameters of the optimizer are no longer in the model, which has new ones that the
                optimizer lacks; or a parameter's dtype has changed.
        """
        model = self._model()
        if model is None:
            return
        held = list(chain.from_iterable(map(_params, groups)))
        if self._seen is not None and self._seen.is_unchanged(held):
            return
        self._seen, modules = None, _modules(model)
        now = set(map(id, chain.from_iterable(map(_values, map(_parameters_of, modules)))))
        for parameter in held:
            was, _ = self._were.get(id(parameter), (parameter.dtype, None))
            if parameter.dtype != was and self._was_known(parameter):
                raise OptimizerError(
                    f"{self.name(parameter)} was {was} when halfstep.prepare took it, and is {parameter.dtype} now. "
                    "The recipe says in how many bits weights are trained: cast the model (model.half(), model.to()) "
                    f"before halfstep.prepare, and not after it; assign to .data in {was}, or write with copy_; after "
                    "halfstep.revert prepare the model again, with another optimizer"
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

    def check_shapes(self, held: Sequence[Tensor]) -> None:
        """Check that parameters have the shapes that they, and so their states, had.

        Raises:
            OptimizerError: a parameter's shape has changed.
        """
        for parameter in held:
            _, was = self._were.get(id(parameter), (None, parameter.shape))
            if parameter.shape != was and self._was_known(parameter):
                raise OptimizerError(
                    f"{self.name(parameter)} had shape {tuple(was)} when halfstep.prepare took "
                    f"it, as its states have, and has {tuple(parameter.shape)} now. Call what resizes parameters "
                    "(resize_token_embeddings) before halfstep.prepare; or call halfstep.revert(model) after it, build "
                    "the optimizer again, and prepare both"
                )

    def _was_known(self, parameter: Tensor) -> bool:
        known = self._known.get(id(parameter))
        return parameter in self._held or (known is not None and known() is parameter)


class _Seen:
    """A snapshot of the model's structure from a successful check: as long as each module has the same children and
    parameters, and the parameters the same dtypes, the check need not be repeated. It keeps no module alive."""

    def __init__(self, modules: Sequence[nn.Module], held: Sequence[Tensor]) -> None:
        self._wholes: list[Any] = []
        self._owners: list[Any] = []
        for module in modules:
            if module._modules:
                self._wholes.append(weakref.ref(module))
            if module._parameters:
                self._owners.append(weakref.ref(module))
        self._found = self._now(held)

    def is_unchanged(self, held: Sequence[Tensor]) -> bool:
        """Whether nothing has changed, so that another check would succeed too."""
        return self._now(held) == self._found

    def _now(self, held: Sequence[Tensor]) -> tuple[list[Any], ...] | None:
        wholes, owners = list(map(_alive, self._wholes)), list(map(_alive, self._owners))
        if None in wholes or None in owners:
            return None
        parts = list(map(id, chain.from_iterable(map(_values, map(_parts_of, wholes)))))
        parameters = list(map(id, chain.from_iterable(map(_values, map(_parameters_of, owners)))))
        return parts, parameters, list(map(id, held)), list(map(_dtype, held))


def _modules(model: nn.Module) -> list[nn.Module]:
    """All modules of a model; faster than `model.modules()`, which builds names."""
    found, waiting = {id(model): model}, [model]
    while waiting:
        for module in waiting.pop()._modules.values():
            if module is not None and id(module) not in found:
                found[id(module)] = module
                waiting.append(module)
    return list(found.values())


# ---- tensors of a step: compared at every step, so by few passes over lists ------------------------------------------


class AddressRecord:
    """A record of all tensors that an optimizer step read, to check whether the next step has the same tensors at the
    same addresses.

    Args:
        groups, state: the optimizer's.
        taken: by parameter, the gradient as it was passed to a kernel; None if no kernel stepped the parameter.
        launched: the parameters whose gradients' addresses `gradients` returns.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        state: Mapping[Any, Any],
        taken: Mapping[Tensor, Tensor | Coded | None],
        launched: Collection[Tensor],
    ) -> None:
        self._sizes, self._seeds = list(map(len, map(_params, groups))), list(map(_seed, groups))
        self._groups, self._parameters = list(groups), list(chain.from_iterable(map(_params, groups)))
        self._classes = list(map(type, self._parameters))
        self._present = list(map(taken.__contains__, self._parameters))
        stepped = list(compress(self._parameters, self._present))
        grads = list(map(_grad, self._parameters))
        self._kinds, self._dtypes = list(map(type, grads)), list(map(_dtype, compress(grads, self._present)))
        self._layouts = [torch.strided] * len(stepped)
        self._read, self._stepped, self._launched = [], [], []
        self._coded, self._codings, self._single, self._offsets = [], [], [], []
        codes: list[Tensor] = []
        for parameter in stepped:
            grad = taken[parameter]
            self._read.append(grad is not None)
            if grad is None:
                continue
            if isinstance(grad, Coded):
                self._coded.append(len(codes))
                self._codings.append((grad.quantizer, True))
            tensor = grad.parts["codes"] if isinstance(grad, Coded) else grad
            if tensor.numel() < 2:
                self._single.append(len(codes))
            self._offsets.append(tensor.data_ptr() % 16)
            codes.append(tensor)
            self._stepped.append(parameter)
            self._launched.append(parameter in launched)
        self._code_dtypes = list(map(_dtype, codes))
        self._devices = list(compress(map(_device, codes), self._launched))
        self._places_on = set(self._devices)
        self._keys, self._states = list(state), list(state.values())
        self._kept = list(chain.from_iterable(map(dict.values, self._states)))
        self._tensors, self._wrapped = [], []
        self._weights = list(compress(stepped, map({Tensor, torch.nn.Parameter}.__contains__, map(type, stepped))))
        for tensor in (*stepped, *self._kept):
            if hasattr(tensor, "device_mesh") or isinstance(tensor, CodeTensor):
                self._wrapped.append((attrgetter(*_within(tensor)), tensor))
            elif isinstance(tensor, Tensor):
                self._tensors.append(tensor)
        self._inner = self._unwrapped() if self._wrapped else []
        if self._wrapped:
            self._tensors += [tensor for tensor in self._inner if isinstance(tensor, Tensor)]
        self._spread = any(map(is_spread, self._stepped)) if self._wrapped else False
        self._addresses = self._now()

    def _unwrapped(self) -> list[Any]:
        return list(chain.from_iterable([get(tensor) for get, tensor in self._wrapped]))

    def _now(self) -> tuple[list[Any], ...]:
        tensors = self._tensors
        places = list(map(Tensor.data_ptr, tensors)), list(map(Tensor.numel, tensors)), list(map(_dtype, tensors))
        return *places, list(map(Tensor.is_contiguous, self._weights))

    def gradients(
        self, groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any]
    ) -> dict[torch.device, Places] | None:
        """The present addresses of gradients, by device. None if any other tensor has changed or moved, if other
        parameters have gradients than before, or if gradients have other classes, dtypes or layouts."""
        if (
            list(map(len, map(_params, groups))) != self._sizes
            or list(map(_seed, groups)) != self._seeds
            or not all(map(is_, groups, self._groups))
            or not all(map(is_, chain.from_iterable(map(_params, groups)), self._parameters))
            or list(map(type, self._parameters)) != self._classes  # CodeTensors became plain parameters (`revert`)
            or len(state) != len(self._keys)
            or not all(map(is_, state, self._keys))
            or not all(map(is_, state.values(), self._states))
        ):
            return None
        kept = list(chain.from_iterable(map(dict.values, self._states)))
        if (
            len(kept) != len(self._kept)
            or not all(map(is_, kept, self._kept))
            or self._now() != self._addresses
            or (self._wrapped and not all(map(is_, self._unwrapped(), self._inner)))
        ):
            return None
        grads = list(map(_grad, self._parameters))
        if list(map(type, grads)) != self._kinds:
            return None
        present = list(compress(grads, self._present))
        if list(map(_dtype, present)) != self._dtypes or list(map(_layout, present)) != self._layouts:
            return None
        return self._places(list(compress(present, self._read)))

    def _places(self, grads: list[Any]) -> dict[torch.device, Places] | None:
        if self._spread:
            if list(map(placed, grads)) != list(map(placed, self._stepped)):
                return None
            grads = [part(grad) if is_spread(grad) else grad for grad in grads]
        coded = [grads[place] for place in self._coded]
        if list(map(_coding, coded)) != self._codings:
            return None
        for place, grad in zip(self._coded, coded, strict=True):
            grads[place] = grad.codes
        if (
            list(map(_dtype, grads)) != self._code_dtypes
            or not all(map(Tensor.is_contiguous, grads))
            or any(
                grads[place].is_neg() for place in self._single
            )  # imaginary parts of conjugated tensors; longer ones are not contiguous
        ):
            return None
        addresses = list(map(Tensor.data_ptr, grads))
        if [address % 16 for address in addresses] != self._offsets:  # kernels are compiled for multiples of 16
            return None
        addresses = list(compress(addresses, self._launched))
        if len(self._places_on) <= 1:
            return dict.fromkeys(self._places_on, (addresses, [grad.scale.data_ptr() for grad in coded]))
        places: dict[torch.device, Places] = {device: ([], []) for device in self._places_on}
        for device, address in zip(self._devices, addresses, strict=True):
            places[device][0].append(address)
        for grad in coded:
            places[grad.device][1].append(grad.scale.data_ptr())
        return places


def _within(tensor: Tensor) -> tuple[str, ...]:
    """The names of the attributes of a CodeTensor or DTensor that hold its local tensors and their layout."""
    return (*tensor.parts, "quantizer") if isinstance(tensor, CodeTensor) else ("_local_tensor", "placements")
