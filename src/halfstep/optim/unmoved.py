"""Whether all that an optimizer's step read is where it was: asked at every step, so in a few passes over lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, compress
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.cpu.coded import Coded
from halfstep.kernels.gpu.kinds import Tensors, codes_of
from halfstep.ops import CodeTensor
from halfstep.optim.shards import is_spread, part, placed


Places = tuple[list[int], list[int]]
"""The addresses of gradients, and of the scales of those that are codes."""

_grad, _dtype, _layout = attrgetter("grad"), attrgetter("dtype"), attrgetter("layout")
_coding = attrgetter("quantizer", "is_whole")


class Unmoved:
    """What a step of all parameters that had a gradient read: the same tensors at the same addresses, or not.

    Args:
        groups, state: the optimizer's.
        taken: by parameter, what kernels were given of it.
    """

    def __init__(
        self, groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any], taken: Mapping[Tensor, Tensors]
    ) -> None:
        self._groups = [list(group["params"]) for group in groups]
        self._seeds = [group["rounding_seed"] for group in groups]
        self._parameters = list(chain.from_iterable(self._groups))
        self._stepped = [parameter in taken for parameter in self._parameters]
        self._grads = [type(parameter.grad) for parameter in self._parameters]
        own = [taken[parameter] for parameter in compress(self._parameters, self._stepped)]
        self._coded = [place for place, one in enumerate(own) if isinstance(one.grad, Coded)]
        self._codings = [(one.grad.quantizer, True) for one in own if isinstance(one.grad, Coded)]
        self._dtypes = [codes_of(one.grad).dtype for one in own]
        self._layouts = [torch.strided] * len(own)
        self._single = [place for place, one in enumerate(own) if codes_of(one.grad).numel() < 2]
        self._offsets = [codes_of(one.grad).data_ptr() % 16 for one in own]
        self._devices = [codes_of(one.weight).device for one in own]
        self._places_on = set(self._devices)
        self._keys, self._states = list(state), list(state.values())
        self._kept = list(chain.from_iterable(map(dict.values, self._states)))
        read = [*taken, *(value for value in self._kept if isinstance(value, Tensor))]
        wrapped = [tensor for tensor in read if is_spread(tensor) or isinstance(tensor, CodeTensor)]
        self._wrapped = [(attrgetter(*_within(tensor)), tensor) for tensor in wrapped]
        self._inner, outer = self._unwrapped(), set(map(id, wrapped))
        self._read = [tensor for tensor in read if id(tensor) not in outer]
        self._read += [tensor for tensor in self._inner if isinstance(tensor, Tensor)]
        self._spread = any(map(is_spread, taken))
        self._addresses = self._now()

    def _unwrapped(self) -> list[Any]:
        return list(chain.from_iterable(get(tensor) for get, tensor in self._wrapped))

    def _now(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._read))

    def gradients(
        self, groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any]
    ) -> dict[torch.device, Places] | None:
        """By device, where gradients are now. None where anything else has moved, other parameters have gradients than
        before, or gradients are of another kind."""
        if len(groups) != len(self._groups) or len(state) != len(self._keys):
            return None
        for group, parameters, seed in zip(groups, self._groups, self._seeds, strict=True):
            if not _same(group["params"], parameters) or group["rounding_seed"] != seed:
                return None
        if not (_same(state, self._keys) and _same(state.values(), self._states)):
            return None
        kept = list(chain.from_iterable(map(dict.values, self._states)))
        if not (_same(kept, self._kept) and _same(self._unwrapped(), self._inner)) or self._now() != self._addresses:
            return None
        grads = list(map(_grad, self._parameters))
        if list(map(type, grads)) != self._grads:
            return None
        return self._places(list(compress(grads, self._stepped)))

    def _places(self, grads: list[Any]) -> dict[torch.device, Places] | None:
        if self._spread:
            if not self._are_cut_alike(grads):
                return None
            grads = [part(grad) if is_spread(grad) else grad for grad in grads]
        coded = [grads[place] for place in self._coded]
        if list(map(_coding, coded)) != self._codings:
            return None
        for place, grad in zip(self._coded, coded, strict=True):
            grads[place] = grad.codes
        if list(map(_dtype, grads)) != self._dtypes or list(map(_layout, grads)) != self._layouts:
            return None
        if not all(map(Tensor.is_contiguous, grads)):
            return None
        if any(grads[place].is_neg() for place in self._single):  # imaginary parts of conjugates; longer ones have gaps
            return None
        addresses = list(map(Tensor.data_ptr, grads))
        if [address % 16 for address in addresses] != self._offsets:  # kernels are compiled for multiples of 16
            return None
        if len(self._places_on) == 1:
            return dict.fromkeys(self._places_on, (addresses, [grad.scale.data_ptr() for grad in coded]))
        places: dict[torch.device, Places] = {device: ([], []) for device in self._places_on}
        for device, address in zip(self._devices, addresses, strict=True):
            places[device][0].append(address)
        for grad in coded:
            places[grad.device][1].append(grad.scale.data_ptr())
        return places

    def _are_cut_alike(self, grads: list[Tensor]) -> bool:
        stepped = (p for p, has in zip(self._parameters, self._stepped, strict=True) if has)
        return all(placed(grad) == placed(parameter) for parameter, grad in zip(stepped, grads, strict=True))


def _same(found: Any, known: list[Any]) -> bool:
    """Whether these are those very objects."""
    return len(found) == len(known) and all(map(is_, found, known))


def _within(tensor: Tensor) -> tuple[str, ...]:
    """The names of what a tensor of another class has its numbers in, on this rank, and of what says how."""
    return (*tensor.parts, "quantizer") if isinstance(tensor, CodeTensor) else ("_local_tensor", "placements")
