"""Quantise inside autograd."""

from typing import Any

import torch
from torch import Tensor

from halfstep.quant import Quantizer


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Quantizer) -> Tensor:
        return quantizer(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def quantize(x: Tensor, quantizer: Quantizer) -> Tensor:
    """The quantizer's values of x; the gradient passes as if nothing had been rounded (straight-through).

    Source: Bengio, Leonard and Courville 2013, arXiv 1308.3432.
    """
    return _StraightThrough.apply(x, quantizer)  # type: ignore[no-any-return,no-untyped-call]
