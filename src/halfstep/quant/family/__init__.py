"""How each kind of format is rounded, encoded and decoded: pure functions on flat float64 and int64 tensors.

Each module offers

    rounded(x, format, rounding, overflow, noise)   float64 in, the values of the format out, exactly
    encode(values, format)                          values of the format in, int64 codes out
    decode(codes, format)                           int64 codes in, float64 values out

`noise` is None, or for each element a whole number in [0, 2^32): stochastic rounding goes up if and only if
floor(remainder * 2^32) + noise >= 2^32, the remainder measured in gaps between neighbours.
"""

from typing import Protocol, cast

from torch import Tensor

from halfstep.formats import Float, Format, Integer, Posit
from halfstep.quant.family import floating, integer, posit, table


class Family(Protocol):
    """What each module of this room offers."""

    def rounded(self, x: Tensor, format: Format, rounding: str, overflow: str, noise: Tensor | None) -> Tensor: ...

    def encode(self, values: Tensor, format: Format) -> Tensor: ...

    def decode(self, codes: Tensor, format: Format) -> Tensor: ...


_ARITHMETIC = {Float: floating, Integer: integer, Posit: posit}


def of(format: Format) -> Family:
    """The module that knows this kind of format; one that is listed code by code needs no arithmetic of its own."""
    return cast(Family, _ARITHMETIC.get(type(format), table))
