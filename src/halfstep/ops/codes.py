"""A whole tensor as codes of torch's own dtypes times one power of two; gradients kept so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfstep import formats
from halfstep.errors import OptimizerError
from halfstep.ops.scaled import amax_of
from halfstep.quant.scaling import get_scaling


_SCALE = "halfstep_scale"  # a gradient carries its scale, so that whatever drops the one drops the other


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


class _Values(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(codes: Tensor, scale: Tensor) -> Tensor:
        return codes.float() * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def values_of(codes: Tensor, scale: Tensor) -> Tensor:
    """codes * scale, in float32; the gradient of the values is the codes' gradient, unscaled and in float32."""
    return _Values.apply(codes, scale)  # type: ignore[no-any-return,no-untyped-call]


def encode_grad(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient as codes that carry their scale, for `parameter.grad`; `grad_values` reads it."""
    codes, scale = encode_scaled(grad.detach(), dtype)
    setattr(codes, _SCALE, scale)
    return codes


def multiply_encoded(grad: Tensor, factor: float) -> None:
    """Multiply a gradient kept as codes, in place and in float32: its scale takes the factor, its codes stay.

    The scale was a power of two, so the values are what multiplying the decoded ones would have given, bit for bit.
    """
    setattr(grad, _SCALE, getattr(grad, _SCALE) * factor)


def is_encoded(grad: Tensor) -> bool:
    """Whether a gradient is kept as codes.

    Raises:
        OptimizerError: codes without their scale.
    """
    if hasattr(grad, _SCALE):
        return True
    if grad.dtype.itemsize == 1:
        raise OptimizerError(
            f"a {grad.dtype} gradient without its scale, which a copy leaves behind; assign parameter.grad the float32 "
            "values (halfstep.ops.grad_values), and the optimizer rounds them"
        )
    return False


def grad_values(grad: Tensor) -> Tensor:
    """The values of `parameter.grad` under any recipe: float32 of a gradient kept as codes, any other as it is.

    Raises:
        OptimizerError: codes without their scale.
    """
    return decode_scaled(grad, getattr(grad, _SCALE)) if is_encoded(grad) else grad
