"""Whether all that an optimizer's step read is where it was: asked at every step, so in a few passes over lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.cpu.coded import Coded
from halfstep.kernels.gpu.kinds import Tensors, codes_of
from halfstep.ops import CodeTensor
from halfstep.optim.shards import is_spread, part, placed


Places = tuple[list[int], list[int]]
"""The addresses of gradients, and of the scales of those that are codes."""


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
        own = [taken[parameter] for parameter in self._parameters if parameter in taken]
        self._codes = [one.grad.quantizer if isinstance(one.grad, Coded) else None for one in own]
        self._coded = any(codes is not None for codes in self._codes)
        self._dtypes = [codes_of(one.grad).dtype for one in own]
        self._devices = [codes_of(one.weight).device for one in own]
        self._keys, self._states = list(state), list(state.values())
        self._kept = list(chain.from_iterable(map(dict.values, self._states)))
        read = [*taken, *(value for value in self._kept if isinstance(value, Tensor))]
        self._wrapped = [tensor for tensor in read if is_spread(tensor) or isinstance(tensor, CodeTensor)]
        wrapped = set(map(id, self._wrapped))
        self._read = [tensor for tensor in read if id(tensor) not in wrapped]
        self._spread = any(map(is_spread, taken))
        self._addresses = self._now()
        found = [codes_of(one.grad) for one in own]
        self._aligned = [grad.data_ptr() % 16 == 0 for grad in found]

    def _now(self) -> list[int]:
        inner = [tensor.data_ptr() for wrapped in self._wrapped for tensor in _inner(wrapped)]
        return inner + [tensor.data_ptr() for tensor in self._read]

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
        if not _same(kept, self._kept) or self._now() != self._addresses:
            return None
        grads = [parameter.grad for parameter in self._parameters]
        if [grad is not None for grad in grads] != self._stepped:
            return None
        return self._places([grad for grad in grads if grad is not None])

    def _places(self, grads: list[Tensor]) -> dict[torch.device, Places] | None:
        scales: dict[torch.device, list[int]] = {device: [] for device in self._devices}
        if self._spread and not self._are_cut_alike(grads):
            return None
        if self._spread or self._coded:
            numbers = []
            for grad, codes in zip(grads, self._codes, strict=True):
                if (grad.quantizer if isinstance(grad, CodeTensor) and grad.is_whole else None) != codes:
                    return None
                if isinstance(grad, CodeTensor):
                    scales[grad.device].append(grad.scale.data_ptr())
                    grad = grad.codes
                numbers.append(part(grad) if is_spread(grad) else grad)
            grads = numbers
        elif any(type(grad) is CodeTensor for grad in grads):
            return None
        strided = torch.strided
        for grad, dtype in zip(grads, self._dtypes, strict=True):
            if grad.dtype is not dtype or grad.layout is not strided or not grad.is_contiguous():
                return None
        addresses = [grad.data_ptr() for grad in grads]
        if [address % 16 == 0 for address in addresses] != self._aligned:  # kernels are compiled for that
            return None
        if len(scales) == 1:
            (device,) = scales
            return {device: (addresses, scales[device])}
        places: dict[torch.device, Places] = {device: ([], scales[device]) for device in scales}
        for device, address in zip(self._devices, addresses, strict=True):
            places[device][0].append(address)
        return places

    def _are_cut_alike(self, grads: list[Tensor]) -> bool:
        stepped = (p for p, has in zip(self._parameters, self._stepped, strict=True) if has)
        return all(placed(grad) == placed(parameter) for parameter, grad in zip(stepped, grads, strict=True))


def _same(found: Any, known: list[Any]) -> bool:
    """Whether these are those very objects."""
    return len(found) == len(known) and all(map(is_, found, known))


def _inner(tensor: Any) -> tuple[Tensor, ...]:
    """What a tensor of another class has its numbers in, on this rank."""
    return tuple(tensor.parts.values()) if isinstance(tensor, CodeTensor) else (part(tensor),)
