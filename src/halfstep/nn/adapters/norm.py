"""Layers whose weights torch wants in their input's dtype: an input that arrives wider meets wider weights.

A float32 buffer in a model (a positional encoding) widens the activations, and so does the model's own input.
torch's CPU kernels refuse a float32 input with 16-bit weights, and its CUDA kernels differ; here the few weights are
widened instead, and the layer computes in the input's precision.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


_INSTANCE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
FORWARD_OF = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, *_INSTANCE, *_BATCH, nn.Bilinear)


def forward(stock: Any, module: Any, input: Tensor, *more: Tensor) -> Tensor:
    """The stock forward, except for inputs whose dtype is not the weights'."""
    weight, bias = module.weight, getattr(module, "bias", None)
    if weight is None or all(x.dtype == weight.dtype for x in (input, *more)):
        return stock(module, input, *more)  # type: ignore[no-any-return]
    running = getattr(module, "track_running_stats", False)
    if running:  # its weights are float32, and its buffers are the stock forward's own
        return stock(module, input)  # type: ignore[no-any-return]
    dtype = torch.promote_types(input.dtype, weight.dtype)
    input, weight, bias = input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(input, module.num_groups, weight, bias, module.eps)
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(input, module.normalized_shape, weight, bias, module.eps)
    if isinstance(module, nn.RMSNorm):
        return F.rms_norm(input, module.normalized_shape, weight, module.eps)
    if isinstance(module, nn.Bilinear):
        return F.bilinear(input, more[0].to(dtype), weight, bias)
    module._check_input_dim(input)
    if isinstance(module, _BATCH):
        return F.batch_norm(input, None, None, weight, bias, True, 0.0, module.eps)
    single = input.dim() == module._get_no_batch_dim()
    y = F.instance_norm(input[None] if single else input, None, None, weight, bias, True, 0.0, module.eps)
    return y[0] if single else y
