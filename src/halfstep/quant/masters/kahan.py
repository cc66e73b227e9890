"""Kahan summation: what an addition to the weight rounded away is added again at the next."""

from typing import ClassVar

import torch
from torch import Tensor

from halfstep.quant.masters.base import Kept, Master, drop_strange


class Kahan(Master):
    """2 bytes a parameter: a bfloat16 compensation c. With u the wanted update, each line rounded to bfloat16:

        c = c + u;  w' = w + c;  c' = c + (w - w')

    u is taken in float32 from the rule, weight decay included, so decay is compensated too (AnyPrecisionAdamW applies
    it to the weight, where bfloat16 loses it).

    Source: Zamirai et al. 2020, arXiv 2010.06192; torchdistx's AnyPrecisionAdamW.
    """

    keeps: ClassVar = {"compensation": torch.bfloat16}

    def start(self, weight: Tensor, full: Tensor) -> Kept:
        weight.copy_(full)
        return {"compensation": (full - weight.float()).to(torch.bfloat16)}

    def read(self, weight: Tensor, kept: Kept) -> Tensor:
        return weight.float()

    def write(self, weight: Tensor, kept: Kept, updated: Tensor) -> None:
        compensation = kept["compensation"] + (updated - weight.float()).to(torch.bfloat16)
        moved = weight + compensation
        kept["compensation"].copy_(compensation + (weight - moved))
        weight.copy_(moved)

    def value(self, weight: Tensor, kept: Kept) -> Tensor:
        return weight.float() + kept["compensation"].float()

    def follow(self, weight: Tensor, kept: Kept) -> None:
        drop_strange(weight, kept["compensation"])


kahan = Kahan("kahan")
