"""Convolutions on the best path that this machine has for their dtype."""

from collections.abc import Callable

import torch
from torch import Tensor

from halfstep.kernels import carried


def convolution(
    operation: Callable[[Tensor, Tensor, Tensor | None], Tensor], x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """operation(x, weight, bias), a convolution of any dimension, in autocast's dtype where autocast is on.

    Where 16-bit products are carried, it runs in float32 between one rounding of its operands and one of its result,
    forward and backward: what 16-bit matrix units do, and on CPUs without them twenty times faster for fp16 than torch.
    """
    device = x.device
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else x.dtype
    if not carried.supports(dtype, device):
        return operation(x, weight, bias)
    with torch.autocast(device.type, enabled=False):
        x, weight = x.to(dtype).float(), weight.to(dtype).float()
        return operation(x, weight, None if bias is None else bias.to(dtype).float()).to(dtype)
