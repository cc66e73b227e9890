"""Products of stacks of matrices, such as attention's, whose operands are quantised."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfstep.kernels import carried
from halfstep.ops.operand import Operand, operand
from halfstep.recipe import LinearSpec, Matmul


def stacked_linear(x: Tensor, weight: Tensor, spec: LinearSpec, dtype: torch.dtype) -> Tensor:
    """x (..., rows, in) times weight (..., out, in) transposed: (..., rows, out) in float32.

    Each matrix of the stack is a linear layer's product, and so are the two of its backward; scales of a whole tensor
    are scales of the whole stack.

    Args:
        spec: how the six operands are rounded; its scalings keep no state.
        dtype: of operands that are not rounded.
    """
    return _Stacked.apply(x, weight, spec, dtype)  # type: ignore[no-any-return,no-untyped-call]


class _Stacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, spec: LinearSpec, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.spec, ctx.dtype = spec, dtype
        return _product(x, weight, spec.output, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _product(grads[0], weight.mT, ctx.spec.grad_input, ctx.dtype).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = _product(grads[0].mT, x.mT, ctx.spec.grad_weight, ctx.dtype).to(weight.dtype)
        return grad_x, grad_weight, None, None


def _product(lhs: Tensor, rhs: Tensor, matmul: Matmul, dtype: torch.dtype) -> Tensor:
    """lhs (..., rows, shared) times rhs (..., columns, shared) transposed, both rounded along the shared dimension."""
    with torch.autocast(lhs.device.type, enabled=False):
        a, b = _operand(lhs, matmul.lhs, dtype), _operand(rhs, matmul.rhs, dtype)
        product = carried.run_stacked(a.values, b.values.mT)
        for scale in (a.scale, b.scale):
            product = product if scale is None else product * scale
        return product


def _operand(x: Tensor, quantizer: Any, dtype: torch.dtype) -> Operand:
    made = operand(x.reshape(-1, x.shape[-1]), quantizer, dtype).widened(dtype)
    return Operand(made.values.view(x.shape), made.scale)
