"""Scaled dot-product attention on the best path that this machine has for its dtype."""

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.kernels import carried


def attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
    """softmax(q k^T / sqrt(d)) v for q, k, v of shape (batch, heads, time, d), in autocast's dtype where it is on.

    Where 16-bit products are carried, the whole of it runs in float32 between one rounding of its inputs and one of
    its output, forward and backward.
    """
    device = query.device
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else query.dtype
    if not carried.supports(dtype, device):
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    with torch.autocast(device.type, enabled=False):
        q, k, v = (operand.to(dtype).float() for operand in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).to(dtype)
