"""The share of values that a format makes zero, and of updates that it loses."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from halfstep.bits.limits import limits_of
from halfstep.formats import Format
from halfstep.ops import round_to


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
