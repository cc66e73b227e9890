"""Residual stacks: blocks one after another, whose number the learning rates depend on."""

from __future__ import annotations

from typing import Any

from torch import nn

from halfstep.unit.modules.transformer import TransformerLayer
from halfstep.unit.residual import Residual, equal_shares


class Stack(nn.Sequential):
    """An nn.Sequential of residual blocks, whose parameters have the depth len(stack) in their roles (`unit.roles`).

    The depth follows blocks that are added or taken away later. The official unit-scaling library counts blocks, as
    this does; Aleph Alpha's code counts residual layers, two a block, which multiplies the stack's learning rates by
    2^-1/2.
    """

    @property
    def _halfstep_depth(self) -> int:
        return len(self)


class TransformerStack(Stack):
    """So many `TransformerLayer`s, each with its two ratios from a residual scheme.

    Args:
        layers: blocks, of two residual layers each.
        residual: `unit.equal_shares(...)` (u-muP), `unit.fixed(...)` (munit scaling), `unit.running_mean()`, or a
            function of a residual layer's index and their number.
        options: as `TransformerLayer` takes them.
    """

    def __init__(
        self, layers: int, width: int, heads: int, *, residual: Residual | None = None, **options: Any
    ) -> None:
        scheme = equal_shares() if residual is None else residual
        ratios = [scheme(index, 2 * layers) for index in range(2 * layers)]
        pairs = zip(ratios[::2], ratios[1::2], strict=True)
        super().__init__(*(TransformerLayer(width, heads, ratios=pair, **options) for pair in pairs))
