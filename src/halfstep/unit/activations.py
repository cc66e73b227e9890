"""Unit-scaled activation functions, gated SiLU and softmax, each one autograd Function that scales in place.

The forward multiplies its new result in place, the backward its new gradient. They save for backward what torch saves.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.ops.function import apart, run
from halfstep.unit import factors
from halfstep.unit.calibration import Constraint, get_constraint, tied


_aten: Any = torch.ops.aten
IN_PLACE = ("gelu", "gelu_tanh", "silu", "relu")
"""Activations whose backward needs their input or the sign of their result, so that the result may be scaled in
place."""


def gelu(
    input: Tensor, approximate: str = "none", *, mult: float = 1.0, constraint: str | Constraint | None = "to_output"
) -> Tensor:
    """gelu(mult x) / mult, scaled to unit variance."""
    return _activation(input, "gelu" if approximate == "none" else f"gelu_{approximate}", mult, constraint)


def silu(input: Tensor, *, mult: float = 1.0, constraint: str | Constraint | None = "to_output") -> Tensor:
    """silu(mult x) / mult = x sigmoid(mult x), scaled to unit variance."""
    return _activation(input, "silu", mult, constraint)


def relu(input: Tensor, *, constraint: str | Constraint | None = "to_output") -> Tensor:
    """relu(x), scaled to unit variance."""
    return _activation(input, "relu", 1.0, constraint)


def tanh(input: Tensor, *, mult: float = 1.0, constraint: str | Constraint | None = "to_output") -> Tensor:
    """tanh(mult x) / mult, scaled to unit variance."""
    return _activation(input, "tanh", mult, constraint)


def sigmoid(input: Tensor, *, mult: float = 1.0, constraint: str | Constraint | None = "to_output") -> Tensor:
    """sigmoid(mult x) / mult, scaled to unit variance; its mean is not zero."""
    return _activation(input, "sigmoid", mult, constraint)


def gated_silu(
    input: Tensor, gate: Tensor, *, mult: float = 1.0, constraint: str | Constraint | None = "to_output"
) -> Tensor:
    """x silu(mult gate) / mult, scaled to unit variance: the gated product of SwiGLU.

    The gradient of a broadcast operand is a sum over its copies, and its factor is smaller by copies^-1/2 before the
    constraint ties it; a warning says what to do if the tied factor is too large.
    """
    ideal, copies = factors.gated_silu(mult), factors.broadcast(tuple(input.shape), tuple(gate.shape))
    ideal = ideal[0], ideal[1] * copies[0], ideal[2] * copies[1]
    output, *grads = tied("gated_silu", constraint, ideal, (input, gate), copies)
    if input.shape != gate.shape:
        input, gate = torch.broadcast_tensors(input, gate)  # type: ignore[no-untyped-call]
    return run(_Gated, input, gate, mult, output / mult, *grads)[0]  # type: ignore[no-any-return]


def softmax(
    input: Tensor,
    dim: int,
    dtype: torch.dtype | None = None,
    *,
    mult: float = 1.0,
    constraint: str | Constraint | None = "to_output",
) -> Tensor:
    """softmax(mult x) along `dim`, scaled to unit variance: a temperature of 1 / mult.

    16-bit inputs are computed and scaled in float32, since the unscaled 1 / size may be too small for fp16. Under
    autocast the result has the dtype of torch's softmax.
    """
    size = input.shape[dim] if input.dim() else 1
    output, grad = get_constraint(constraint)(*factors.softmax(size, mult))
    if dtype is None:  # ask torch: autocast's lists differ from device to device
        dtype = torch.softmax(input.new_empty(1), 0).dtype
    x = input if mult == 1 else input.to(torch.promote_types(input.dtype, torch.float32)) * mult
    with torch.autocast(input.device.type, enabled=False):
        return run(_Softmax, x, dim, dtype, output, grad)  # type: ignore[no-any-return]


def _activation(x: Tensor, name: str, mult: float, constraint: str | Constraint | None) -> Tensor:
    output, grad = get_constraint(constraint)(*factors.activation(name, mult))
    return times(x, name, output / mult, grad, mult)


def times(x: Tensor, name: str, output: float, grad: float, mult: float = 1.0) -> Tensor:
    """f(mult x) * output for the activation `name`; the gradient is multiplied by f'(mult x) * grad."""
    return run(_Activation, x, name, mult, output, grad)  # type: ignore[no-any-return]


def _times(x: Tensor, factor: float) -> Tensor:
    """x * factor, in place if grad mode is off; x must have no other reference."""
    return x * factor if torch.is_grad_enabled() else x.mul_(factor)


def _sharpened(x: Tensor, mult: float) -> Tensor:
    return x if mult == 1 else x * mult


def value(x: Tensor, name: str) -> Tensor:
    """torch's activation `name` of x."""
    return _FUNCTIONS[name][0](x)


