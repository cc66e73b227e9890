"""Whether all that an optimizer's step read is where it was: asked at every step, so in a few passes over lists."""

from collections.abc import Collection, Mapping, Sequence
from itertools import chain, compress
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.cpu.coded import Coded
from halfstep.ops import CodeTensor
from halfstep.optim.shards import is_spread, part, placed


Places = tuple[list[int], list[int]]
"""The addresses of gradients, and of the scales of those that are codes."""

_grad, _dtype, _layout, _device = map(attrgetter, ("grad", "dtype", "layout", "device"))
_coding = attrgetter("quantizer", "is_whole")
_PLAIN = {Tensor, torch.nn.Parameter}
_params, _seed = itemgetter("params"), methodcaller("get", "rounding_seed")


class Unmoved:
    """What a step of all parameters that had a gradient read: the same tensors at the same addresses, or not.

    Args:
        groups, state: the optimizer's.
        taken: by parameter, the gradient as a kernel was given it; None where no kernel was.
        launched: the parameters whose gradients' addresses are asked for.
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
        self._weights = list(compress(stepped, map(_PLAIN.__contains__, map(type, stepped))))
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
        """By device, where gradients are now. None where anything else has moved, other parameters have gradients than
        before, or gradients are of another kind."""
        if (
            list(map(len, map(_params, groups))) != self._sizes
            or list(map(_seed, groups)) != self._seeds
            or not all(map(is_, groups, self._groups))
            or not all(map(is_, chain.from_iterable(map(_params, groups)), self._parameters))
            or list(map(type, self._parameters)) != self._classes  # codes became values, as `revert` has it
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
            )  # imaginary parts of conjugates; longer ones have gaps
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
    """The names of what a tensor of another class has its numbers in, on this rank, and of what says how."""
    return (*tensor.parts, "quantizer") if isinstance(tensor, CodeTensor) else ("_local_tensor", "placements")
