"""Masters kept beside the weight: a float32 copy; its lower bits, as an integer; or a second bfloat16.

The second bfloat16 is the accumulated rounding error (Kahan), or the low part of a sum (Collage).
"""

from typing import ClassVar

import torch
from torch import Tensor

from halfstep.quant.masters.base import Kept, Master, drop_impossible


class Full(Master):
    """A float32 copy, 4 bytes per parameter. The stored weight is the copy rounded to nearest even; where it is not,
    the weight was written since, and counts.

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


class _Lower(Master):
    def start(self, weight: Tensor, full: Tensor) -> Kept:
        kept = {name: torch.empty_like(weight, dtype=dtype) for name, dtype in self.keeps.items()}
        self.write(weight, kept, full)
        return kept

    def follow(self, weight: Tensor, kept: Kept) -> None:
        for name in self.keeps:
            kept[name].masked_fill_(self.read(weight, kept).isnan(), 0)


class Split(_Lower):
    """The lower half of a float32, 2 bytes per parameter: float32 bits = (bfloat16 bits << 16) + low, low in [-2^15,
    2^15).

    The bfloat16 half is therefore the float32 weight rounded to nearest with ties away from zero (to nearest even, a
    tie would leave a low of 2^15 or -2^15, and 16 bits hold only one of them). If the weight was written from outside,
    the lower half is at most half an ulp of it and stays; next to a zero or an infinity, where it would make a NaN, it
    is dropped.

    Source: nothing is approximated: the two halves are the float32 number.
    """

    keeps: ClassVar = {"low": torch.int16}

    def read(self, weight: Tensor, kept: Kept) -> Tensor:
        return ((weight.view(torch.int16).int() << 16) + kept["low"].int()).view(torch.float32)

    def write(self, weight: Tensor, kept: Kept, updated: Tensor) -> None:
        bits = updated.float().contiguous().view(torch.int32)
        kept["low"].copy_(bits)  # the lower 16 bits, as torch converts
        weight.view(torch.int16).copy_((bits + 0x8000).bitwise_right_shift_(16))
        weight.masked_fill_(updated.isnan(), torch.nan)  # the addition may have overflowed a NaN's mantissa


split = Split("split")


class Residue(_Lower):
    """Eight more bits, 1 byte per parameter: master bits = (bfloat16 bits << 16) + (residue << 8), residue in [-128,
    128).

    The master is the float32 weight rounded to 16 significant bits, ties to even, so an update is lost below 2^-17 of
    its weight where bfloat16 alone loses it below 2^-9. The bfloat16 half is the master rounded to nearest, ties away
    from zero. As under `Split`, a residue beside a weight written from outside is at most half an ulp of it and stays,
    except where it would make a NaN.

    Source: FlashOptim (Gonzalez Ortiz et al. 2026, arXiv 2602.23349, algorithm 1) stores the error of rounding to
    bfloat16 in 127ths of half an ulp; here weight and residue are the bits of one number.
    """

    keeps: ClassVar = {"residue": torch.int8}

    def read(self, weight: Tensor, kept: Kept) -> Tensor:
        return ((weight.view(torch.int16).int() << 16) + (kept["residue"].int() << 8)).view(torch.float32)

    def write(self, weight: Tensor, kept: Kept, updated: Tensor) -> None:
        bits = updated.float().contiguous().view(torch.int32)
        upper = (bits + 0x7F + ((bits >> 8) & 1)).bitwise_right_shift_(8)
        kept["residue"].copy_(upper)  # the lower 8 bits, as torch converts
        weight.view(torch.int16).copy_((upper + 0x80).bitwise_right_shift_(8))
        weight.masked_fill_(updated.isnan(), torch.nan)  # the addition may have overflowed a NaN's mantissa


residue = Residue("residue")


class _Pair(Master):
    def start(self, weight: Tensor, full: Tensor) -> Kept:
        weight.copy_(full)
        return {name: (full - weight.float()).to(dtype) for name, dtype in self.keeps.items()}

    def value(self, weight: Tensor, kept: Kept) -> Tensor:
        (name,) = self.keeps
        return weight.float() + kept[name].float()

    def follow(self, weight: Tensor, kept: Kept) -> None:
        for name in self.keeps:
            drop_impossible(weight, kept[name])


class Kahan(_Pair):
    """A bfloat16 compensation c, 2 bytes per parameter. With u the wanted update, each line rounded to bfloat16:

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
    """A bfloat16 residual, 2 bytes per parameter. Grow(hi, lo, u), each operation rounded to bfloat16:

        t = hi + u;  lo = lo + (u - (t - hi));  hi' = t + lo;  lo' = lo - (hi' - t)

    u is taken in float32 from the rule, weight decay included ("compact"), and rounded once; the paper's code computes
    the update in bfloat16 as well.

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
