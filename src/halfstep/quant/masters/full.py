"""A float32 copy of the weight takes the update."""

from typing import ClassVar

import torch
from torch import Tensor

from halfstep.quant.masters.base import Kept, Master


class Full(Master):
    """4 bytes a parameter; the stored weight is the copy rounded to nearest-even. Where it is not, the weight is newer.

    Source: Micikevicius et al. 2018, arXiv 1710.03740, section 3.1.
    """

    keeps: ClassVar = {"master": torch.float32}
    weights: ClassVar = ("bf16", "fp16")

    def start(self, weight: Tensor, full: Tensor) -> Kept:
        weight.copy_(full)
        return {"master": full}

    def read(self, weight: Tensor, kept: Kept) -> Tensor:
        return kept["master"].clone()

    def write(self, weight: Tensor, kept: Kept, updated: Tensor) -> None:
        kept["master"].copy_(updated)
        weight.copy_(updated)

    def follow(self, weight: Tensor, kept: Kept) -> None:
        master = kept["master"]
        same = master.to(weight.dtype).view(torch.int16) == weight.view(torch.int16)
        master.copy_(torch.where(same, master, weight.float()))


full = Full("fp32")
