"""Products of operands that nothing rounds, with derivatives of any order.

Their gradients are such products too; vmap and forward mode go through them.
"""

import math
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels import carried
from halfstep.ops.function import apart, is_derived, no_autocast, run
from halfstep.ops.matmul import matmul
from halfstep.recipe import LinearSpec


Factors = tuple[float, float, float, float]
"""What y, and the gradients of x, of the weight and of the bias, are multiplied by."""
_NONE = (None, None, None, None)


def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None, factors: Factors | None = None) -> Tensor:
    """x (..., in) times weight (out, in) transposed, plus bias (out), in their own dtype: `ops.matmul`.

    A second derivative is that of the gradients as they are: of a product with a factor.
    """
    return run(_Plain, x, weight, bias, factors)  # type: ignore[no-any-return]


def factors_of(spec: LinearSpec, rows: int, fan_out: int, fan_in: int) -> Factors | None:
    """The numbers of a spec's multipliers for a layer's products with so many rows; None where it has none."""
    if not spec.multiplies:
        return None
    sizes = (rows, fan_in, fan_out), (rows, fan_out, fan_in), (fan_out, rows, fan_in), (fan_out, rows, 1)
    multipliers = [p.multiplier for p in (spec.output, spec.grad_input, spec.grad_weight, spec.grad_weight)]
    found = [1.0 if m is None else m.of(*size) for m, size in zip(multipliers, sizes, strict=True)]
    return found[0], found[1], found[2], found[3]


def _alike(factor: float) -> Factors:
    """Those of a product with a factor, as its derivatives have them: its gradients have it too."""
    return factor, factor, factor, 1.0


def plain_stacked(x: Tensor, weight: Tensor, dtype: torch.dtype, factors: Factors | None = None) -> Tensor:
    """x (..., rows, in) times weight (..., out, in) transposed, both in `dtype`, in float32 and left so."""
    return run(_Stacked, x, weight, dtype, factors)  # type: ignore[no-any-return]


def matrix(x: Tensor) -> Tensor:
    """x with all dimensions but the last flattened to rows: itself where it is a matrix."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def unflatten(y: Tensor, x: Tensor) -> Tensor:
    """The rows of y, a tensor that nothing else refers to, as those of x: no view to autograd, whose views a layer's
    output may not be where a user writes to it (`y += x`, `ReLU(inplace=True)`)."""
    return torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], y.shape[-1]))  # type: ignore[no-any-return]


class _Plain(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, factors: Factors | None) -> Tensor:
        multiplier = None if factors is None else factors[0]
        with no_autocast(x):
            return apart(unflatten(matmul(matrix(x), weight.t(), bias, None, x.dtype, multiplier=multiplier), x))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.save_for_forward(*inputs[:2])
        ctx.factors = inputs[3]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = matrix(grads[0])
        product = _derived if is_derived() else _last
        _, first, second, third = ctx.factors or _NONE
        grad_x = grad_weight = grad_bias = None
        with no_autocast(rows):
            if ctx.needs_input_grad[0]:
                grad_x = product(rows, weight, first).view(x.shape)
            if ctx.needs_input_grad[1]:
                grad_weight = product(rows.t(), matrix(x), second)
            if ctx.needs_input_grad[2]:
                grad_bias = rows.sum(0) if third is None else _sum(rows, third)
        return grad_x, grad_weight, grad_bias, None

    @staticmethod
    def tangent(ctx: Any, *tangents: Tensor | None) -> Tensor:
        (x, weight), (dx, dweight, dbias, _) = ctx.saved_tensors, tangents
        factors = None if ctx.factors is None else _alike(ctx.factors[0])
        terms = [] if dbias is None else [dbias.expand(*x.shape[:-1], weight.shape[0])]
        terms += [] if dx is None else [plain(dx, weight, None, factors)]
        terms += [] if dweight is None else [plain(x, dweight, None, factors)]
        return sum(terms[1:], terms[0])


def _derived(lhs: Tensor, rhs: Tensor, factor: float | None) -> Tensor:
    """lhs (rows, shared) times rhs (shared, columns), whose derivative may be taken too."""
    return plain(lhs, rhs.t(), None, None if factor is None else _alike(factor))


def _last(lhs: Tensor, rhs: Tensor, factor: float | None) -> Tensor:
    """The same product without autograd: no derivative of it is taken."""
    return matmul(lhs, rhs, None, None, lhs.dtype, multiplier=factor)


def _sum(rows: Tensor, factor: float) -> Tensor:
    """The sum of the rows times a factor, rounded once."""
    return (rows.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32)) * factor).to(rows.dtype)


class _Stacked(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, dtype: torch.dtype, factors: Factors | None) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            lhs, rhs = (matrix(operand).to(dtype).view(operand.shape) for operand in (x, weight))
            return apart(carried.run_stacked(lhs, rhs.mT, None if factors is None else factors[0]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, ctx.dtype, ctx.factors = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        first = second = None
        if ctx.factors is not None:
            first, second = _alike(ctx.factors[1]), _alike(ctx.factors[2])
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = plain_stacked(grads[0], weight.mT, ctx.dtype, first).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = plain_stacked(grads[0].mT, x.mT, ctx.dtype, second).to(weight.dtype)
        return grad_x, grad_weight, None, None
