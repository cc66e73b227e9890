"""Power-of-two scales: stored as an exponent (E8M0), the rules of the MX formats; or fixed beforehand."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import frexp, isfinite, nan, nextafter

import torch
from torch import Tensor

from halfstep.formats import Float, Format, Integer
from halfstep.quant.family import power_of_two
from halfstep.quant.scaling.base import Scaling, Stored, check_power, over
from halfstep.quant.tile import Tile
from halfstep.quant.tracing import has_memory


_FRACTION, _HALF = (1 << 52) - 1, 1022 << 52
"""The fraction bits of a float64, and the exponent bits of values in [1/2, 1)."""


@dataclass(frozen=True)
class PowerOfTwoScaling(Scaling):
    """scale = 2^k with k from `carry`, clamped to [-127, 127] and stored as the byte k + 127.

    A tile of zeros has byte 0, one with an infinity or NaN byte 255 (NaN).
    """

    carry: Callable[[Format], float] = field(repr=False)
    """The f from which on k is 1 larger: for a tile's amax = f * 2^e, f in [1/2, 1), k = e - floor(log2 max) - 1, plus
    1 where f >= carry."""
    margin: int = 0
    """Added to k: leaves that many powers of two free between the tile's amax and the format's largest value."""

    exact = True
    holds = "float8_e8m0fnu"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_power(self, "margin")

    def scale(self, x: Tensor, tile: Tile, element: Format) -> tuple[Stored, Tensor]:
        stored = {"scale": self._byte(tile.reduce(x.abs(), "amax").double(), element)}
        return stored, self.multiplier(stored, element)

    def factor(self, amax: Tensor, element: Format) -> Tensor:
        if amax.is_cpu and amax.dim() == 0 and has_memory(amax):  # the same result without twenty calls of torch
            return torch.scalar_tensor(2.0 ** -self._exponent(amax.item(), element), dtype=torch.float32, device="cpu")
        return self.multiplier({"scale": self._byte(amax.double(), element)}, element).reciprocal()

    def power(self, element: Format) -> tuple[float, int]:
        return self.carry(element), frexp(element.max)[1] - self.margin

    def _byte(self, amax: Tensor, element: Format) -> Tensor:
        carry, exponent = self.power(element)
        bits = amax.view(torch.int64)  # by bits, since Inductor cannot compile frexp for CPUs without AVX-512
        fraction = (bits & _FRACTION | _HALF).view(torch.float64)
        byte = ((bits >> 52) - 1022 - exponent + (fraction >= carry)).clamp(-127, 127) + 127
        return torch.where(amax == 0, 0, torch.where(amax.isfinite(), byte, 255)).to(torch.uint8)

    def _exponent(self, amax: float, element: Format) -> float:
        """The k of a tile's scale 2^k."""
        if amax == 0 or not isfinite(amax):
            return -127 if amax == 0 else nan
        carry, exponent = self.power(element)
        fraction, power = frexp(amax)
        return min(max(power - exponent + (fraction >= carry), -127), 127)

    def multiplier(self, stored: Stored, element: Format) -> Tensor:
        byte = stored["scale"].long()
        return torch.where(byte == 255, torch.nan, power_of_two(byte - 127)).float()

    def layout(self, grid: tuple[int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {"scale": (torch.uint8, grid)}


def _floor(element: Format) -> float:
    """floor(log2 amax) - floor(log2 max): the OCP rule. The largest element may saturate."""
    return 1.0  # f is always smaller


def _ceil(element: Format) -> float:
    """ceil(log2 amax) - floor(log2 max)."""
    return nextafter(0.5, 1.0)


def _even(element: Format) -> float:
    """The OCP rule after rounding amax, half up, to the element's significand."""
    of_floats = element.mantissa_bits if isinstance(element, Float) else 0
    return 1 - 2.0 ** -((element.fraction_bits if isinstance(element, Integer) else of_floats) + 2)


def _rceil(element: Format) -> float:
    """ceil(log2(amax / max)): the smallest power of two with which no element saturates."""
    return nextafter(frexp(element.max)[0], 1.0)


def _below(element: Format) -> float:
    """floor(log2(amax / max)) + 1: the smallest power of two with which every element is below the largest value."""
    return frexp(element.max)[0]


floor = PowerOfTwoScaling("floor", _floor)
ceil = PowerOfTwoScaling("ceil", _ceil)
even = PowerOfTwoScaling("even", _even)
rceil = PowerOfTwoScaling("rceil", _rceil)
below = PowerOfTwoScaling("below", _below)


class ThreeQuarters(Scaling):
    """scale = 4/3 * 2^k, where 2^k is the scale of `below` for 3/4 of the values; k is stored.

    For E2M1 that is 2^k = 2^(floor(log2 amax) - 2), the OCP rule's, under which a tile's largest element is in [4, 8);
    three quarters of it is in [3, 6), so stochastic rounding is unbiased for all elements.

    Source: Tseng, Yu and Park 2025, Training LLMs with MXFP4, arXiv 2502.20586, as their code has it.
    """

    holds = below.holds
    multiplies = True
    inner = below

    @property
    def part(self) -> float:
        return 0.75

    def scale(self, x: Tensor, tile: Tile, element: Format) -> tuple[Stored, Tensor]:
        stored, power = below.scale(x * self.part, tile, element)
        return stored, self.part / power

    def multiplier(self, stored: Stored, element: Format) -> Tensor:
        return over(below.multiplier(stored, element), self.part)

    def layout(self, grid: tuple[int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return below.layout(grid)


three_quarters = ThreeQuarters("three_quarters")


@dataclass(frozen=True)
class Fixed(Scaling):
    """scale = 2^-bias, whatever the tensor's values: elements are multiplied by 2^bias, then rounded.

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


fixed = Fixed("fixed")
