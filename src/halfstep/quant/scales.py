"""The scales of a quantizer: which elements share one, and how it is chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace

from halfstep.errors import QuantizationError
from halfstep.quant.scaling import Scaling, StatefulScaling
from halfstep.quant.tile import TENSOR, Tile


@dataclass(frozen=True)
class Scales:
    """The elements of a `tile` share a scale, which a `rule` chooses.

    Raises:
        QuantizationError: a rule that keeps a state, and so one scale a tensor, with other tiles.
    """

    tile: Tile
    rule: Scaling

    def __post_init__(self) -> None:
        if isinstance(self.rule, StatefulScaling) and self.tile != TENSOR:
            raise QuantizationError(f"{self.rule.name} scaling with tile {self.tile}: it keeps one scale a tensor")
        _ = self.rule.text  # known from here on: a traced graph cannot take a cached property's lock

    def __str__(self) -> str:
        return f"{self.rule}, {self.tile}"

    @property
    def transposed(self) -> Scales:
        """The scales of the transposed matrix."""
        return replace(self, tile=self.tile.transposed)
