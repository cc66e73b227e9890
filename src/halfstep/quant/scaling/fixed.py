"""One power of two for every tensor, chosen beforehand."""

from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.formats import Format
from halfstep.quant.scaling.base import Scaling, Stored, check_power
from halfstep.quant.tile import Tile


@dataclass(frozen=True)
class Fixed(Scaling):
    """scale = 2^-bias, whatever the tensor holds: elements are multiplied by 2^bias, then rounded.

    Source: Perez et al. 2023, arXiv 2309.17224, FP8-CSCALE; their bias is found by a sweep.
    """

    bias: int = 0

    exact = True
    reads = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_power(self, "bias")

    def scale(self, x: Tensor, tile: Tile, element: Format) -> tuple[Stored, Tensor]:
        scale = torch.full(tile.grid(*x.shape), 2.0**-self.bias, device=x.device, dtype=torch.float32)
        return {"scale": scale}, scale

    def factor(self, amax: Tensor, element: Format) -> Tensor:
        return torch.full_like(amax, 2.0**self.bias)

    def multiplier(self, stored: Stored, element: Format) -> Tensor:
        return stored["scale"]


fixed = Fixed("fixed")
