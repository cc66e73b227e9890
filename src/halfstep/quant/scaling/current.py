"""One scale a tile from the tile itself, as FP8 libraries compute it: its amax lands on the largest value."""

from math import isfinite, nan

import torch
from torch import Tensor

from halfstep.formats import Format
from halfstep.quant.memory import has_memory
from halfstep.quant.scaling.base import Scaling, Stored
from halfstep.quant.tile import Tile


class Current(Scaling):
    """factor = max / amax in float32; elements are multiplied by it, and scale = 1 / factor.

    A tile of zeros has factor 1; an amax so small that the factor overflows has the largest float32. Unlike in the
    source, an infinity or NaN makes its tile NaN, so that it is seen.

    Source: NVIDIA Transformer Engine, Float8CurrentScaling (amax_epsilon 0); torchao's tensorwise scaling.
    """

    multiplies = True
    reciprocal = True

    def scale(self, x: Tensor, tile: Tile, element: Format) -> tuple[Stored, Tensor]:
        factor = self.factor(tile.reduce(x.abs(), "amax").float(), element)
        return {"scale": factor.reciprocal()}, factor

    def factor(self, amax: Tensor, element: Format) -> Tensor:
        return factor_of(amax, element)


def factor_of(amax: Tensor, element: Format) -> Tensor:
    """max / amax in float32: 1 for an amax of 0, NaN for one that is not finite, at most the largest float32."""
    if amax.is_cpu and amax.dim() == 0 and has_memory(amax):
        own = number_of(amax.item(), element)  # the same, in one call
        return torch.scalar_tensor(own, dtype=torch.float32, device="cpu")
    # In double and rounded once, which is float32's own division: CUDA's and a compiler's are not always.
    factor = (element.max / amax.double()).clamp(max=torch.finfo(torch.float32).max).float()
    # NaN of infinities and NaN. A constant, which equals nothing, would hide from compilers that layers do the same.
    lost = amax - amax
    return torch.where(amax.isfinite(), torch.where(amax == 0, 1.0, factor), lost)


def number_of(amax: float, element: Format) -> float:
    """The same of one amax, before it is rounded to float32."""
    return 1.0 if amax == 0 else min(element.max / amax, torch.finfo(torch.float32).max) if isfinite(amax) else nan


current = Current("current")
