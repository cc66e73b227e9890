"""The tile's largest magnitude lands on the element format's largest value."""

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

    def multiplier(self, stored: Stored, element: Format) -> Tensor:
        return stored["scale"]


absmax = Absmax("absmax")
