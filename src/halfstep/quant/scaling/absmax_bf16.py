"""One scale a tile from the tile itself, kept in bfloat16: 2 bytes beside small groups."""

import torch
from torch import Tensor

from halfstep.formats import Format
from halfstep.quant.scaling.base import Scaling, Stored, finite, over
from halfstep.quant.tile import Tile


class AbsmaxBf16(Scaling):
    """scale = bf16(amax / max), formed in float32 and rounded to nearest-even; elements are divided by what is stored.

    Where the scale was rounded down, the largest elements saturate, which moves them by less than 2^-8 of their size.
    A tile so small that its scale rounds to 0 becomes zeros. The source adds 1e-10 to amax; this does not.

    Source: Xi et al. 2025 (COAT), arXiv 2410.19313, and its released code: 1 x 16 groups of what norms and such save.
    """

    holds = "bf16"
    narrow = True

    def scale(self, x: Tensor, tile: Tile, element: Format) -> tuple[Stored, Tensor]:
        stored = {"scale": over(finite(tile.reduce(x.abs(), "amax").float()), element.max).bfloat16()}
        return stored, self.multiplier(stored, element)

    def multiplier(self, stored: Stored, element: Format) -> Tensor:
        return stored["scale"].float()

    def layout(self, grid: tuple[int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {"scale": (torch.bfloat16, grid)}


absmax_bf16 = AbsmaxBf16("absmax_bf16")
