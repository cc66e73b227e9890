"""Where a step's numbers became zero: values rounded to a format, lost updates, gradients, and optimizer states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.bits.limits import limits_of
from halfstep.formats import Format
from halfstep.ops import round_to
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
    own too, for gradients below 1e-21 that are squared. Moments of a subspace have no elements of the gradient's, and
    are left out.

    Args:
        gradients: by parameter, masks of the elements whose gradient was not zero in the step that was just taken.
    """
    found: dict[Tensor, dict[str, Zeros]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state, taken = optimizer.state.get(parameter, {}), gradients.get(parameter)
            if taken is not None and "step" in state:
                plan = optimizer.plan(parameter, group)
                found[parameter] = {
                    name: Zeros(
                        int(((read(kind, name, state, plan.shapes[name]) == 0) & taken).sum()), int(taken.sum())
                    )
                    for name, kind in plan.kinds.items()
                    if plan.rule is optimizer.rule
                }
    return found


def share_zeroed(tensors: Iterable[Tensor], format: Format) -> float:
    """The share of the non-zero values that rounding to `format` (nearest-even) makes zero, without a scale."""
    zeroed, nonzero, limits = 0, 0, limits_of(format, stored=True)
    for tensor in tensors:
        magnitudes = tensor.detach().float().abs()
        nonzero += int((magnitudes > 0).sum())
        zeroed += limits.zeroed(magnitudes, int((magnitudes == 0).sum()))
    return zeroed / nonzero if nonzero else 0.0


@torch.no_grad()
def share_lost(steps: Iterable[tuple[Tensor, Tensor]], format: Format) -> float:
    """The share of non-zero updates that leave the weight where it was, were the weight stored in `format`.

    `steps` yields (weight before, weight after) in float32. With w the stored weight and u the update, an update is
    lost when round(w + u) = w: it is not zero itself, but it is less than half the gap at w.
    """
    lost = moved = 0
    for before, after in steps:
        update = after - before
        stored = round_to(before, format)
        changes = update != 0
        lost += int(((round_to(stored + update, format) == stored) & changes).sum())
        moved += int(changes.sum())
    return lost / moved if moved else 0.0
