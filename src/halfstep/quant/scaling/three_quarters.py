"""Scales for unbiased FP4 in MX blocks: three quarters of the numbers, under a power of two that clips none of them."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.formats import Format
from halfstep.quant.scaling.base import Scaling, Stored, over
from halfstep.quant.scaling.power_of_two import below
from halfstep.quant.tile import Tile


class ThreeQuarters(Scaling):
    """scale = 4/3 * 2^k, where 2^k is `below`'s for 3/4 of the numbers; its exponent is what is stored.

    For E2M1 that is 2^k = 2^(floor(log2 amax) - 2), the OCP rule's, under which maxima lie in [4, 8); three quarters of
    them lie in [3, 6), so stochastic rounding is right on average for all of them.

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
