"""A linear layer as three products of quantised operands."""

from typing import Any

import torch
from torch import Tensor

from halfstep.ops.casts import values
from halfstep.ops.matmul import matmul
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
        ctx.spec, ctx.dtype, ctx.shape = spec, dtype, x.shape
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        rows = x.reshape(-1, x.shape[-1])
        # An operand that no backward product rounds is saved as the product will use it: in 16 bits under autocast.
        ctx.save_for_backward(
            rows if spec.grad_weight.rhs else rows.to(dtype), weight if spec.grad_input.rhs else weight.to(dtype)
        )
        with torch.autocast(device, enabled=False):
            lhs, rhs = _rounded(rows, spec.output.lhs, dtype), _rounded(weight, spec.output.rhs, dtype)
            y = matmul(lhs, rhs.t(), None if bias is None else bias.to(dtype))
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        spec, dtype = ctx.spec, ctx.dtype
        rows = grads[0].reshape(-1, grads[0].shape[-1])
        grad_x = grad_weight = grad_bias = None
        with torch.autocast(rows.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                product = spec.grad_input
                grad_x = matmul(_rounded(rows, product.lhs, dtype), _rounded(weight, product.rhs, dtype))
                grad_x = grad_x.view(ctx.shape).to(ctx.dtypes[0])
            if ctx.needs_input_grad[1]:
                product = spec.grad_weight
                grad_weight = matmul(_rounded(rows, product.lhs, dtype).t(), _rounded(x, product.rhs, dtype))
                grad_weight = grad_weight.to(ctx.dtypes[1])
            if ctx.needs_input_grad[2]:
                grad_bias = rows.sum(0).to(ctx.dtypes[2])
        return grad_x, grad_weight, grad_bias, None


def _rounded(x: Tensor, quantizer: Quantizer | None, dtype: torch.dtype) -> Tensor:
    return (x if quantizer is None else values(x, quantizer)).to(dtype)
