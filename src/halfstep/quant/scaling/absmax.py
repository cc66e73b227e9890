"""Scales that map a tile's amax, or its range, to the element format's range; stored in float32, bfloat16 or 8 bits."""

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.formats import Format, codebooks
from halfstep.quant.cast import decode, encode
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
    """scale = bf16(amax / max), computed in float32 and rounded to nearest even; elements are divided by the stored
    scale.

    Where the scale was rounded down, the largest elements saturate, which changes them by less than 2^-8 of their size.
    A tile so small that its scale rounds to 0 becomes zeros. The source adds 1e-10 to amax; this does not.

    Source: Xi et al. 2025 (COAT), arXiv 2410.19313, and its released code: 1 x 16 groups of tensors saved by norms and
    such.
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
        return {"scale": scale, "zero_point": torch.round(steps).clamp(0, element.max).to(torch.uint8)}, scale

    def layout(self, grid: tuple[int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {"scale": (torch.float32, grid), "zero_point": (torch.uint8, grid)}


affine = Affine("affine")


GROUP = 256
MAP = codebooks.dynamic8


class DoubleAbsmax(Absmax):
    """Absmax scales that are quantized themselves: minus their mean, in groups of 256, as codes of the dynamic map with
    an absmax scale each.

    Elements are divided by the scale before it is quantized, and multiplied by it afterwards.

    Source: Dettmers et al. 2023, arXiv 2305.14314, section 3 (double quantization), as in bitsandbytes.
    """

    holds = MAP.name

    def scale(self, x: Tensor, tile: Tile, element: Format) -> tuple[Stored, Tensor]:
        return self.compressed(super().scale(x, tile, element)[1], element)

    def compressed(self, exact: Tensor, element: Format) -> tuple[Stored, Tensor]:
        """The stored tensors for these tiles' scales; and the scales, NaN in groups with one that is not finite."""
        known = exact[exact.isfinite()]
        offset = (
            known.double().mean() if known.numel() else torch.zeros((), device=exact.device, dtype=torch.float32)
        ).float()
        rest = (exact - offset).flatten()
        group_scale = _groups(rest).abs().nan_to_num(0).amax(1)
        codes = encode((rest / _spread(group_scale, rest)).nan_to_num(0), MAP).view(exact.shape)
        stored = {"scale": codes, "scale_scale": group_scale, "scale_offset": offset}
        # The codes have no NaN, so one scale that is not finite makes the scale of its group NaN.
        stored["scale_scale"] = torch.where(_groups(rest).isnan().any(1), torch.nan, group_scale)
        return stored, torch.where(self.multiplier(stored, element).isnan(), torch.nan, exact)

    def multiplier(self, stored: Stored, element: Format) -> Tensor:
        rest = decode(stored["scale"], MAP).flatten()
        scale = rest * _spread(stored["scale_scale"], rest) + stored["scale_offset"]
        limit = torch.finfo(torch.float32).max  # a scale that was rounded up must not become infinite
        return scale.clamp(-limit, limit).view(stored["scale"].shape)

    def layout(self, grid: tuple[int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {
            "scale": (torch.uint8, grid),
            "scale_scale": (torch.float32, (-(-grid[0] * grid[1] // GROUP),)),
            "scale_offset": (torch.float32, ()),
        }


def _groups(scales: Tensor) -> Tensor:
    return F.pad(scales, (0, -scales.numel() % GROUP)).view(-1, GROUP)


def _spread(group_scale: Tensor, like: Tensor) -> Tensor:
    return group_scale.repeat_interleave(GROUP)[: like.numel()]


double_absmax = DoubleAbsmax("double_absmax")
