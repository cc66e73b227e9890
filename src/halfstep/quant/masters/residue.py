"""Eight more bits of the weight than bfloat16 holds: a master of 24 bits in one byte beside it."""

from typing import ClassVar

import torch
from torch import Tensor

from halfstep.quant.masters.base import Kept, Master


class Residue(Master):
    """1 byte a parameter: bits of the master = (bfloat16 bits << 16) + (residue << 8), with residue in [-128, 128).

    The master is the float32 weight rounded to 16 significant bits, ties to even, so an update is lost below 2^-17 of
    its weight where bfloat16 alone loses it below 2^-9. The bfloat16 half is the master rounded to nearest, ties away
    from zero. As under `Split`, a residue beside a weight written from outside is at most half an ulp of it and stays,
    but where it would make a NaN.

    Source: FlashOptim (Gonzalez Ortiz et al. 2026, arXiv 2602.23349, algorithm 1) keeps what rounding to bfloat16 left
    over as so many 127ths of half an ulp; here weight and residue are the bits of one number.
    """

    keeps: ClassVar = {"residue": torch.int8}

    def start(self, weight: Tensor, full: Tensor) -> Kept:
        kept = {"residue": torch.empty_like(weight, dtype=torch.int8)}
        self.write(weight, kept, full)
        return kept

    def read(self, weight: Tensor, kept: Kept) -> Tensor:
        return ((weight.view(torch.int16).int() << 16) + (kept["residue"].int() << 8)).view(torch.float32)

    def write(self, weight: Tensor, kept: Kept, updated: Tensor) -> None:
        bits = updated.float().contiguous().view(torch.int32)
        upper = (bits + 0x7F + ((bits >> 8) & 1)).bitwise_right_shift_(8)
        kept["residue"].copy_(upper)  # the lower 8 bits, as torch converts
        weight.view(torch.int16).copy_((upper + 0x80).bitwise_right_shift_(8))
        weight.masked_fill_(updated.isnan(), torch.nan)  # whose payload may have carried

    def follow(self, weight: Tensor, kept: Kept) -> None:
        kept["residue"].masked_fill_(self.read(weight, kept).isnan(), 0)


residue = Residue("residue")
