"""The interface of masters; and `none`: the update is applied to the stored weight itself."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from halfstep.quant.cast import round_at, round_to


Kept = dict[str, Tensor]
"""The tensors that a master keeps beside the weight, by their names in the optimizer's state; each of the weight's
shape."""


@dataclass(frozen=True)
class Master(ABC):
    """Reads and writes a weight together with the tensors kept beside it.

    The weight may be written to between two steps (load_state_dict, a clamp through `.data`, a mask, a swap and its way
    back), unnoticed: torch's version counter does not see `.data`. So every step first lets the kept tensors `follow`
    the weight, judging by values alone: they stay where `write` could have left them beside this weight; elsewhere only
    the weight counts. No result of `write` or `start` is ever dropped, so an untouched weight loses nothing, and a
    resume, a copy or another sharding needs no extra state.
    """

    name: str

    keeps: ClassVar[dict[str, torch.dtype]] = {}
    """The tensors kept beside the weight in the optimizer's state."""

    weights: ClassVar[tuple[str, ...]] = ("bf16",)
    """The formats of weights that it supports."""

    rounding: ClassVar[str] = "nearest_even"
    """How `write` rounds the weight."""

    seed: ClassVar[int | None] = None
    """The seed of the noise of stochastic rounding."""

    positions: ClassVar[Tensor | None] = None
    """For a shard, the index of each element in the flattened whole tensor; None for a whole tensor."""

    costly: ClassVar[bool] = False
    """Whether `follow` is so expensive that it is called only where torch's version counter has changed."""

    @abstractmethod
    def start(self, weight: Tensor, full: Tensor) -> Kept:
        """The tensors to keep for a weight whose float32 values are `full`; the weight becomes `full`, rounded."""

    def stored(self, weight: Tensor) -> Tensor:
        """The float32 values of the weight alone, as a new tensor."""
        return weight.detach().to(torch.float32, copy=True)

    def gradient(self, grad: Tensor) -> Tensor:
        """The gradient that the update sees, still multiplied by the loss scale."""
        return grad

    @abstractmethod
    def read(self, weight: Tensor, kept: Kept) -> Tensor:
        """The float32 weight that the update rule takes, as a new tensor."""

    @abstractmethod
    def write(self, weight: Tensor, kept: Kept, updated: Tensor) -> None:
        """Store `updated`, which the update rule computed from `read(weight, kept)`."""

    def value(self, weight: Tensor, kept: Kept) -> Tensor:
        """The weight at full stored precision, in float32: what descent quality is measured on."""
        return self.read(weight, kept)

    @abstractmethod
    def follow(self, weight: Tensor, kept: Kept) -> None:
        """Resynchronise the kept tensors, in place, with a weight that was written to from outside."""

    @property
    def bytes(self) -> float:
        """Bytes per parameter."""
        return float(sum(dtype.itemsize for dtype in self.keeps.values()))


def drop_impossible(weight: Tensor, rest: Tensor) -> None:
    """Zero the second bfloat16 of a weight kept as a sum of two, where no update could have left it beside the first.

    After w' = w + c and c' = c + (w - w'), each operation rounded, |c'| <= 2^-7 |w'|; and the error of rounding float32
    to bfloat16 is smaller. The condition is |c'| <= 2^-7 |w'| by the bits, except that values up to 2^-127 always stay:
    no value left by an update is dropped (`tests/exhaustive` tries every w and c).
    """
    size, part = (number.view(torch.int16) & 0x7FFF for number in (weight, rest))
    rest.masked_fill_(part > size.clamp(min=0x3C0) - 0x380, 0.0)


@dataclass(frozen=True)
class Own(Master):
    """No master: the updated weight is rounded to its stored format, and the rounding error is lost."""

    rounding: str = "nearest_even"  # type: ignore[misc]
    seed: int | None = None  # type: ignore[misc]
    positions: Tensor | None = None  # type: ignore[misc]
    round_to: Callable[..., Tensor] = round_to
    """`quant.round_to`, or a faster function equal to it."""

    weights: ClassVar = ("fp32", "bf16", "fp16")

    def start(self, weight: Tensor, full: Tensor) -> Kept:
        weight.copy_(full)
        return {}

    def read(self, weight: Tensor, kept: Kept) -> Tensor:
        return weight.to(torch.float32, copy=True)

    def write(self, weight: Tensor, kept: Kept, updated: Tensor) -> None:
        if self.positions is not None and self.seed is not None:
            updated = round_at(updated, weight.dtype, self.seed, self.positions)
        elif self.rounding != "nearest_even":
            updated = self.round_to(updated, weight.dtype, self.rounding, overflow="ieee", generator=self.seed)
        weight.copy_(updated)

    def follow(self, weight: Tensor, kept: Kept) -> None:
        """Nothing is kept beside the weight."""


own = Own("none")
