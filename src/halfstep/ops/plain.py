"""`matmul`, and differentiable matmuls and sums of unrounded operands with the factors of unit scaling.

`matmul` takes the fastest path of this machine for its dtype. The differentiable ones have derivatives of any order,
vmap and forward mode. A factor of unit scaling multiplies the values alone or the gradient alone.

Source: Blake, Orr and Luschi 2023 (Unit Scaling), section 4: a scaled operation multiplies its output by one constant,
and the gradient of each of its inputs by another.
"""

import math
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import ModelError
from halfstep.kernels import carried, operators
from halfstep.ops.function import apart, is_derived, no_autocast, run
from halfstep.quant import Accumulator
from halfstep.recipe import LinearSpec


# ---- a matmul --------------------------------------------------------------------------------------------------------


def matmul(
    lhs: Tensor,
    rhs: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    accumulate: Accumulator | None = None,
    multiplier: float | None = None,
) -> Tensor:
    """lhs (rows, shared) times rhs (shared, columns), accumulated in float32, times `scale` and `multiplier`, plus
    bias, rounded once.

    Args:
        lhs, rhs: in dtypes that hold their values exactly; the GEMM runs in the wider one.
        bias: (columns).
        scale: a float32 scalar, applied before the result is rounded.
        dtype: the dtype of the result; None: that of lhs.
        multiplier: a factor in addition to the scale: a Python float, so that the host waits for no GPU.
        accumulate: how the terms are summed, if not in float32; scale, bias and the last rounding follow it.
    """
    dtype = dtype or lhs.dtype
    if accumulate is not None:
        product = accumulated(lhs.float(), rhs.float(), accumulate)
        product = product if scale is None else product * scale
        product = product if multiplier is None else product * multiplier
        return (product if bias is None else product + bias).to(dtype)
    wide = lhs.dtype
    if rhs.dtype != wide:
        wide = torch.promote_types(wide, rhs.dtype)
    if wide != dtype or (wide in carried.CARRIED and lhs.is_cpu):
        return carried.run(lhs, rhs, bias, scale, dtype, multiplier)
    if lhs.dtype != rhs.dtype:
        lhs, rhs = lhs.to(wide), rhs.to(wide)
    if scale is not None or multiplier is not None:
        return carried.run_native(lhs, rhs, bias, scale, multiplier)
    return torch.mm(lhs, rhs) if bias is None else torch.addmm(bias.to(dtype), lhs, rhs)


def accumulated(lhs: Tensor, rhs: Tensor, accumulate: Accumulator) -> Tensor:
    """lhs (..., rows, shared) times rhs (..., shared, columns), both and the result float32, summed as `accumulate`
    says."""
    if lhs.dim() > 2:
        stack = [accumulated(a, b, accumulate) for a, b in zip(lhs.flatten(0, -3), rhs.flatten(0, -3), strict=True)]
        return torch.stack(stack).view(*lhs.shape[:-1], rhs.shape[-1]) if stack else lhs @ rhs
    lhs, rhs = lhs.contiguous(), rhs.contiguous()
    out = lhs.new_zeros(lhs.shape[0], rhs.shape[1])
    operators.ACCUMULATE(lhs, rhs, out, accumulate)
    return out


# ---- matmuls with derivatives ----------------------------------------------------------------------------------------

Factors = tuple[float, float, float, float]
"""The factors of y, and of the gradients of x, of the weight and of the bias."""
_NONE = (None, None, None, None)


def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None, factors: Factors | None = None) -> Tensor:
    """x (..., in) times weight (out, in) transposed, plus bias (out), in their own dtype, by `ops.matmul`.

    A second derivative differentiates the gradients as computed, with their factors.
    """
    return run(_Plain, x, weight, bias, factors)  # type: ignore[no-any-return]


def factors_of(spec: LinearSpec, rows: int, fan_out: int, fan_in: int) -> Factors | None:
    """The values of a spec's multipliers for a layer of these sizes; None if it has none."""
    if not spec.multiplies:
        return None
    sizes = (rows, fan_in, fan_out), (rows, fan_out, fan_in), (fan_out, rows, fan_in), (fan_out, rows, 1)
    multipliers = [p.multiplier for p in (spec.output, spec.grad_input, spec.grad_weight, spec.grad_weight)]
    found = [1.0 if m is None else m.of(*size) for m, size in zip(multipliers, sizes, strict=True)]
    return found[0], found[1], found[2], found[3]


def _alike(factor: float) -> Factors:
    """The factors of a matmul with one factor that is differentiated as it is: its gradients have the factor too."""
    return factor, factor, factor, 1.0


def plain_stacked(x: Tensor, weight: Tensor, dtype: torch.dtype, factors: Factors | None = None) -> Tensor:
    """x (..., rows, in) times weight (..., out, in) transposed, both cast to `dtype`; the result is float32."""
    return run(_Stacked, x, weight, dtype, factors)  # type: ignore[no-any-return]


