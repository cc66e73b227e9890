"""What a master is; and none: the stored weight takes the update itself."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from halfstep.quant.cast import round_at, round_to


Kept = dict[str, Tensor]
"""What a master keeps beside the weight, by its name in the optimizer's state; each of the weight's shape."""


@dataclass(frozen=True)
class Master(ABC):
    """Reads and writes a weight together with what is kept beside it.

    Anybody may write to the weight between two steps (load_state_dict, a clamp through `.data`, a mask, a swap and its
    way back), and nothing tells: torch's version counter does not see `.data`. So every step first lets what is kept
    `follow` the weight, by what the two hold: it stays where `write` could have left it beside this weight, and
    elsewhere the weight is all there is. Nothing that `write` or `start` left is ever dropped, so an untouched weight
    loses nothing, and a resume, a copy or another way of sharding has nothing to remember.
    """

    name: str

    keeps: ClassVar[dict[str, torch.dtype]] = {}
    """The tensors that stand beside the weight in the optimizer's state."""

    weights: ClassVar[tuple[str, ...]] = ("bf16",)
    """The formats of weights that it stands beside."""

    rounding: ClassVar[str] = "nearest_even"
    """How `write` rounds the weight."""

    seed: ClassVar[int | None] = None
    """Keys the noise of stochastic rounding."""

    positions: ClassVar[Tensor | None] = None
    """The place of each element of this rank's part in the whole tensor, laid out flat; None: this is all of it."""

    costly: ClassVar[bool] = False
    """Whether following costs so much that it is done only where torch's version counter has seen a write."""

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

    @abstractmethod
    def follow(self, weight: Tensor, kept: Kept) -> None:
        """Resynchronise what the master keeps, in place, with a weight that was written to from outside."""

    @property
    def bytes(self) -> float:
        """Bytes a parameter."""
        return float(sum(dtype.itemsize for dtype in self.keeps.values()))


def drop_strange(weight: Tensor, rest: Tensor) -> None:
    """Zero the second number of a sum of two bfloat16 numbers where it cannot stand beside the first.

    After w' = w + c and c' = c + (w - w'), each operation rounded, |c'| <= 2^-7 |w'|; and what a rounding of float32
    to bfloat16 leaves over is smaller. That is |c'| <= 2^-7 |w'| by the bits, except that numbers up to 2^-127 always
    stay: nothing that is left by an update is dropped (`tests/exhaustive` tries every w and c).
    """
    size, part = (number.view(torch.int16) & 0x7FFF for number in (weight, rest))
    rest.masked_fill_(part > size.clamp(min=0x3C0) - 0x380, 0.0)


@dataclass(frozen=True)
class Own(Master):
    """Nothing is kept: the updated weight is rounded to its stored format, and what does not fit is lost."""

    rounding: str = "nearest_even"  # type: ignore[misc]
    seed: int | None = None  # type: ignore[misc]
    positions: Tensor | None = None  # type: ignore[misc]
    round_to: Callable[..., Tensor] = round_to
    """`quant.round_to`, or what is faster and equal to it."""

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
