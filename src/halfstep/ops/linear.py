"""A linear layer as three products of quantised operands."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.quant import Quantizer
from halfstep.recipe import LinearSpec


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Tensor:
    """y = x w^T + b, whose forward product and whose two backward products round their operands as `spec` says.

    x is (..., in), weight (out, in), bias (out), y (..., out). Operands are rounded from the dtype they arrive in;
    the products run in autocast's dtype where autocast is on. An empty spec equals `torch.nn.functional.linear`.
    """
    return _Linear.apply(x, weight, bias, spec)  # type: ignore[no-any-return,no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        ctx.spec, ctx.dtype, ctx.biased = spec, dtype, bias is not None
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.save_for_backward(x, weight)
        with torch.autocast(device, enabled=False):
            lhs, rhs = _rounded(x, spec.output.lhs, dtype), _rounded(weight, spec.output.rhs, dtype)
            return F.linear(lhs, rhs, None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad, spec, dtype = grads[0], ctx.spec, ctx.dtype
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            product = _rounded(rows, spec.grad_input.lhs, dtype) @ _rounded(weight, spec.grad_input.rhs, dtype)
            grad_x = product.view(x.shape).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            flat = x.reshape(-1, x.shape[-1])
            left, right = (
                _rounded(rows, spec.grad_weight.lhs, dtype),
                _rounded(flat, spec.grad_weight.rhs, dtype),
            )
            grad_weight = (left.t() @ right).to(ctx.dtypes[1])
        if ctx.biased and ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0).to(ctx.dtypes[2])
        return grad_x, grad_weight, grad_bias, None


def _rounded(x: Tensor, quantizer: Quantizer | None, dtype: torch.dtype) -> Tensor:
    return (x if quantizer is None else quantizer(x)).to(dtype)
