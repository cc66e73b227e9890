"""A scale and a zero point: the tile's range, zero included, is laid over all of an unsigned integer."""

import torch
from torch import Tensor

from halfstep.formats import Format
from halfstep.quant.scaling.base import Scaling, Stored, finite
from halfstep.quant.tile import Tile


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

    def multiplier(self, stored: Stored, element: Format) -> Tensor:
        return stored["scale"]

    def layout(self, grid: tuple[int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {"scale": (torch.float32, grid), "zero_point": (torch.uint8, grid)}


affine = Affine("affine")
