"""A whole tensor as codes of torch's own dtypes times one power of two."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep import formats
from halfstep.ops.casts import amax_of
from halfstep.quant.scaling import get_scaling


def encode_scaled(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes in `dtype`, each rounded to nearest-even once, and their scale: x ~ codes * scale.

    scale, a float32 scalar, is the smallest power of two with amax / scale <= max, so amax / scale lies in
    (max / 2, max]. An infinity or NaN makes everything NaN.

    Source: MS-AMP, ScalingMeta.compute_scaling_factor, whose factor is 1 / scale.
    """
    factor = get_scaling("rceil").factor(amax_of(x), formats.get(dtype))
    assert factor is not None
    return (x.float() * factor).to(dtype), factor.reciprocal()


def decode_scaled(codes: Tensor, scale: Tensor) -> Tensor:
    """codes * scale, in float32, exactly."""
    return codes.to(torch.float32, copy=True).mul_(scale)
