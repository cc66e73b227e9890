"""A tensor times one factor, rounded; and the largest magnitude that such factors come from."""

import torch
from torch import Tensor

from halfstep.formats import Format
from halfstep.ops.casts import round_to


def round_scaled(x: Tensor, factor: Tensor, format: Format, rounding: str, dtype: torch.dtype) -> Tensor:
    """x * factor, formed in float32 (float64 for float64), rounded onto `format` and saturated, in `dtype`.

    factor is a float32 scalar; one that is NaN makes everything NaN.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return round_to(x.to(wide) * factor.to(wide), format, rounding, dtype=dtype)


def amax_of(x: Tensor) -> Tensor:
    """max |x|, a float32 scalar: 0 for an empty tensor, NaN where there is one."""
    if not x.numel():
        return x.new_zeros((), dtype=torch.float32)
    low, high = torch.aminmax(x.detach())  # one pass, at the speed of memory; abs().amax() would be two
    return torch.maximum(-low, high).float()
