"""What takes the update where a weight is stored in few bits: how the part that rounding leaves over is kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


Kept = dict[str, Tensor]
"""What a master keeps beside the weight, by its name in the optimizer's state; each of the weight's shape."""


@dataclass(frozen=True)
class Master(ABC):
    """Reads and writes a weight together with what is kept beside it."""

    name: str

    keeps: ClassVar[dict[str, torch.dtype]] = {}
    """The tensors that stand beside the weight in the optimizer's state."""

    @abstractmethod
    def start(self, weight: Tensor, full: Tensor) -> Kept:
        """What to keep for a weight whose float32 values are `full`; the weight becomes their rounded image."""

    def stored(self, weight: Tensor) -> Tensor:
        """The float32 values of the weight alone, a tensor of their own."""
        return weight.detach().to(torch.float32, copy=True)

    def gradient(self, grad: Tensor) -> Tensor:
        """The gradient that the update sees, still multiplied by the loss scale."""
        return grad

    @abstractmethod
    def read(self, weight: Tensor, kept: Kept) -> Tensor:
        """The float32 weight that the update rule sees, a tensor of its own."""

    @abstractmethod
    def write(self, weight: Tensor, kept: Kept, updated: Tensor) -> None:
        """Store what the update rule made of `read(weight, kept)`."""

    def value(self, weight: Tensor, kept: Kept) -> Tensor:
        """All that is stored of the weight, in float32: what descent quality is measured on."""
        return self.read(weight, kept)

    def follow(self, weight: Tensor, kept: Kept) -> None:
        """Drop what is kept for elements that somebody wrote to (load_state_dict, a clamp, an average).

        It is dropped where weight and kept together no longer round to the weight.
        """
        value = self.value(weight, kept)
        for name, tensor in self._anew(weight).items():
            kept[name].copy_(torch.where(value.to(weight.dtype) == weight, kept[name], tensor))

    def _anew(self, weight: Tensor) -> Kept:
        """What is kept for a weight whose stored values are all there is."""
        return {name: torch.zeros_like(weight, dtype=dtype) for name, dtype in self.keeps.items()}
