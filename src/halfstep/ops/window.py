"""How the filters of a convolution move over their input; and one with factors on its three products."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.ops.function import apart, run
from halfstep.ops.plain import Factors
from halfstep.recipe import LinearSpec, Matmul


@dataclass(frozen=True)
class Window:
    """How the filters of a convolution move over their input; the tuples have an entry a dimension of space."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    """Zeros on both sides."""
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()
    """Of a transposed convolution."""
    margins: tuple[int, ...] = ()
    """What else is put around the input, first of all: widths as `torch.nn.functional.pad` takes them."""
    mode: str = "constant"
    """What stands in the margins: `pad`'s modes."""

    def widened(self, x: Tensor) -> Tensor:
        """The input with its margins."""
        return F.pad(x, self.margins, self.mode) if any(self.margins) else x

    def is_pointwise(self, sizes: torch.Size) -> bool:
        """Whether each place of the output is a linear function of the same place of the input alone, for filters of
        those sizes."""
        still = all(size == 1 for size in (*sizes, *self.stride)) and not any((*self.padding, *self.output_padding))
        return still and self.groups == 1

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """torch's convolution of operands of one dtype."""
        return torch.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, self.transposed, self._beyond(), self.groups
        )

    def grad_input(self, grad: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        """The gradient of an input of that shape."""
        return self._backward(grad, grad.new_empty(shape), weight, 0)

    def grad_weight(self, grad: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        """The gradient of a weight of that shape."""
        return self._backward(grad, x, grad.new_empty(shape), 1)

    def multiplier(self, product: Matmul, x: torch.Size, weight: torch.Size, of: str = "output") -> float | None:
        """The number that a product of an input and a weight of those shapes is multiplied by; None where it has none.

        A row is a place and a column a channel, of all images; what is shared are the terms of a sum, of which zeros of
        the padding are some: of a place of the output in / groups times the window's places, of a place of the input
        out / groups times those over the strides, and of a weight the places.

        Args:
            of: `output`, `grad_input`, `grad_weight` or `grad_bias`.
        """
        if product.multiplier is None:
            return None
        before, beyond = math.prod(x[2:]), math.prod(self._places(x[2:], weight[2:]))
        taps, moved = math.prod(weight[2:]), math.prod(self.stride)
        fan_in, fan_out = float(weight[1] * taps), weight[0] / self.groups * taps / moved
        places, terms, channels = x[0] * beyond, x[0] * beyond, weight[0]
        if self.transposed:
            fan_in, fan_out = fan_out, fan_in
            terms, channels = x[0] * before, weight[1] * self.groups
        sizes = {
            "output": (places, fan_in, fan_out),
            "grad_input": (x[0] * before, fan_out, fan_in),
            "grad_weight": (channels, terms, fan_in),
            "grad_bias": (channels, places, 1),
        }
        return product.multiplier.of(*sizes[of])

    def _places(self, sizes: Sequence[int], filters: Sequence[int]) -> list[int]:
        """The places of the output along each dimension of space."""
        along = list(zip(sizes, filters, self.stride, self.padding, self.dilation, strict=True))
        if self.transposed:
            last = [(n - 1) * s - 2 * p + d * (k - 1) + 1 for n, k, s, p, d in along]
            return [n + more for n, more in zip(last, self._beyond(), strict=True)]
        return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in along]

    def _backward(self, grad: Tensor, x: Tensor, weight: Tensor, which: int) -> Tensor:
        window = (self.stride, self.padding, self.dilation, self.transposed, self._beyond(), self.groups)
        wanted = [which == 0, which == 1, False]
        return torch.ops.aten.convolution_backward(grad, x, weight, None, *window, wanted)[which]  # type: ignore[no-any-return]

    def _beyond(self) -> tuple[int, ...]:
        return self.output_padding or (0,) * len(self.stride)


def multiplied(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, spec: LinearSpec) -> Tensor:
    """torch's convolution of operands of one dtype, with the multipliers of a spec that rounds nothing.

    The factors are on the weight, and on the gradients of weight and bias, which are small beside inputs and outputs.
    Its derivatives are of any order.
    """
    named = {"output": spec.output, "grad_input": spec.grad_input, "grad_weight": spec.grad_weight}
    found = [window.multiplier(product, x.shape, weight.shape, name) for name, product in named.items()]
    found.append(window.multiplier(spec.grad_weight, x.shape, weight.shape, "grad_bias"))
    factors = [1.0 if factor is None else factor for factor in found]
    return run(_Multiplied, x, weight, bias, window, tuple(factors))  # type: ignore[no-any-return]


def bias_gradient(grad: Tensor, factor: float | None) -> Tensor:
    """The sum of an output's gradient (batch, out, *places) over all but its channels, times the factor."""
    others = (0, *range(2, grad.dim()))
    if factor is None:
        return grad.sum(others)
    return grad.sum(others, dtype=torch.promote_types(grad.dtype, torch.float32)) * factor


class _Multiplied(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, factors: Factors) -> Tensor:
        return apart(window.apply(x, weight * factors[0], bias))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, ctx.window, ctx.factors = inputs
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), grad, factors = ctx.saved_tensors, grads[0], ctx.factors
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.window.grad_input(grad, weight * factors[1], x.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = ctx.window.grad_weight(grad, x, weight.shape) * factors[2]
        if ctx.needs_input_grad[2]:
            grad_bias = bias_gradient(grad, factors[3])
        return grad_x, grad_weight, grad_bias, None, None

    @staticmethod
    def tangent(ctx: Any, *tangents: Any) -> Tensor:
        (x, weight), (dx, dweight, dbias, *_), window = ctx.saved_tensors, tangents, ctx.window
        terms = [] if dx is None else [window.apply(dx, weight * ctx.factors[0])]
        terms += [] if dweight is None else [window.apply(x, dweight * ctx.factors[0])]
        total: Tensor = sum(terms[1:], terms[0]) if terms else torch.zeros_like(window.apply(x, weight))
        return total if dbias is None else total + dbias.view(-1, *[1] * (x.dim() - 2))
