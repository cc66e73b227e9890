"""Collage: a weight is the sum of two bfloat16 numbers, and an update grows the pair."""

from typing import ClassVar

import torch
from torch import Tensor

from halfstep.quant.masters.base import Kept, Master, drop_strange


class Collage(Master):
    """2 bytes a parameter: a bfloat16 residual. Grow(hi, lo, u), each operation rounded to bfloat16:

        t = hi + u;  lo = lo + (u - (t - hi));  hi' = t + lo;  lo' = lo - (hi' - t)

    u is taken in float32 from the rule, weight decay included ("compact"), and rounded once; the paper's code
    computes the update in bfloat16 as well.

    Source: Yu et al. 2024 (Collage), arXiv 2405.03637, and its released code.
    """

    keeps: ClassVar = {"residual": torch.bfloat16}

    def start(self, weight: Tensor, full: Tensor) -> Kept:
        weight.copy_(full)
        return {"residual": (full - weight.float()).to(torch.bfloat16)}

    def read(self, weight: Tensor, kept: Kept) -> Tensor:
        return weight.float() + kept["residual"].float()

    def write(self, weight: Tensor, kept: Kept, updated: Tensor) -> None:
        high, low = weight, kept["residual"]
        update = (updated - self.read(weight, kept)).to(torch.bfloat16)
        total = high + update
        low = low + (update - (total - high))
        grown = total + low
        kept["residual"].copy_(low - (grown - total))
        weight.copy_(grown)

    def follow(self, weight: Tensor, kept: Kept) -> None:
        drop_strange(weight, kept["residual"])


collage = Collage("collage")
