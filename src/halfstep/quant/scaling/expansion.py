"""Dynamic range expansion: a tile's magnitudes are raised to a power so that they fill the element format's range."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halfstep.errors import QuantizationError
from halfstep.formats import Float, Format
from halfstep.quant.logarithm import exp2, log2
from halfstep.quant.scaling.base import NonlinearScaling, Stored
from halfstep.quant.tile import Tile


SMALLEST, LARGEST = 2.0**-4, 8.0
"""Bounds of the exponent."""
SPAN = 2.0**-126
"""Magnitudes below this fraction of their tile's largest count as that fraction, and may become 0."""
_WIDEST = 2.0**40


@dataclass(frozen=True)
class Expansion(NonlinearScaling):
    """element = sign(x) (|x| / center)^exponent / scale; x ~ sign(element) (|element| scale)^(1 / exponent) center.

    With M and m the largest and the smallest nonzero magnitude of a tile: center = sqrt(M m), scale = (M /
    center)^exponent / max, and exponent = log2(range) / log2(M / m), in [1/16, 8] (tiles of one magnitude have 8).
    Zeros stay zeros; a tile of zeros counts as one of ones. All in float32, whatever the input, with `quant.logarithm`:
    an element is 2^(exponent log2(|x| / center) - log2 scale), a value is 2^((log2 |element| + log2 scale) (1 /
    exponent)) center.

    `expansion` is the paper's: range = max / smallest of the format (E4M3: 229376). `expansion_sixteenths` is the
    released kernel's: range = max^2 / 2 (100352), and the exponent rounded down to sixteenths. The kernel adds 1e-30 to
    both magnitudes, and takes a zero that comes first for the smallest; this does neither.

    Source: Xi et al. 2025 (COAT), arXiv 2410.19313, section 4; NVlabs/COAT, fp8_adamw_expand. The bound of 8 is that of
    its tests' reference.
    """

    sixteenths: bool = field(repr=False)

    def scale(self, x: Tensor, tile: Tile, element: Format) -> tuple[Stored, Tensor]:
        range_, magnitude = log2_range(element, self.sixteenths), x.abs().float()
        largest = tile.reduce(magnitude, "amax")
        smallest = tile.reduce(magnitude.masked_fill(magnitude == 0, math.inf), "amin", fill=math.inf)
        lost = ~largest.isfinite()
        ones = lost | (largest == 0)
        largest, smallest = torch.where(ones, 1.0, largest), torch.where(ones, 1.0, smallest)
        smallest = torch.maximum(smallest, largest * SPAN)
        span = log2(largest / smallest)
        exponent = (span.reciprocal() * range_).clamp(max=LARGEST)
        if self.sixteenths:
            exponent = torch.floor(exponent * 16) * 0.0625
        exponent = exponent.clamp(min=SMALLEST)
        center = smallest * exp2(span * 0.5)
        scale = exp2(exponent * log2(largest / center) - log2_of(element.max))
        stored = {"scale": torch.where(lost, torch.nan, scale), "exponent": exponent, "center": center}
        return stored, stored["scale"]

    def elements(self, x: Tensor, stored: Stored, tile: Tile, element: Format) -> Tensor:
        scale, exponent, center = (tile.spread(stored[part], *x.shape) for part in ("scale", "exponent", "center"))
        ratio = x.abs().float() / center
        magnitude = exp2(exponent * log2(ratio) - log2(scale))
        return torch.where(scale.isnan(), 0.0, torch.where(ratio == 0, 0.0, magnitude).copysign(x))

    def values(self, elements: Tensor, stored: Stored, tile: Tile, element: Format) -> Tensor:
        scale, exponent, center = (
            tile.spread(stored[part], *elements.shape) for part in ("scale", "exponent", "center")
        )
        magnitude = elements.abs()
        values = exp2((log2(magnitude) + log2(scale)) * exponent.reciprocal()) * center
        values = torch.where(magnitude == 0, 0.0, values).copysign(elements)
        return torch.where(scale.isnan() | elements.isnan(), torch.nan, values)

    def layout(self, grid: tuple[int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return dict.fromkeys(("scale", "exponent", "center"), (torch.float32, grid))


def log2_range(element: Format, sixteenths: bool) -> float:
    """log2 of the range that a tile's magnitudes are expanded to, a float32.

    Raises:
        QuantizationError: the format is not a floating-point one, or its range is so wide that there is nothing to
            gain.
    """
    if not isinstance(element, Float) or element.max / element.smallest > _WIDEST:
        raise QuantizationError(
            f"range expansion onto {element.name}: expected a floating-point format of at most 40 powers of two, such "
            "as e4m3fn"
        )
    return log2_of(element.max * element.max / 2 if sixteenths else element.max / element.smallest)


def log2_of(number: float) -> float:
    """The binary logarithm of a number, rounded to float32."""
    return float(torch.tensor(math.log2(number), dtype=torch.float64, device="cpu").float())


expansion = Expansion("expansion", sixteenths=False)
expansion_sixteenths = Expansion("expansion_sixteenths", sixteenths=True)