def _gradient(grad: Tensor, kept: Tensor, name: str, mult: float, output: float) -> Tensor:
    """f'(mult x) * grad, from the saved tensor: x, or the scaled result for functions whose result torch saves."""
    return _FUNCTIONS[name][1](grad, kept, mult, output)  # type: ignore[no-any-return]


def _silu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return _aten.silu_backward(grad, x)  # type: ignore[no-any-return]
    share = torch.sigmoid(x)  # torch's kernel has no derivative
    return grad * share * (1 + x * (1 - share))


_FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor, float, float], Any]]] = {
    "gelu": (F.gelu, lambda grad, x, mult, _: _aten.gelu_backward(grad, _sharpened(x, mult), approximate="none")),
    "gelu_tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda grad, x, mult, _: _aten.gelu_backward(grad, _sharpened(x, mult), approximate="tanh"),
    ),
    "silu": (F.silu, lambda grad, x, mult, _: _silu_gradient(grad, _sharpened(x, mult))),
    "relu": (F.relu, lambda grad, y, _, output: _aten.threshold_backward(grad, y, 0)),
    "tanh": (torch.tanh, lambda grad, y, _, output: _aten.tanh_backward(grad, y / output)),
    "sigmoid": (torch.sigmoid, lambda grad, y, _, output: _aten.sigmoid_backward(grad, y / output)),
}
"""By name: torch's function, and a function (grad, saved, mult, output) that returns f'(mult x) * grad."""


class _Activation(torch.autograd.Function):
    """The autograd Function of f(mult x) * output, with the gradient f'(mult x) * grad."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, name: str, mult: float, output: float, grad: float) -> Tensor:
        return apart(_times(value(_sharpened(x, mult), name), output))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.name, ctx.mult, ctx.output, ctx.grad = inputs
        kept = x if ctx.name in ("gelu", "gelu_tanh", "silu") else output
        ctx.save_for_backward(kept)
        ctx.save_for_forward(kept)

    @staticmethod
    def tangent(ctx: Any, *tangents: Any) -> Tensor:
        slope = _gradient(tangents[0], ctx.saved_tensors[0], ctx.name, ctx.mult, ctx.output)
        return slope * (ctx.mult * ctx.output)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = _gradient(grads[0], ctx.saved_tensors[0], ctx.name, ctx.mult, ctx.output)
        return _times(found, ctx.grad), None, None, None, None


class _Gated(torch.autograd.Function):
    """The autograd Function of x silu(mult gate) * output, with separate factors on both gradients, folded into their
    products."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, gate: Tensor, mult: float, output: float, grad_x: float, grad_gate: float
    ) -> tuple[Tensor, Tensor]:
        gated = F.silu(_sharpened(gate, mult))
        return apart(_product(gated, x, output)), gated

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, gate, ctx.mult, ctx.output, ctx.grad_x, ctx.grad_gate = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, gate, output[1])
        ctx.save_for_forward(x, gate, output[1])

    @staticmethod
    def tangent(ctx: Any, *tangents: Any) -> tuple[Tensor, None]:
        x, gate, gated = ctx.saved_tensors
        of_x, of_gate = tangents[:2]
        found = gated * 0 if of_x is None else of_x * gated
        if of_gate is not None:
            found = found + x * ctx.mult * _silu_gradient(of_gate, gate * ctx.mult)
        return found * ctx.output, None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, gated = ctx.saved_tensors
        inner = _sharpened(gate, ctx.mult)
        grad_x = grad_gate = None
        if ctx.needs_input_grad[0]:
            gated = F.silu(inner) if torch.is_grad_enabled() else gated  # for a derivative of this gradient
            grad_x = _product(grads[0], gated, ctx.grad_x / ctx.mult)
        if ctx.needs_input_grad[1]:
            grad_gate = _silu_gradient(_product(grads[0], x, ctx.grad_gate), inner)
        return grad_x, grad_gate, None, None, None, None


def _product(x: Tensor, y: Tensor, factor: float) -> Tensor:
    return torch.addcmul(x.new_zeros(()), x, y, value=factor)


class _Softmax(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dim: int, dtype: torch.dtype, output: float, grad: float) -> Tensor:
        wide = torch.promote_types(torch.promote_types(x.dtype, dtype), torch.float32)
        return apart(_times(torch.softmax(x, dim, dtype=wide), output).to(dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.dim, _, ctx.output, ctx.grad = inputs
        ctx.dtype = x.dtype
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def tangent(ctx: Any, *tangents: Any) -> Tensor:
        (y,) = ctx.saved_tensors
        t = tangents[0].to(y.dtype)
        return y * (t - (y * t).sum(ctx.dim, keepdim=True) / ctx.output)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wide = torch.promote_types(torch.promote_types(ctx.dtype, grads[0].dtype), torch.float32)
        weights = ctx.saved_tensors[0].to(wide) / ctx.output
        found = _aten._softmax_backward_data(grads[0].to(wide), weights, ctx.dim, wide)
        return _times(found, ctx.grad).to(ctx.dtype), None, None, None, None
