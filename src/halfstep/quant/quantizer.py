"""A quantizer: how one operand is rounded."""

from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.formats import Format
from halfstep.quant.cast import round_to


@dataclass(frozen=True)
class Quantizer:
    """How one operand is rounded: onto `format`, elementwise, with a rounding mode and an overflow rule."""

    format: Format
    rounding: str = "nearest_even"
    overflow: str = "saturate"

    def __call__(self, x: Tensor, generator: torch.Generator | int | None = None) -> Tensor:
        """The values of x in the format, in x's dtype and shape (`halfstep.round_to`)."""
        return round_to(x, self.format, self.rounding, self.overflow, generator)
