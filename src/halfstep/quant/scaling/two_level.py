"""NVFP4's scales: an E4M3 scale per block, and one float32 scale per tensor."""

from typing import ClassVar

import torch
from torch import Tensor

from halfstep.formats import Format, ocp
from halfstep.quant.cast import decode, encode, round_to
from halfstep.quant.scaling.base import Scaling, Stored, finite, over
from halfstep.quant.tile import Tile


_BLOCK = ocp.float8_e4m3fn
_LEAST = 2.0**-117  # times E4M3's smallest value it is float32's smallest normal value


class TwoLevel(Scaling):
    """tensor_scale = amax(x) / (448 * max); scale = e4m3(amax(tile) / max / tensor_scale), in float32; no floor.

    The multiplier is scale * tensor_scale. `max` is the element format's largest value; the largest block's scale
    becomes 448, E4M3's largest. A scale that is rounded down clips: elements above `max` become `max`. Infinities and
    NaN make their own block NaN only: the tensor's amax is taken over the others.

    Source: NVIDIA Transformer Engine, NVFP4 recipe and its reference implementation.
    """

    holds = _BLOCK.name
    two_level = True
    clips: ClassVar[bool] = True
    """Whether a block's scale may be so small that its largest elements are clipped."""

    def scale(self, x: Tensor, tile: Tile, element: Format) -> tuple[Stored, Tensor]:
        amax = finite(tile.reduce(x.abs(), "amax"))
        stored = self._store(amax, element.max, self.tensor_scale(amax, element))
        return stored, self.multiplier(stored, element)

    def tensor_scale(self, amax: Tensor, element: Format) -> Tensor:
        """The tensor's scale, a float32 scalar, from its tiles' amaxes, or from the largest finite one."""
        return _tensor_scale(_largest(amax), _BLOCK.max * element.max)

    def multiplier(self, stored: Stored, element: Format) -> Tensor:
        return decode(stored["scale"], _BLOCK) * stored["tensor_scale"]

    def layout(self, grid: tuple[int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {"scale": (torch.uint8, grid), "tensor_scale": (torch.float32, ())}

    def _store(self, amax: Tensor, largest: float, tensor_scale: Tensor) -> Stored:
        return {"scale": encode(over(amax, largest).float() / tensor_scale, _BLOCK), "tensor_scale": tensor_scale}


class TwoLevelUp(TwoLevel):
    """`TwoLevel` with the smallest E4M3 scale with which no element of the block is clipped: the next larger one where
    amax(tile) over the nearest one's multiplier, in float32, is more than `max`.

    So that the largest block has one, the tensor's scale is the next larger float32 where 448 times the nearest is too
    small; and it is at least 2^-117, with which all multipliers are normal floats. A block that is not all zeros has at
    least E4M3's smallest scale, 2^-9.
    """

    clips = False

    def tensor_scale(self, amax: Tensor, element: Format) -> Tensor:
        scale = super().tensor_scale(amax, element).clamp(min=_LEAST)
        clipped = _largest(amax) / (scale * _BLOCK.max) > element.max
        return torch.where(clipped, torch.nextafter(scale, torch.full_like(scale, torch.inf)), scale)

    def _store(self, amax: Tensor, largest: float, tensor_scale: Tensor) -> Stored:
        stored = super()._store(amax, largest, tensor_scale)
        clipped = amax / (decode(stored["scale"], _BLOCK) * tensor_scale) > largest
        return stored | {"scale": stored["scale"] + clipped}


class FourOverSix(TwoLevel):
    """`TwoLevel`, where each block maps its amax to 6 or to 4, whichever has the smaller sum of absolute errors (ties:
    6).

    The room of 256 leaves the block scales the factor of 1.5 between the two.

    The sums are compared exactly, in any order of summation, for float32 elements of E2M1 and tiles of up to 2^20: an
    element's two errors differ by 0 where it becomes 0 under both scales, and elsewhere by at most 6 times the larger
    multiplier, in multiples of a power of two above 2^-27 of the smaller (of the larger, where that is 0).

    Source: NVIDIA Transformer Engine, NVFP4 recipe, "4 over 6".
    """

    room: ClassVar[float] = 256.0
    """The E4M3 scale of the largest block, if its amax is mapped to 6."""

    def scale(self, x: Tensor, tile: Tile, element: Format) -> tuple[Stored, Tensor]:
        amax = finite(tile.reduce(x.abs(), "amax"))
        tensor_scale = _tensor_scale(_largest(amax), self.room * element.max)
        six, four = (self._store(amax, top, tensor_scale) for top in (element.max, element.max / 1.5))
        worse = tile.reduce(self._errors(x, six, tile, element) - self._errors(x, four, tile, element), "sum") > 0
        stored = {"scale": torch.where(worse, four["scale"], six["scale"]), "tensor_scale": tensor_scale}
        return stored, self.multiplier(stored, element)

    def _errors(self, x: Tensor, stored: Stored, tile: Tile, element: Format) -> Tensor:
        multiplier = tile.spread(self.multiplier(stored, element), *x.shape).to(x.dtype)
        ratio = torch.where(multiplier == 0, 0.0, x / multiplier)
        return (round_to(ratio, element).double() * multiplier.double() - x.double()).abs()


def _largest(amax: Tensor) -> Tensor:
    """The largest amax of the finite tiles."""
    return amax.nan_to_num(0).amax() if amax.numel() else amax.new_zeros(())


def _tensor_scale(amax: Tensor, largest: float) -> Tensor:
    """The scale that maps the largest amax of the blocks to `largest`."""
    scale = over(amax, largest).float()
    return torch.where(scale == 0, 1.0, scale)


two_level = TwoLevel("two_level")
two_level_up = TwoLevelUp("two_level_up")
four_over_six = FourOverSix("four_over_six")