def matrix(x: Tensor) -> Tensor:
    """x with all dimensions but the last flattened to rows; x itself if it is a matrix."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def unflatten(y: Tensor, x: Tensor) -> Tensor:
    """y (rows, out), which must have no other reference, in the shape (*x.shape[:-1], out).

    autograd does not count it as a view. Users may write to a layer's output in place (`y += x`,
    `ReLU(inplace=True)`), which fails for a view that a Function returns."""
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
    """lhs (rows, shared) times rhs (shared, columns), differentiable."""
    return plain(lhs, rhs.t(), None, None if factor is None else _alike(factor))


def _last(lhs: Tensor, rhs: Tensor, factor: float | None) -> Tensor:
    """lhs (rows, shared) times rhs (shared, columns), without autograd."""
    return matmul(lhs, rhs, None, None, lhs.dtype, multiplier=factor)


def _sum(rows: Tensor, factor: float) -> Tensor:
    """The sum of the rows times a factor, rounded once to their dtype."""
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


# ---- unit scaling ----------------------------------------------------------------------------------------------------


def scale_forward(x: Tensor, factor: float) -> Tensor:
    """x times the factor; the gradient of the result is passed on to x unchanged. A factor of 1 returns x itself.

    Raises:
        ModelError: x is not floating, or the factor not finite.
    """
    return scaled(x, factor, 1.0)


def scale_backward(x: Tensor, factor: float) -> Tensor:
    """x unchanged; its gradient is multiplied by the factor. A factor of 1 returns x itself.

    The result is a view of x: torch refuses to write to it in place.

    Raises:
        ModelError: x is not floating, or the factor not finite.
    """
    return scaled(x, 1.0, factor)


def scaled(x: Tensor, forward: float, backward: float) -> Tensor:
    """x times `forward`; x's gradient is that of the result times `backward`.

    Forward-mode derivatives are multiplied by `forward`, as the values are; second derivatives by `backward`.
    """
    if forward == 1 and backward == 1:
        return x
    if not (x.is_floating_point() or x.is_complex()):
        raise ModelError(
            f"a tensor of {x.dtype} to be scaled; expected a floating one: it has no gradient and no scale"
        )
    if not (abs(forward) < math.inf and abs(backward) < math.inf):  # a graph has no `isfinite` of a symbolic float
        raise ModelError(f"factors {forward} and {backward} to scale by; expected finite numbers")
    return run(_Scaled, x, forward, backward)  # type: ignore[no-any-return]


def weighted_sum(x: Tensor, y: Tensor, weights: tuple[float, float], grads: tuple[float, float]) -> Tensor:
    """weights[0] x + weights[1] y, broadcast as by `torch.add`; the factors of the gradients of x and y are `grads`."""
    return run(_Sum, x, y, weights, grads)  # type: ignore[no-any-return]


class _Scaled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, forward: float, backward: float) -> Tensor:
        return x.view_as(x) if forward == 1 else x * forward

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.forward_factor, ctx.backward_factor = inputs[1:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return (grads[0] if ctx.backward_factor == 1 else grads[0] * ctx.backward_factor), None, None

    @staticmethod
    def tangent(ctx: Any, *tangents: Any) -> Tensor:
        tangent: Tensor = tangents[0]
        return tangent.view_as(tangent) if ctx.forward_factor == 1 else tangent * ctx.forward_factor


class _Sum(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor, weights: tuple[float, float], grads: tuple[float, float]) -> Tensor:
        first, second = weights
        if first == second:
            return apart(torch.add(x, y).mul_(first))
        fits = x.shape == y.shape and x.dtype == y.dtype and not torch._C._are_functorch_transforms_active()
        add = Tensor.add_ if fits else torch.add  # in place, into the new tensor x * first
        return apart(add(x * first, y, alpha=second))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, y, ctx.weights, ctx.factors = inputs
        ctx.kinds = (x.shape, x.dtype), (y.shape, y.dtype)
        ctx.result = output.shape, output.dtype

    @staticmethod
    def tangent(ctx: Any, *tangents: Any) -> Tensor:
        shape, dtype = ctx.result
        terms = [t * weight for t, weight in zip(tangents[:2], ctx.weights, strict=True) if t is not None]
        return sum(terms[1:], terms[0]).expand(shape).to(dtype)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (first, second), wanted = ctx.factors, ctx.needs_input_grad
        x = _part(grads[0], ctx.kinds[0], first) if wanted[0] else None
        if x is not None and ctx.kinds[0] == ctx.kinds[1] and first == second:
            return x, x, None, None
        return x, _part(grads[0], ctx.kinds[1], second) if wanted[1] else None, None, None


def _part(grad: Tensor, kind: tuple[torch.Size, torch.dtype], factor: float) -> Tensor:
    """The gradient of one summand: that of the sum, reduced to its shape, times its factor, in its dtype."""
    shape, dtype = kind
    summed = grad if grad.shape == shape else grad.sum_to_size(shape)
    return (summed if factor == 1 else summed * factor).to(dtype)
