"""What a step's numbers became that should not be zero: gradients, and the optimizer's states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.ops.codes import read
from halfstep.optim import LowBit


@dataclass(frozen=True)
class Zeros:
    """How many of some values are zero."""

    zeros: int = 0
    of: int = 0

    def __add__(self, other: Zeros) -> Zeros:
        return Zeros(self.zeros + other.zeros, self.of + other.of)


def zeros(tensors: Iterable[Tensor]) -> Zeros:
    """The zeros among all values of some tensors."""
    found = Zeros()
    for tensor in tensors:
        found += Zeros(tensor.numel() - int(torch.count_nonzero(tensor)), tensor.numel())
    return found


def vanished_states(optimizer: LowBit, gradients: Mapping[Tensor, Tensor]) -> dict[Tensor, dict[str, Zeros]]:
    """By parameter and by the name of the state: where a state is zero although the gradient it has just taken is not.

    A moment that averages gradients, or their squares, is zero there because it left the range of its format: float32's
    own too, for gradients below 1e-21 that are squared.

    Args:
        gradients: by parameter, masks of the elements whose gradient was not zero in the step that was just taken.
    """
    found: dict[Tensor, dict[str, Zeros]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state, taken = optimizer.state.get(parameter, {}), gradients.get(parameter)
            if taken is not None and "step" in state:
                found[parameter] = {
                    name: _missing(_value(optimizer, name, state, parameter), taken)
                    for name in optimizer.rule.moments(group)
                }
    return found


def _value(optimizer: LowBit, name: str, state: Mapping[str, Any], parameter: Tensor) -> Tensor:
    return read(optimizer.recipe.moment(name, parameter.numel()), name, state, tuple(parameter.shape))


def _missing(value: Tensor, taken: Tensor) -> Zeros:
    return Zeros(int(((value == 0) & taken).sum()), int(taken.sum()))
