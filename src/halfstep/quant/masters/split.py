"""The lower 16 bits of the float32 weight, kept apart: an exact master in half its bytes."""

from typing import ClassVar

import torch
from torch import Tensor

from halfstep.quant.masters.base import Kept, Master


class Split(Master):
    """2 bytes a parameter: float32 bits = (bfloat16 bits << 16) + low, with low in [-2^15, 2^15).

    The bfloat16 half is therefore the float32 weight rounded to nearest with ties away from zero (to nearest-even, a
    tie would leave 2^15 or -2^15 over, and 16 bits hold one of them). Beside another weight that was written from
    outside, the lower half is at most half an ulp of it and stays; beside a zero or an infinity, where it would make a
    NaN, it goes.

    Source: nothing is approximated: the two halves are the float32 number.
    """

    keeps: ClassVar = {"low": torch.int16}

    def start(self, weight: Tensor, full: Tensor) -> Kept:
        kept = {"low": torch.empty_like(weight, dtype=torch.int16)}
        self.write(weight, kept, full)
        return kept

    def read(self, weight: Tensor, kept: Kept) -> Tensor:
        return ((weight.view(torch.int16).int() << 16) + kept["low"].int()).view(torch.float32)

    def write(self, weight: Tensor, kept: Kept, updated: Tensor) -> None:
        bits = updated.float().contiguous().view(torch.int32)
        kept["low"].copy_(bits)  # the lower 16 bits, as torch converts
        weight.view(torch.int16).copy_((bits + 0x8000).bitwise_right_shift_(16))
        weight.masked_fill_(updated.isnan(), torch.nan)  # whose payload may have carried

    def follow(self, weight: Tensor, kept: Kept) -> None:
        kept["low"].masked_fill_(self.read(weight, kept).isnan(), 0)


split = Split("split")
