"""A second bfloat16 number beside the weight: what rounding left over (Kahan), or the rest of a sum (Collage)."""

from typing import ClassVar

import torch
from torch import Tensor

from halfstep.quant.masters.base import Kept, Master, drop_strange


class _Pair(Master):
    def start(self, weight: Tensor, full: Tensor) -> Kept:
        weight.copy_(full)
        return {name: (full - weight.float()).to(dtype) for name, dtype in self.keeps.items()}

    def value(self, weight: Tensor, kept: Kept) -> Tensor:
        (name,) = self.keeps
        return weight.float() + kept[name].float()

    def follow(self, weight: Tensor, kept: Kept) -> None:
        for name in self.keeps:
            drop_strange(weight, kept[name])


class Kahan(_Pair):
    """2 bytes a parameter: a bfloat16 compensation c. With u the wanted update, each line rounded to bfloat16:

        c = c + u;  w' = w + c;  c' = c + (w - w')

    u is taken in float32 from the rule, weight decay included, so decay is compensated too (AnyPrecisionAdamW applies
    it to the weight, where bfloat16 loses it).

    Source: Zamirai et al. 2020, arXiv 2010.06192; torchdistx's AnyPrecisionAdamW.
    """

    keeps: ClassVar = {"compensation": torch.bfloat16}

    def read(self, weight: Tensor, kept: Kept) -> Tensor:
        return weight.float()

    def write(self, weight: Tensor, kept: Kept, updated: Tensor) -> None:
        compensation = kept["compensation"] + (updated - weight.float()).to(torch.bfloat16)
        moved = weight + compensation
        kept["compensation"].copy_(compensation + (weight - moved))
        weight.copy_(moved)


kahan = Kahan("kahan")


class Collage(_Pair):
    """2 bytes a parameter: a bfloat16 residual. Grow(hi, lo, u), each operation rounded to bfloat16:

        t = hi + u;  lo = lo + (u - (t - hi));  hi' = t + lo;  lo' = lo - (hi' - t)

    u is taken in float32 from the rule, weight decay included ("compact"), and rounded once; the paper's code
    computes the update in bfloat16 as well.

    Source: Yu et al. 2024 (Collage), arXiv 2405.03637, and its released code.
    """

    keeps: ClassVar = {"residual": torch.bfloat16}

    def read(self, weight: Tensor, kept: Kept) -> Tensor:
        return self.value(weight, kept)

    def write(self, weight: Tensor, kept: Kept, updated: Tensor) -> None:
        high, low = weight, kept["residual"]
        update = (updated - self.read(weight, kept)).to(torch.bfloat16)
        total = high + update
        low = low + (update - (total - high))
        grown = total + low
        kept["residual"].copy_(low - (grown - total))
        weight.copy_(grown)


collage = Collage("collage")
