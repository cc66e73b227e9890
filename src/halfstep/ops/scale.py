"""The two verbs of unit scaling, a factor on the values alone or on the gradient alone; and a sum with such factors.

Source: Blake, Orr and Luschi 2023 (Unit Scaling), section 4: a scaled operation multiplies its output by one constant,
and the gradient of each of its inputs by another.
"""

import math
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import ModelError
from halfstep.ops.function import apart, run


def scale_forward(x: Tensor, factor: float) -> Tensor:
    """x times the factor; its gradient is that of the product, as it comes. A factor of 1 returns x itself.

    Raises:
        ModelError: x is not floating, or the factor not finite.
    """
    return scaled(x, factor, 1.0)


def scale_backward(x: Tensor, factor: float) -> Tensor:
    """x as it is; its gradient is multiplied by the factor. A factor of 1 returns x itself.

    The result shares x's memory: torch refuses to write to it in place.

    Raises:
        ModelError: x is not floating, or the factor not finite.
    """
    return scaled(x, 1.0, factor)


def scaled(x: Tensor, forward: float, backward: float) -> Tensor:
    """x times `forward`, whose gradient is multiplied by `backward`.

    Forward-mode derivatives go by `forward`, which is what the values do; a second derivative by `backward`.
    """
    if forward == 1 and backward == 1:
        return x
    if not (x.is_floating_point() or x.is_complex()):
        raise ModelError(
            f"a tensor of {x.dtype} to be scaled; expected a floating one: it has no gradient and no scale"
        )
    if not (abs(forward) < math.inf and abs(backward) < math.inf):  # a graph knows no `isfinite` of an unknown
        raise ModelError(f"factors {forward} and {backward} to scale by; expected finite numbers")
    return run(_Scaled, x, forward, backward)  # type: ignore[no-any-return]


def weighted_sum(x: Tensor, y: Tensor, weights: tuple[float, float], grads: tuple[float, float]) -> Tensor:
    """weights[0] x + weights[1] y, broadcast as by `torch.add`; the gradients of x and y have the factors `grads`."""
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
        add = Tensor.add_ if fits else torch.add  # in place, into a tensor of its own
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
    """An operand's share of a sum's gradient, in its shape and dtype."""
    shape, dtype = kind
    summed = grad if grad.shape == shape else grad.sum_to_size(shape)
    return (summed if factor == 1 else summed * factor).to(dtype)
