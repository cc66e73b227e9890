"""What an update rule is: a pure function on float32 tensors, with the names of its moments."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from halfstep.optim.masters import Kept, Master


Group = Mapping[str, Any]
"""A parameter group's options, as torch.optim names them."""

Moments = dict[str, Tensor]


class Fused(Protocol):
    """The same update in one pass over memory, in place; False where it cannot serve these tensors."""

    def __call__(
        self,
        weight: Tensor,
        master: Master,
        kept: Kept,
        grad: Tensor,
        moments: Moments,
        step: int,
        group: Group,
        grad_scale: float,
    ) -> bool:
        """Update weight, what the master keeps, and moments in place and say so, or touch nothing and return False."""


def never(*_: Any, **__: Any) -> bool:
    """The fused update of a rule that has none."""
    return False


@dataclass(frozen=True)
class UpdateRule:
    """How a weight moves: `update(weight, grad, moments, step, group) -> (weight, moments)`, all in float32.

    `step` counts from 1. `moments` says, from a group's options, which moments there are; they start at zero.
    """

    name: str
    torch_class: type[torch.optim.Optimizer]
    """The optimizer of torch.optim with the same semantics and option names."""
    moments: Callable[[Group], tuple[str, ...]]
    update: Callable[[Tensor, Tensor, Moments, int, Group], tuple[Tensor, Moments]]
    refused: Mapping[str, str] = field(default_factory=dict)
    """Options that, when true, have no counterpart here; with the reason."""
    fused: Fused = never
    elementwise: bool = True
    """Whether an element moves by its own gradient and moments alone (not so where norms of tensors enter)."""
