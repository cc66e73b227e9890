"""Double quantisation: the float32 scales of blocks are themselves kept in 8 bits."""

import torch
from torch import Tensor

from halfstep.formats import Format, codebooks
from halfstep.quant.cast import decode, encode
from halfstep.quant.padding import pad
from halfstep.quant.scaling.absmax import Absmax
from halfstep.quant.scaling.base import Stored
from halfstep.quant.tile import Tile


GROUP = 256
MAP = codebooks.dynamic8


class DoubleAbsmax(Absmax):
    """Absmax scales less their mean, in groups of 256 as codes of the dynamic map with an absmax scale each.

    Elements are divided by the scale before it is compressed, and multiplied by it after.

    Source: Dettmers et al. 2023, arXiv 2305.14314, section 3 (double quantization), as in bitsandbytes.
    """

    holds = MAP.name

    def scale(self, x: Tensor, tile: Tile, element: Format) -> tuple[Stored, Tensor]:
        return self.compressed(super().scale(x, tile, element)[1], element)

    def compressed(self, exact: Tensor, element: Format) -> tuple[Stored, Tensor]:
        """What is stored of the scales of tiles; and they, NaN in groups with one that is not finite."""
        known = exact[exact.isfinite()]
        offset = (
            known.double().mean() if known.numel() else torch.zeros((), device=exact.device, dtype=torch.float32)
        ).float()
        rest = (exact - offset).flatten()
        group_scale = _groups(rest).abs().nan_to_num(0).amax(1)
        codes = encode((rest / _spread(group_scale, rest)).nan_to_num(0), MAP).view(exact.shape)
        stored = {"scale": codes, "scale_scale": group_scale, "scale_offset": offset}
        # A code has no NaN: the group of a lost tile is lost with it.
        stored["scale_scale"] = torch.where(_groups(rest).isnan().any(1), torch.nan, group_scale)
        return stored, torch.where(self.multiplier(stored, element).isnan(), torch.nan, exact)

    def multiplier(self, stored: Stored, element: Format) -> Tensor:
        rest = decode(stored["scale"], MAP).flatten()
        scale = rest * _spread(stored["scale_scale"], rest) + stored["scale_offset"]
        limit = torch.finfo(torch.float32).max  # what was rounded up must not become an infinity
        return scale.clamp(-limit, limit).view(stored["scale"].shape)

    def layout(self, grid: tuple[int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {
            "scale": (torch.uint8, grid),
            "scale_scale": (torch.float32, (-(-grid[0] * grid[1] // GROUP),)),
            "scale_offset": (torch.float32, ()),
        }


def _groups(scales: Tensor) -> Tensor:
    return pad(scales, (0, -scales.numel() % GROUP)).view(-1, GROUP)


def _spread(group_scale: Tensor, like: Tensor) -> Tensor:
    return group_scale.repeat_interleave(GROUP)[: like.numel()]


double_absmax = DoubleAbsmax("double_absmax")
