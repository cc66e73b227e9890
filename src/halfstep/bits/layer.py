"""What the codes and scales of a quantised weight hold, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Layer:
    """One quantised weight: the tensor of its codes, and the `parts` beside it."""

    codes: str
    scheme: str
    format: str
    scale: str
    """The type of the scales; "" where there are no scales beside the codes."""
    tile: str
    """What has a scale: "128x128 block", "row", "tensor", "64 codes" ..."""
    values: int
    code_bits: int
    nbytes: int
    """Of codes and parts."""
    parts: tuple[str, ...] = ()
    also: str = ""
    powers: bool = False
    """Whether all scales are powers of two."""

    @property
    def text(self) -> str:
        """What it holds, in words."""
        powers = " (powers of two)" if self.powers else ""
        also = f" {self.also}" if self.also else ""
        if not self.scale:
            return f"{self.format} codes{also}"
        if self.tile == "tensor":
            return f"{self.format} codes with one {self.scale} scale{also}"
        return f"{self.format} codes with a {self.scale} scale{powers} for each {self.tile}{also}"


@dataclass(frozen=True)
class SchemeReport:
    """All layers of one scheme that hold the same."""

    scheme: str
    text: str
    layers: int
    values: int
    nbytes: int

    @property
    def bits(self) -> float:
        """Bits a value, of codes and scales."""
        return 8 * self.nbytes / self.values

    @property
    def size(self) -> str:
        """How many layers, and the bits of a weight."""
        return f"{self.layers} {self.scheme} layer{'s' if self.layers > 1 else ''} of {self.bits:.4g} bits a weight"


def summed(layers: Sequence[Layer]) -> tuple[SchemeReport, ...]:
    """What layers hold, the most values first."""
    order = sorted(layers, key=lambda layer: (layer.scheme, layer.text))
    found = []
    for (scheme, text), group in groupby(order, key=lambda layer: (layer.scheme, layer.text)):
        same = list(group)
        found.append(SchemeReport(scheme, text, len(same), sum(x.values for x in same), sum(x.nbytes for x in same)))
    return tuple(sorted(found, key=lambda one: -one.values))
