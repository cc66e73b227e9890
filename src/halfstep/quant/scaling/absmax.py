"""The tile's largest magnitude, or its range, is laid over the element format's values."""

import torch
from torch import Tensor

from halfstep.formats import Format
from halfstep.quant.scaling.base import Scaling, Stored, finite, over
from halfstep.quant.tile import Tile


class Absmax(Scaling):
    """scale = amax / max, in float32.

    Source: Dettmers et al. 2022, arXiv 2208.07339, section 2.1 (int8); 2305.14314 (NF4); DeepSeek-V3, arXiv
        2412.19437 (FP8).
    """

    quotient = True

    def scale(self, x: Tensor, tile: Tile, element: Format) -> tuple[Stored, Tensor]:
        scale = over(finite(tile.reduce(x.abs(), "amax")), element.max).float()
        return {"scale": scale}, scale


absmax = Absmax("absmax")


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


class Affine(Scaling):
    """scale = (high - low) / max with low <= 0 <= high; zero_point = round(-low / scale); x = scale * (code -
    zero_point).

    Source: the standard affine form; 0 is always exact.
    """

    def scale(self, x: Tensor, tile: Tile, element: Format) -> tuple[Stored, Tensor]:
        low, high = tile.reduce(x, "amin").clamp(max=0), tile.reduce(x, "amax").clamp(min=0)
        scale = finite((high.double() - low.double()) / element.max).float()
        steps = torch.where(scale == 0, 0.0, -low / scale).nan_to_num(0)
        zero_point = torch.round(steps).clamp(0, element.max).to(torch.uint8)
        return {"scale": scale, "zero_point": zero_point}, scale

    def layout(self, grid: tuple[int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {"scale": (torch.float32, grid), "zero_point": (torch.uint8, grid)}


affine = Affine("affine")
